"""What the strategies of this folder have in common, as `tf.distribute.Strategy`s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from collectives import Communicator
from collectives.compression import CompressedReducer
from strategies.base.strategy import Strategy as ArrayStrategy
from strategies.core.same_error import call_on_first
from strategies.tensorflow import saving
from strategies.tensorflow.extended import CollectiveExtended
from strategies.tensorflow.operations import op_of
from strategies.tensorflow.seeds import agree_on_seed


class Strategy(tf.distribute.Strategy):
    """A `tf.distribute.Strategy` whose replicas are the ranks of a communicator."""

    def __init__(self, arrays: ArrayStrategy, device: str = "/cpu:0") -> None:
        """`arrays` is the strategy of NumPy arrays with the same ranks. Collective."""
        self.array_strategy = arrays
        """The strategy of NumPy arrays that makes this one's collective calls."""
        saving.install()
        agree_on_seed(arrays.communicator)
        super().__init__(self._make_extended(device))

    def _make_extended(self, device: str) -> CollectiveExtended:
        return CollectiveExtended(self, self.array_strategy, device)

    def scope(self) -> Any:
        """As `tf.distribute.Strategy.scope`.

        Keras models that are compiled in it train as in one process, whatever the length of
        batches: gradients and metrics count by the rows of each replica, gradients are clipped
        after their reduction. The chief alone prints and writes in `fit`, and all ranks stop at the
        same step. `predict` returns all rows on every rank, for any model made in the scope.

        Batch normalization in `fit` is per replica, as in TensorFlow: the moving variance is the
        mean of the replicas' variances. `keras.layers.BatchNormalization(synchronized=True)`
        normalizes over the rows of all replicas.
        """
        scope = super().scope()
        if "keras" not in sys.modules:
            return scope
        from strategies.keras import tensorflow_compile

        tensorflow_compile.install()
        together = self.communicator.size > 1 and self.array_strategy.steps_together
        return self._with_keras(scope) if together else scope

    @contextmanager
    def _with_keras(self, scope: AbstractContextManager[Any]) -> Iterator[Any]:
        from strategies.keras.scope import training_scope
        from strategies.tensorflow.custom_loops import compress_gradients
        from strategies.tensorflow.loss_scaling import agree_on_overflows

        with ExitStack() as undone, scope as entered, training_scope(self.keras_training):
            undone.callback(agree_on_overflows(self))
            if self.compresses:
                undone.callback(compress_gradients(self, self.keras_training))
            yield entered

    @cached_property
    def keras_training(self) -> Any:
        """What models of Keras train by.

        Kept, since TensorFlow enters the scope for each `run` and each batch.
        """
        from strategies.keras import tensorflow_predictions
        from strategies.keras.training import Training

        saving.install_for_keras()
        tensorflow_predictions.install()
        return Training(self, reduces=False)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that train."""
        return self.array_strategy.communicator

    @property
    def is_chief(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.array_strategy.is_chief

    def chief_first(self, action: Callable[[], Any], what: str = "") -> Any:
        """What the chief gets from the action, on every rank that trains; small, picklable.

        What it raises is raised on all of them. `what`: see ParameterServerStrategy. Collective.
        """
        return call_on_first(self.communicator, action)

    def synchronize(self) -> None:
        """Make the variables of all ranks equal; here they are. Collective."""
        return  # AutoGraph warns of functions without a statement.

    @property
    def compresses(self) -> bool:
        """Whether gradients are compressed between nodes."""
        return self.array_strategy.compresses

    @property
    def compressed(self) -> CompressedReducer | None:
        """What compresses gradients; None where the strategy's options don't say so."""
        return self.array_strategy.compressed

    @property
    def cluster_resolver(self) -> Any:
        """The resolver of the cluster and this process's task; None on a single worker."""
        return self.array_strategy.cluster_resolver

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:
        """As of `tf.distribute.Strategy`. One rank's wrong op or axis is an error on every rank."""
        extended = self.extended
        leaves = [self.experimental_local_results(each)[0] for each in tf.nest.flatten(value)]
        if axis is not None or not extended.is_alone:
            ranks = [getattr(getattr(each, "shape", None), "rank", None) for each in leaves]
            extended.operations.compare_reduction(reduce_op, ranks, axis)
        if axis is None:
            return super().reduce(reduce_op, value, axis)
        # TensorFlow calls `run` here, which some strategies count as a step.
        distribute_lib._require_cross_replica_or_default_context_extended(extended)
        local, total = self.experimental_local_results(value)[0], tf.distribute.ReduceOp.SUM
        own = tf.reduce_sum(local, axis)
        if op_of(reduce_op) is total:
            return extended._reduce(total, own)
        rows = [tf.shape(local, tf.int64)[each] for each in tf.nest.flatten(axis)]
        summed, count = extended._reduce(total, [own, tf.reduce_prod(rows)])
        return tf.math.truediv(summed, tf.cast(count, summed.dtype))

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """As `run`, of which it is the older name."""
        return self.run(fn, args=args, kwargs=kwargs, options=options)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """A dataset of the slices of nested arrays."""
        return tf.data.Dataset.from_tensor_slices(numpy_input)

    make_experimental_numpy_dataset = experimental_make_numpy_dataset
    """The name in TensorFlow's older guide."""
