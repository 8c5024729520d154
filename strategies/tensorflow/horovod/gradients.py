"""Gradients that are reduced in one call, and the tape that does so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collectives.horovod.ops import Op, op_of
from collectives.horovod.process_sets import ProcessSet, global_process_set
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.horovod.calls import names_of
from strategies.tensorflow.horovod.compression import Compression, Compressor, check_compressor
from strategies.tensorflow.horovod.reductions import reduce_all


class GradientReduction:
    """How gradients are reduced, and which are not."""

    def __init__(
        self,
        *,
        compression: Compressor,
        sparse_as_dense: bool,
        op: Op,
        gradient_predivide_factor: float,
        process_set: ProcessSet | None,
        scale_local_gradients: bool,
    ) -> None:
        """As `DistributedGradientTape`."""
        self._op = op_of(op, None)
        if gradient_predivide_factor != 1.0 and self._op is not ReduceOp.MEAN:
            raise ValueError(
                f"gradient_predivide_factor={gradient_predivide_factor}: must be with op=Average"
            )
        self._compression = check_compressor(compression)
        self._sparse_as_dense = sparse_as_dense
        self._process_set = global_process_set if process_set is None else process_set
        self._scales_local = scale_local_gradients
        self._local: dict[int, Any] = {}

    @property
    def of_all(self) -> bool:
        """Whether the gradients of all ranks are reduced, which may join."""
        return self._process_set.process_set_id == 0

    def leave_local(self, variable: Any) -> None:
        """Don't reduce this variable's gradient."""
        self._local[key_of(variable)] = variable

    def is_local(self, variable: Any) -> bool:
        """Whether the variable's gradient is not reduced."""
        return key_of(variable) in self._local

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], what: str = ""
    ) -> list[Any]:
        """The gradients over the ranks; None where there is none.

        A MismatchError on every rank where the ranks have them for variables of other names, or
        another text `what`.
        """
        pairs = list(zip(gradients, variables, strict=True))
        found = [self._of_this_rank(*each) for each in pairs]
        if not self._process_set.included() or self._process_set.size() == 1:
            return found
        local = [number for number, each in enumerate(variables) if self.is_local(each)]
        absent = [number for number, each in enumerate(gradients) if each is None]
        places = sorted({*range(len(pairs))} - {*local, *absent})
        reduced = reduce_all(
            [self._dense(gradients[place]) for place in places],
            self._op,
            comm=self._process_set.comm(),
            compression=self._compression,
            call="the reduction of gradients",
            what=f"gradients of {names_of(variables)}, none of {absent}, local {local}{what}",
        )
        for place, each in zip(places, reduced, strict=True):
            found[place] = each
        return found

    def _dense(self, gradient: Any) -> Any:
        return tf.convert_to_tensor(gradient) if self._sparse_as_dense else gradient

    def _of_this_rank(self, gradient: Any, variable: Any) -> Any:
        """Of a local variable its share of an average, as the gradients of the others are."""
        if gradient is None or not (self._scales_local and self.is_local(variable)):
            return gradient
        size = float(self._process_set.size())
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / size
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / size


def key_of(variable: Any) -> int:
    """The same of a variable of Keras, once it is built, and of TensorFlow's within it."""
    return id(variable.value if isinstance(variable, keras.Variable) else variable)


class DistributedTape:
    """A `tf.GradientTape` whose gradients are reduced over the ranks."""

    def __init__(self, tape: Any, reduction: GradientReduction) -> None:
        """As `DistributedGradientTape`."""
        self._tape, self._reduction = tape, reduction

    def __enter__(self) -> DistributedTape:
        """Record."""
        self._tape.__enter__()
        return self

    def __exit__(self, *raised: Any) -> Any:
        """Stop recording."""
        return self._tape.__exit__(*raised)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As `tf.GradientTape.gradient`, reduced. Collective."""
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        variables = tf.nest.flatten(sources)
        # IndexedSlices are leaves.
        reduced = self._reduction.reduce(tf.nest.flatten(gradients), variables)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave this variable's gradient each rank's own."""
        self._reduction.leave_local(source)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Sequence[Any],
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """The pairs of variable and gradient that are not reduced, and those that are."""
        gradients = self.gradient(target, sources, output_gradients)
        pairs = list(zip(sources, gradients, strict=True))
        local = [each for each in pairs if self._reduction.is_local(each[0])]
        return local, [each for each in pairs if not self._reduction.is_local(each[0])]


def DistributedGradientTape(  # noqa: N802  # Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = ReduceOp.MEAN,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> DistributedTape:
    """A tape whose `gradient` reduces over the ranks, by default to the average, in few messages.

    Ranks that are not in the process set keep their gradients. The devices, groups and
    `gradient_predivide_factor` have no effect: what is compressed is divided before it is added.
    Raises ValueError for the factor with another op than Average.
    """
    reduction = GradientReduction(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    return DistributedTape(gradtape, reduction)


def PartialDistributedGradientTape(  # noqa: N802  # Horovod's name
    gradtape: Any, *given: Any, local_layers: Any = None, **named: Any
) -> DistributedTape:
    """As `DistributedGradientTape`; the gradients of `local_layers` stay each rank's own."""
    tape = DistributedGradientTape(gradtape, *given, **named)
    for variable in variables_of(local_layers):
        tape.register_local_source(variable)
    return tape


def variables_of(layers: Any) -> list[Any]:
    """What is trained of one layer, several, or None; ValueError for a layer that isn't built."""
    given = layers if isinstance(layers, list | tuple | set) else [layers]
    every = [layer for layer in given if layer is not None]
    for layer in every:
        if not layer.built:
            raise ValueError(f"local_layers: {layer.name!r} has no variables before it is built")
    return [variable for layer in every for variable in layer.trainable_weights]
