"""Outer steps of local SGD (DiLoCo; Douillard et al. 2023, arXiv:2311.08105).

The outer optimizer is one of NumPy arrays, which is called when the ranks average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, distribute_utils, values, values_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.trackable import base as trackable

from strategies.core.storage import LocalStorage
from strategies.core.values import Array
from strategies.optimizers import Optimizer
from strategies.tensorflow.operations import Operations
from strategies.tensorflow.variables import (
    LocalVariable,
    ReplicatedVariable,
    added_by_keras,
    raw_value,
)


def _own(value: Any) -> Any:
    return distribute_utils.select_replica(0, value)


class AveragedVariable(ReplicatedVariable):
    """A variable that the ranks change independently, and average."""

    outer_value: LocalStorage | None = None
    """The value that a round began with; the optimizer's slots belong to the storage."""

    outer_began = False
    """Whether a step of the present round, or of its part after an assignment, has begun."""

    outer_changed = False
    """Whether it was changed outside of steps since the last averaging."""

    outer_copy: Any = None
    """A TensorFlow variable by which changes outside of steps are applied to that value."""

    def assign(self, value: Any, *options: Any, **named: Any) -> Any:
        """As of `tf.Variable`; outside of `run` the variable's round begins anew with this value.

        What Keras's `assign_add` or `assign_sub` assigns is added to what the round began with.
        """
        addend = None if self.outer_value is None else added_by_keras(self)
        if addend is None:
            self._change_outer()
        else:
            self._change_outer(lambda copy: copy.assign_add(addend))
        return super().assign(value, *options, **named)

    def assign_add(self, value: Any, *options: Any, **named: Any) -> Any:
        """As of `tf.Variable`; outside of `run` it is added to what the round began with, too."""
        self._change_outer(lambda copy: copy.assign_add(_own(value)))
        return super().assign_add(value, *options, **named)

    def assign_sub(self, value: Any, *options: Any, **named: Any) -> Any:
        """As of `tf.Variable`; outside of `run` as `assign_add`."""
        self._change_outer(lambda copy: copy.assign_sub(_own(value)))
        return super().assign_sub(value, *options, **named)

    def _change_outer(self, change: Callable[[Any], object] | None = None) -> None:
        if not values_util.is_saving_non_distributed():
            self._distribute_strategy.extended.change_outer(self, change)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        def saveable(name: str = self._common_name) -> _Saveable:
            return _Saveable(self, self._primary, name)

        return {trackable.VARIABLE_VALUE_KEY: saveable}


class SummedVariable(LocalVariable):
    """A variable of LocalSGDStrategy whose ranks' values may be added up when it is read.

    What is assigned outside of `run`, or restored, is divided by the ranks then: TensorFlow divides
    by the replicas in sync, of which there is one.
    """

    def assign(self, value: Any, *options: Any, **named: Any) -> Any:
        """As of `tf.Variable`."""
        with distribute_lib.enter_or_assert_strategy(self._distribute_strategy):
            updates = values_util.in_replica_update_context()
            apart = updates or values_util.is_saving_non_distributed()
            if tf.distribute.in_cross_replica_context() and not apart:
                value = self._part(value)
        return super().assign(value, *options, **named)

    def _part(self, value: Any) -> Any:
        if self._aggregation != tf.VariableAggregation.SUM:
            return value
        ranks = self._distribute_strategy.communicator.size
        return tf.cast(tf.convert_to_tensor(value) / ranks, self.dtype)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        def saveable(name: str = self._common_name) -> _SummedSaveable:
            return _SummedSaveable(self, name)

        return {trackable.VARIABLE_VALUE_KEY: saveable}


class _SummedSaveable(values._SyncOnReadSaveable):
    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        part = self._sync_on_read_variable._part(restored_tensors[0])
        return super().restore([part], restored_shapes)


