"""Optimizers of Keras that reduce the gradients before they apply them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from collectives.horovod.joining import between_steps
from collectives.horovod.ops import Op
from collectives.horovod.process_sets import ProcessSet
from collectives.reductions.reduction import ReduceOp
from strategies.keras.arguments import settings_of
from strategies.tensorflow.horovod.compression import Compression, Compressor
from strategies.tensorflow.horovod.gradients import GradientReduction, key_of, variables_of


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
    """The optimizer, which reduces gradients over the ranks from now on, before it applies them.

    Its method `apply` is replaced; its class, and what a model saves, stay Keras's. Gradients are
    clipped after they are reduced. A model must be compiled without `jit_compile`, as Keras does on
    CPUs. With loss scaling, it is the `keras.optimizers.LossScaleOptimizer` that is given.

    With `backward_passes_per_step` the gradients of so many calls are added up on each rank, then
    reduced and applied; `average_aggregated_gradients` divides their sum by their number, and
    `iterations` counts all calls. The other arguments are those of `DistributedGradientTape`, or
    have no effect. `register_local_var(variable)` leaves a variable's gradient each rank's own.

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
    if is_distributed(optimizer):
        raise ValueError("optimizer: is a DistributedOptimizer already")
    for device in (device_dense, device_sparse):
        if not isinstance(device, str):
            raise TypeError(f"{device=}: must be a str; compression is the sixth argument")
    passes = backward_passes_per_step
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: must be at least 1")
    if passes > 1 and optimizer.gradient_accumulation_steps:
        raise ValueError("backward_passes_per_step: must be 1 with gradient_accumulation_steps")
    reduction = GradientReduction(
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    step = _Step(optimizer, reduction, passes, average_aggregated_gradients)
    vars(optimizer).update(apply=step.take, register_local_var=reduction.leave_local)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether the optimizer reduces gradients."""
    return isinstance(getattr(vars(optimizer).get("apply"), "__self__", None), _Step)


def PartialDistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: Any, *given: Any, local_layers: Any = None, **named: Any
) -> Any:
    """As `DistributedOptimizer`; the gradients of `local_layers` stay each rank's own."""
    local = variables_of(local_layers)
    distributed = DistributedOptimizer(optimizer, *given, **named)
    for variable in local:
        distributed.register_local_var(variable)
    return distributed


class _Step:
    """An optimizer's step: the reduction of the gradients of one or several passes."""

    def __init__(
        self, optimizer: Any, reduction: GradientReduction, passes: int, averages: bool
    ) -> None:
        self._optimizer, self._apply_own = optimizer, type(optimizer).apply
        self._reduction, self._passes = reduction, passes
        self._factor = 1 / passes if averages else 1.0
        how = f"{passes} passes per step{', averaged' if passes > 1 and averages else ''}"
        self._what = f", {how}, {settings_of(optimizer)}"
        self._sums: dict[int, tuple[Any, Any]] = {}
        """Each variable that has had a gradient, and the sum since the last step."""
        self._count: Any = None
        self._known: Any = None
        """How many sums there are."""
        if reduction.of_all:
            between_steps.add(self)

    def all_joined(self) -> None:
        """Begin a step: the passes since the last one differ in number."""
        if self._count is not None:
            self._begin_step()

    def take(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """As `keras.optimizers.Optimizer.apply`, of the gradients over the ranks. Collective."""
        if trainable_variables is None and not self._optimizer.built:
            return self._apply_own(self._optimizer, grads)  # raises Keras's error
        known = self._optimizer._trainable_variables
        variables = list(known if trainable_variables is None else trainable_variables)
        if self._passes == 1:
            reduced = self._reduction.reduce(list(grads), variables, self._what)
            return self._apply_own(self._optimizer, reduced, variables)
        with tf.init_scope():
            if not self._optimizer.built:
                self._optimizer.build(variables)
            if self._count is None:
                self._count, self._known = tf.Variable(0), tf.Variable(0)
        trained = {key_of(each) for each in self._optimizer._trainable_variables}
        for grad, variable in zip(grads, variables, strict=True):
            if key_of(variable) not in trained:
                raise ValueError(
                    f"{variable.name!r} is none of the variables that the optimizer was built for"
                )
            if grad is not None:
                self._sum_of(variable).assign_add(tf.convert_to_tensor(grad))
        self._count.assign_add(1)
        tf.cond(self._count < self._passes, self._count_only, self._apply_sums)
        return None

    def _sum_of(self, variable: Any) -> Any:
        key = key_of(variable)
        if key not in self._sums:
            with tf.init_scope():
                self._sums[key] = variable, tf.Variable(tf.zeros(variable.shape, variable.dtype))
                self._known.assign(len(self._sums))
        return self._sums[key][1]

    def _count_only(self) -> Any:
        self._optimizer.iterations.assign_add(1)
        return tf.constant(0)

    def _apply_sums(self) -> Any:
        # In one order on all ranks, and with those that have had no gradient on this one.
        variables = list(self._optimizer._trainable_variables)
        found = [self._sums.get(key_of(each), (each, None))[1] for each in variables]
        sums = [each for each in found if each is not None]
        complete = tf.debugging.assert_equal(
            self._known,
            len(sums),
            "backward_passes_per_step: a variable had its first gradient after this tf.function was"
            " traced: each function must give the gradients of all variables",
        )
        with tf.control_dependencies([complete] if tf.inside_function() else []):
            given = [None if each is None else each.value() * self._factor for each in found]
            reduced = self._reduction.reduce(given, variables, self._what)
            pairs = [each for each in zip(reduced, variables, strict=True) if each[0] is not None]
            grads, applied = [grad for grad, _ in pairs], [variable for _, variable in pairs]
            self._apply_own(self._optimizer, grads, applied)
            self._begin_step()
        return tf.constant(0)

    def _begin_step(self) -> None:
        for _, each in self._sums.values():
            each.assign(tf.zeros_like(each))
        self._count.assign(0)


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
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
