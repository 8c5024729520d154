"""LocalSGDStrategy: the ranks train independently, and average their variables every N steps."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from collectives import Communicator
from strategies.core.same_error import refuse_differences
from strategies.synchronous import mirrored
from strategies.tensorflow.cluster import resolver_of
from strategies.tensorflow.extended import CollectiveExtended, local_value
from strategies.tensorflow.input import distribute, joined
from strategies.tensorflow.statistics import enclosing_function
from strategies.tensorflow.strategy import Strategy


class LocalSGDStrategy(Strategy):
    """Independent training, in which variables are averaged every `sync_every` steps.

    As `strategies.LocalSGDStrategy`, for models of TensorFlow and Keras. A step is one `run` in
    which an optimizer applies gradients: those of the replica alone. After `sync_every` steps the
    ranks average all variables of floats that training changes: weights, and statistics such as
    those of batch normalization. Slots of optimizers stay each rank's own. `num_replicas_in_sync`
    is 1, so that `tf.nn.compute_average_loss` divides by the replica's own batch. A distributed
    dataset's batches are for one replica each. `reduce`, `gather` and metrics that are read outside
    of `run` are over all ranks. Variables that are read there are the rank's own: call
    `synchronize` at the end of training, and before a checkpoint is saved.

    Raises ValueError on every rank where `sync_every` is less than 1 or differs. Collective.
    """

    def __init__(
        self,
        sync_every: int,
        *,
        cluster_resolver: Any = None,
        communicator: Communicator | None = None,
    ) -> None:
        arrays = mirrored.MultiWorkerMirroredStrategy(
            resolver_of(cluster_resolver), communicator=communicator
        )
        given = f"sync_every={sync_every!r}"
        refuse_differences(
            arrays.communicator, "LocalSGDStrategy: the ranks' arguments differ", given
        )
        self.sync_every = operator.index(sync_every)
        if self.sync_every < 1:
            raise ValueError(f"LocalSGDStrategy: {given}: must be at least 1")
        super().__init__(arrays)

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call the function as this rank's replica; average where a round of steps ends."""
        with self.scope(), self.extended.step():
            return super().run(fn, args, kwargs, options)

    def _make_extended(self, device: str) -> CollectiveExtended:
        return LocalExtended(self, self._arrays, device)

    def synchronize(self) -> None:
        """Average the variables now, and begin a new round. Collective."""
        self.extended.average()


class LocalExtended(CollectiveExtended):
    """One replica in sync with itself alone, and averages over the ranks."""

    def __init__(self, strategy: LocalSGDStrategy, arrays: Any, device: str) -> None:
        super().__init__(strategy, arrays, device)
        self._every = strategy.sync_every
        self._variables: list[weakref.ref[Any]] = []
        with tf.init_scope(), tf.device(device):
            self._steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="local_steps")
            # Of TensorFlow, since calls of a traced function execute no Python.
            self._stepped = tf.Variable(False, trainable=False, name="local_stepped")

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

    @contextmanager
    def step(self) -> Iterator[None]:
        """The body of a `run`, after which the step is counted if there was one."""
        yield

        def end() -> Any:
            self._stepped.assign(False)
            self._end_step()
            return tf.constant(0)

        if not tf.executing_eagerly():
            tf.cond(self._stepped, end, lambda: tf.constant(0))
        elif self._stepped:
            end()

    def statistic_changed(self, variable: Any) -> None:
        """Nothing: statistics are averaged with the weights."""

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> list[Any]:
        if not self.statistics.running:
            return super()._batch_reduce_to(reduce_op, pairs, options)
        self._note_step()
        return [local_value(value) for value, _ in pairs]

    def _note_step(self) -> None:
        if tf.executing_eagerly():
            self._stepped.assign(True)
            return
        # A branch that one rank does not execute is a step there, too: the ranks count the same.
        with enclosing_function(tf.compat.v1.get_default_graph()).as_default():
            self._stepped.assign(True)

    def _end_step(self) -> None:
        steps = self._steps.assign_add(1)
        due = tf.equal(steps % self._every, 0)
        if tf.executing_eagerly():
            if due:
                self.average()
            return

        def average() -> Any:
            self.average()
            return tf.constant(0)

        tf.cond(due, average, lambda: tf.constant(0))

    def average(self) -> None:
        """The mean over the ranks of all variables that training changes."""
        self._steps.assign(0)
        made = [each for reference in self._variables if (each := reference()) is not None]
        trained = [each for each in made if each.trainable or each.is_statistic]
        if trained and self._size > 1:
            own = [each._primary.read_value() for each in trained]
            means = self.operations.reduce(own, mean=True)
            for variable, mean in zip(trained, means, strict=True):
                variable._primary.assign(mean)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute(self, joined(dataset, self._size), options)
