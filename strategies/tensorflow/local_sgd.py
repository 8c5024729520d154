"""LocalSGDStrategy: the ranks train independently, and average their variables periodically."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from collectives import Communicator, MismatchError
from collectives.errors import in_step
from strategies.core.options import ReduceOp
from strategies.core.values import Array
from strategies.optimizers import Optimizer
from strategies.synchronous import mirrored
from strategies.synchronous.local_sgd.rounds import agreed_rounds
from strategies.tensorflow.cluster import resolver_of
from strategies.tensorflow.empty_batches import sums_of_batches
from strategies.tensorflow.extended import CollectiveExtended
from strategies.tensorflow.graphs import current_graph, enclosing_function
from strategies.tensorflow.input import distribute_whole_batches
from strategies.tensorflow.operations import local_value
from strategies.tensorflow.outer_steps import AveragedVariable, OuterSteps, SummedVariable
from strategies.tensorflow.statistics import execute_if
from strategies.tensorflow.strategy import Strategy
from strategies.tensorflow.variables import CLASSES, summed_by_optimizer

# In place of a variable's flag: it is gone, or younger than the trace; training doesn't change it.
_UNKNOWN, _UNTRAINED = -2, -1
# Sums of these: changed outside of steps, and known to a step since the value that it began with.
_CHANGED, _BEGAN = 1, 2


class LocalSGDStrategy(Strategy):
    """Independent training, in which variables are averaged every N steps or T seconds.

    As `strategies.LocalSGDStrategy`, for models of TensorFlow and Keras. A step is one `run` in
    which an optimizer applies gradients: those of the replica alone. After `sync_every` steps the
    ranks average all variables of floats that training changes: weights, and statistics such as
    those of batch normalization. With `sync_seconds` the ranks agree at each averaging on the
    number of steps until the next, from the slowest one's speed; the first comes after one step.
    With `outer_optimizer`, of `strategies.optimizers` (DiLoCo's is
    `SGD(0.7, momentum=0.9, nesterov=True)`), weights are not replaced by their means: the values
    that the round began with, minus the means, are gradients by which it moves these values. Its
    slots are not part of TensorFlow's checkpoints.

    Slots of optimizers are each rank's own; `fit` begins with the chief's. `num_replicas_in_sync`
    is 1, so that `tf.nn.compute_average_loss` divides by the replica's own batch. A distributed
    dataset's batches are for one replica each. `all_reduce` and `all_gather` within `run` are of
    the one replica; `reduce`, `gather` and metrics that are read outside of `run` are over all
    ranks. Variables that are read there are the rank's own: call `synchronize` at the end of
    training. Variables are averaged too, and a new round begins, where all ranks save a checkpoint
    or a model, at the beginning and the end of Keras's `fit`, before its validations, and at the
    end of each epoch if a callback saves the model.

    Raises ValueError unless one of `sync_every` (from 1) and `sync_seconds` (above 0) is given, and
    on every rank where they differ; TypeError for an outer optimizer that is none. Collective.
    """

    def __init__(
        self,
        sync_every: int | None = None,
        sync_seconds: float | None = None,
        outer_optimizer: Optimizer | None = None,
        *,
        cluster_resolver: Any = None,
        communicator: Communicator | None = None,
    ) -> None:
        arrays = mirrored.MultiWorkerMirroredStrategy(
            resolver_of(cluster_resolver), communicator=communicator
        )
        self.rounds = agreed_rounds(arrays.communicator, sync_every, sync_seconds, outer_optimizer)
        self.outer = None if outer_optimizer is None else OuterSteps(outer_optimizer)
        super().__init__(arrays)

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call the function as this rank's replica; average where a round of steps ends."""
        with self.scope():
            result = super().run(fn, args, kwargs, options)
            self.extended.end_run()
            return result

    def _make_extended(self, device: str) -> CollectiveExtended:
        return LocalExtended(self, self.array_strategy, device)

    def synchronize(self) -> None:
        """Average the variables now, and begin a new round. Collective."""
        self.extended.average()