class _Saveable(values._MirroredSaveable):
    def restore(self, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        self._mirrored_variable._change_outer()
        return super().restore(restored_tensors, restored_shapes)


class OuterSteps:
    """The values that weights have at the beginning of a round, and the optimizer that moves them.

    Statistics, which are not trained, are replaced by their means.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def begin(self, operations: Operations, variables: Sequence[Any]) -> None:
        """Before a step: keep each weight, if it is the weight's first one of the round."""
        weights = [each for each in variables if each.trainable and each.is_trained()]

        def call(*arrays: Array) -> Sequence[Array]:
            for variable, array in zip(weights, arrays, strict=True):
                if not variable.outer_began:
                    self._keep(variable, array)
                    variable.outer_began = True
            return arrays

        if weights:
            own = list(map(raw_value, weights))
            operations.execute(call, own, [each.shape for each in weights])

    def change(
        self, operations: Operations, variable: Any, change: Callable[[Any], object] | None
    ) -> None:
        """Outside of steps: change what the round began with, too, since all replicas do so.

        The function changes a variable of TensorFlow, a copy. Where it is None the variable gets
        another value, with which its round begins anew.
        """
        if change is None:

            def begin_anew(nothing: Array) -> list[Array]:
                variable.outer_changed, variable.outer_began = True, False
                return [nothing]

            operations.execute(begin_anew, [tf.constant(0)], [tf.TensorShape([])])
            return
        if variable.outer_copy is None:
            with tf.init_scope(), tf.device(variable._primary.device):
                zeros = tf.zeros([each or 0 for each in variable.shape], variable.dtype)
                # Of no strategy, whose scope may surround this.
                variable.outer_copy = ResourceVariable(zeros, trainable=False, shape=variable.shape)

        def load(own: Array) -> list[Array]:
            # TensorFlow may keep the memory that it gets.
            return [self._value(variable, own).copy()]

        def store(array: Array) -> list[Array]:
            variable.outer_changed = True
            if variable.outer_began:
                self._keep(variable, array)
            return [array]

        own = variable._primary.read_value()
        variable.outer_copy.assign(operations.execute(load, [own], [variable.shape])[0])
        change(variable.outer_copy)
        operations.execute(store, [variable.outer_copy.read_value()], [variable.shape])

    def values_of(
        self, variables: Sequence[Any], own: Sequence[Array], chosen: Sequence[Any]
    ) -> list[Array]:
        """What the round began with, of the chosen variables; `own` are all ones' present values.

        Where it was changed outside of steps it may differ between ranks: `step` takes the means.
        """
        every = zip(variables, own, chosen, strict=True)
        return [self._value(each, array) for each, array, choice in every if choice]

    def _value(self, variable: Any, own: Array) -> Array:
        """A rank that has taken no step since has the value that the round began with."""
        return variable.outer_value.view() if variable.outer_began else own

    def _keep(self, variable: Any, array: Array) -> None:
        if variable.outer_value is None or variable.outer_value.shape != array.shape:
            variable.outer_value = LocalStorage(array.copy())
        else:
            variable.outer_value.own_part()[...] = array

    def step(
        self,
        variables: Sequence[Any],
        own: Sequence[Array],
        means: Sequence[Array],
        moved: Sequence[bool],
        chosen: Sequence[Any],
        began_with: Sequence[Array],
    ) -> list[Array]:
        """The variables' values in the next round; the last are the means of `values_of`.

        moved: of each variable, whether any rank has taken a step with it.
        """
        weights, agreed = [], iter(began_with)
        for number, variable in enumerate(variables):
            began = next(agreed) if chosen[number] else self._value(variable, own[number])
            variable.outer_changed = variable.outer_began = False
            if variable.trainable and moved[number]:
                weights.append(number)
                self._keep(variable, began)
        storages = [variables[number].outer_value for number in weights]
        gradients = [
            storage.view() - means[number]
            for number, storage in zip(weights, storages, strict=True)
        ]
        if storages:
            self._optimizer.update_clipped(self._optimizer.clipped(gradients), storages)
        results = list(means)
        for number, storage in zip(weights, storages, strict=True):
            results[number] = storage.read()
        return results
