"""Optimizers of Keras that reduce the gradients before they apply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collectives.horovod.ops import Op
from collectives.horovod.process_sets import ProcessSet
from collectives.reductions.reduction import ReduceOp
from strategies.tensorflow.horovod.compression import Compression, Compressor
from strategies.tensorflow.horovod.gradients import GradientReduction, variables_of


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = ReduceOp.MEAN,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A new optimizer like this one of Keras, which reduces gradients over the ranks first.

    It is of a class of the same name, and a saved model has the ordinary class. Gradients are
    clipped after they are reduced. The state of an optimizer that was built is taken over. A model
    must be compiled without `jit_compile`, as Keras does on CPUs, and with loss scaling the
    optimizer that is given is a `keras.optimizers.LossScaleOptimizer`.

    With `backward_passes_per_step` the gradients of so many calls are added up on each rank, then
    reduced and applied; `average_aggregated_gradients` divides their sum by their number, and
    `iterations` counts all calls. The other arguments are those of `DistributedGradientTape`, or
    have no effect.

    Raises TypeError for an optimizer that is none of Keras; ValueError for wrong arguments, and
    where Keras runs on another backend than TensorFlow.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: must be one of Keras")
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: must be on TensorFlow. Use a strategy,"
            " strategies.MultiWorkerMirroredStrategy"
        )
    if isinstance(optimizer, _Distributed):
        raise ValueError("optimizer: is a DistributedOptimizer already")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step}: must be at least 1")
    kind = type(optimizer)
    made: Any = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    distributed = made.from_config(optimizer.get_config())
    reduction = GradientReduction(
        *(compression, sparse_as_dense, op, gradient_predivide_factor, process_set),
        scale_local_gradients,
    )
    passes = backward_passes_per_step
    distributed.hvd = _Step(reduction, passes, 1 / passes if average_aggregated_gradients else 1.0)
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        for own, given in zip(distributed.variables, optimizer.variables, strict=True):
            own.assign(given)
    return distributed


def PartialDistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any, *given: Any, local_layers: Any = None, **named: Any
) -> Any:
    """As `DistributedOptimizer`; the gradients of `local_layers` stay each rank's own."""
    distributed = DistributedOptimizer(optimizer, *given, **named)
    for variable in variables_of(local_layers):
        distributed.register_local_var(variable)
    return distributed


class _Distributed:
    """What is added to the class of the optimizer."""

    hvd: _Step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """As `keras.optimizers.Optimizer.apply`, of the gradients over the ranks. Collective."""
        base: Any = super()
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(given)
        return self.hvd.take(self, base.apply, list(grads), variables)

    def register_local_var(self, var: Any) -> None:
        """Leave this variable's gradient each rank's own."""
        self.hvd.reduction.leave_local(var)

    _trainable_variables: Any


class _Step:
    """The reduction of the gradients of one or several passes."""

    def __init__(self, reduction: GradientReduction, passes: int, factor: float) -> None:
        self.reduction = reduction
        self._passes, self._factor = passes, factor
        self._sums: list[Any] = []
        self._count: Any = None

    def take(self, optimizer: Any, apply: Any, grads: list[Any], variables: list[Any]) -> Any:
        """Reduce and apply the gradients, or add them up."""
        if self._passes == 1:
            return apply(self.reduction.reduce(grads, variables), variables)
        if not self._sums:
            with tf.init_scope():
                if not optimizer.built:
                    optimizer.build(variables)
                self._sums = [tf.Variable(tf.zeros(each.shape, each.dtype)) for each in variables]
                self._count = tf.Variable(0)
        for total, grad in zip(self._sums, grads, strict=True):
            if grad is not None:
                total.assign_add(tf.convert_to_tensor(grad))
        self._count.assign_add(1)
        present = [grad is not None for grad in grads]
        return tf.cond(
            self._count < self._passes,
            lambda: tf.cast(optimizer.iterations.assign_add(1), tf.int64) * 0,
            lambda: self._apply_sums(apply, present, variables),
        )

    def _apply_sums(self, apply: Any, present: list[bool], variables: list[Any]) -> Any:
        sums = [
            each.value() * self._factor if there else None
            for each, there in zip(self._sums, present, strict=True)
        ]
        apply(self.reduction.reduce(sums, variables), variables)
        for each in self._sums:
            each.assign(tf.zeros_like(each))
        self._count.assign(0)
        return tf.constant(0, tf.int64)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Compressor = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved model of Keras, whose optimizer is a `DistributedOptimizer` with the saved state.

    custom_optimizers: classes of optimizers of the program's own.
    """
    objects = {each.__name__: each for each in custom_optimizers or ()} | (custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