class LocalExtended(CollectiveExtended):
    """One replica in sync with itself alone, and averages over the ranks."""

    _classes: ClassVar[Mapping[Any, Any]] = {
        **CLASSES,
        tf.VariableSynchronization.ON_WRITE: AveragedVariable,
        tf.VariableSynchronization.ON_READ: SummedVariable,
    }

    def __init__(self, strategy: LocalSGDStrategy, arrays: Any, device: str) -> None:
        super().__init__(strategy, arrays, device)
        self._rounds, self._outer = strategy.rounds, strategy.outer
        self._variables: list[weakref.ref[Any]] = []
        with tf.init_scope(), tf.device(device):
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="local_steps")
            self._length = tf.Variable(
                self._rounds.length, trainable=False, dtype=tf.int64, name="local_round"
            )
            # Of TensorFlow, since calls of a traced function execute no Python.
            self._stepped = tf.Variable(False, trainable=False, name="local_stepped")
            self._had_empty = tf.Variable(False, trainable=False, name="local_had_empty_batch")

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> int:
        return 0

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if variable.dtype.is_floating and variable._is_mirrored():
            self._variables.append(weakref.ref(variable))
        return variable

    def change_outer(self, variable: Any, change: Callable[[Any], object] | None) -> None:
        """Outside of `run`, change the value that a round began with, as of `OuterSteps.change`."""
        if self._outer is None or self.statistics.running:
            return
        if variable.trainable and variable.dtype.is_floating:
            self._outer.change(self.operations, variable, change)

    def end_run(self) -> None:
        """Count the step, if the `run` that ends had one."""

        def end() -> None:
            self._stepped.assign(False)
            execute_if(self._steps.assign_add(1) >= self._length, self.average)

        execute_if(self._stepped, end)

    def statistic_changed(self, variable: Any) -> None:
        """Nothing: statistics are averaged with the weights."""

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> list[Any]:
        if not self.statistics.running:
            return super()._batch_reduce_to(reduce_op, pairs, options)
        if summed_by_optimizer():
            self._begin_step()
        empty = self.empty_batches.is_empty()
        return [_without_nan(local_value(value), empty) for value, _ in pairs]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        if self.statistics.running:
            return local_value(value)
        return super()._gather_to_implementation(value, destinations, axis, options)

    def gradient_sums(self, gradients: Sequence[Any], rows: Any, of: Hashable = None) -> list[Any]:
        """The gradients themselves, which are those of a step; zeros where there are no rows."""
        self._begin_step()
        if rows is None:
            return list(gradients)
        return [tf.where(rows > 0, each, tf.zeros_like(each)) for each in gradients]

    def _begin_step(self) -> None:
        self._note_step()
        if self._outer is not None:
            self._outer.begin(self.operations, self._trained())

    def _note_step(self) -> None:
        graph = enclosing_function(current_graph(), self.empty_batches.graph_of_run)
        # A branch that one rank does not execute is a step there, too: the ranks count the same.
        with nullcontext() if graph is None else graph.as_default():
            self._stepped.assign(True)
            self._had_empty.assign(tf.logical_or(self._had_empty, self.empty_batches.is_empty()))

    def average(self) -> None:
        """Average all variables that training changes over the ranks, and begin a new round."""
        present = self._present()
        members = [(place, each) for place, each in present if _is_changed(each)]
        untrained = [place for place, each in present if not _is_changed(each)]
        places, trained = [place for place, _ in members], [each for _, each in members]
        own = [each._primary.read_value() for each in trained]

        def call(steps: Array, *given: Array) -> list[Any]:
            *arrays, had_empty = given
            self._rounds.step(int(steps))
            # All ranks have made equally many by now, though one may have traced this earlier.
            flags = np.full(len(self._variables), _UNKNOWN)
            flags[untrained] = _UNTRAINED
            flags[places] = [
                _CHANGED * each.outer_changed + _BEGAN * each.outer_began for each in trained
            ]
            own = np.array([[self._rounds.proposal(), *flags]])
            proposals, *every = self.operations.communicator.all_gather(own).T.tolist()
            self._rounds.begin(proposals)
            _refuse_untrained(every)
            kept = [at for at, place in enumerate(places) if min(every[place]) >= 0]
            means = self._averaged(
                [trained[at] for at in kept],
                [arrays[at] for at in kept],
                [every[places[at]] for at in kept],
                had_empty=bool(had_empty),
            )
            for at, mean in zip(kept, means, strict=True):
                arrays[at] = mean
            return [np.int64(self._rounds.length), *arrays]

        values = [self._steps.read_value(), *own, self._had_empty.read_value()]
        shapes = [each.shape for each in values[:-1]]
        length, *averaged = self.operations.execute(call, values, shapes)
        self._had_empty.assign(False)
        self._steps.assign(0)
        self._length.assign(length)
        for variable, value in zip(trained, averaged, strict=True):
            variable._primary.assign(value)

    def _averaged(
        self,
        trained: list[Any],
        arrays: list[Array],
        flags: Sequence[Sequence[int]],
        *,
        had_empty: bool,
    ) -> list[Array]:
        """The new values of variables that all ranks have; `flags` are the ranks' of each."""
        outer = self._outer
        moved = [any(flag & _BEGAN for flag in each) for each in flags]
        chosen = [
            move and any(flag & _CHANGED for flag in each)
            for move, each in zip(moved, flags, strict=True)
        ]
        began = [] if outer is None else outer.values_of(trained, arrays, chosen)
        means = self._replication.all_reduce_arrays([*arrays, *began], ReduceOp.MEAN)
        count = len(arrays)
        means, began = means[:count], means[count:]
        self._replace_nan(trained, arrays, means, had_empty)
        return means if outer is None else outer.step(trained, arrays, means, moved, chosen, began)

    def _replace_nan(
        self, trained: list[Any], own: list[Array], means: list[Array], had_empty: bool
    ) -> None:
        """Replace means of statistics by those of the ranks without empty batches."""
        numbers = [number for number, each in enumerate(trained) if not each.trainable]
        if any(np.isnan(means[number]).any() for number in numbers):
            statistics = [own[number] for number in numbers]
            found = sums_of_batches(self._replication, statistics, had_empty)
            for number, total in zip(numbers, found, strict=True):
                means[number] = np.asarray(total / self._size, total.dtype)

    def _trained(self) -> list[Any]:
        return [each for _, each in self._present() if _is_changed(each)]

    def _present(self) -> list[tuple[int, Any]]:
        """The variables, with their numbers, which are equal on all ranks.

        Each rank's garbage collector decides when those of a model that was dropped are gone.
        """
        made = enumerate(reference() for reference in self._variables)
        return [(place, each) for place, each in made if each is not None]

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute_whole_batches(self, dataset, options)


def _is_changed(variable: Any) -> bool:
    """Whether training changes it."""
    return bool(variable.trainable or variable.is_statistic)


def _refuse_untrained(flags: Sequence[Sequence[int]]) -> None:
    """A MismatchError, on every rank, where training changes a variable on some ranks only."""
    for number, each in enumerate(flags):
        apart = [rank for rank, flag in enumerate(each) if flag == _UNTRAINED]
        if apart and max(each) >= 0:
            text = (
                f"LocalSGDStrategy: variable {number} is changed by training, not on ranks {apart}"
            )
            raise in_step(MismatchError(text))


def _without_nan(value: Any, empty: Any) -> Any:
    """A tensor in which NaN is replaced by 0 if `empty`, a bool or a tensor of one."""
    if empty is False or isinstance(value, tf.IndexedSlices) or not value.dtype.is_floating:
        return value
    # No branch, which would take longer for small tensors.
    absent = tf.logical_and(empty, tf.math.is_nan(value))
    return tf.where(absent, tf.zeros_like(value), value)
