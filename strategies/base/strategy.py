"""The methods that users call on every strategy: scope, run, reduce, gather, datasets.

One process is one replica, so a value "per replica" is simply this process's value. Names and
semantics are those of `tf.distribute.Strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, cast

from collectives import Communicator
from strategies.base.cross_replica import gather_nest, reduce_nest
from strategies.base.extended import StrategyExtended
from strategies.cluster_resolver import ClusterResolver
from strategies.core import values
from strategies.core.options import CommunicationOptions, ReduceOp, RunOptions
from strategies.cross_device_ops.base import CrossDeviceOps, reduce_by
from strategies.foreign.registry import trains_keras
from strategies.input import (
    ArraysDataset,
    InputContext,
    InputOptions,
    ValueContext,
    distribute,
    distribute_from_function,
    make_numpy_dataset,
)
from strategies.replication import contexts
from strategies.replication.replication import Replication

if TYPE_CHECKING:
    from collectives.torch.gradients import GradientReducer


class Strategy(Replication):
    """Base of the strategies, as `tf.distribute.Strategy`: the replicas are ranks.

    A strategy of one's own overrides methods of this class, or hooks (`Replication`).
    """

    def __init__(
        self,
        communicator: Communicator | None,
        *,
        cluster_resolver: ClusterResolver | None = None,
        is_chief: bool | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        """`cross_device_ops` reduce where they are given, else `collectives` by the options."""
        super().__init__(
            communicator, is_chief=is_chief, communication_options=communication_options
        )
        self._cluster_resolver, self._cross_device_ops = cluster_resolver, cross_device_ops
        self.reduces_plainly &= cross_device_ops is None

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster and this process's task; None on a single worker."""
        return self._cluster_resolver

    @property
    def extended(self) -> StrategyExtended:
        """The methods for those who write libraries, as `tf.distribute.Strategy.extended`."""
        return StrategyExtended(self)

    def scope(self) -> AbstractContextManager[None]:
        """A context in which the strategy is in force and variables are mirrored when created.

        Keras models that are compiled in it train on all ranks in step, if the replicas take each
        step together and Keras's backend is torch or JAX.

        Raises RuntimeError inside `run` and another strategy's scope. Where several ranks train,
        leaving it raises TypeError for any other trainable model of torch, Keras or TensorFlow made
        in it.
        """
        contexts.require_cross_replica("Strategy.scope()", self)
        scope = contexts.scope_of(self)
        if self.trains_alone or not self.steps_together or not trains_keras():
            return scope
        from strategies.keras.scope import scope_with_keras

        return scope_with_keras(self, scope)

    def synchronize(self) -> None:
        """Make the replicas' variables equal, which they are but under LocalSGDStrategy."""
        contexts.require_cross_replica("Strategy.synchronize", self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as one replica, and return its result.

        Raises ValueError where args is neither a tuple nor a list, RuntimeError inside `run` and
        another strategy's scope. Where several ranks train, TypeError for a trainable model of
        torch, Keras or TensorFlow that the function reaches, and for a step of its optimizer.
        """
        contexts.require_cross_replica("Strategy.run", self)
        if not isinstance(args, list | tuple):
            raise ValueError(f"args={args!r}: must be a tuple or list of positional arguments")
        args = values.local(args) if args else ()
        kwargs = values.local(kwargs) if kwargs else {}
        return contexts.call_as_replica(contexts.ReplicaContext(self), fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Fold each replica's value, a nest of arrays, into one result that every replica gets.

        axis None: element by element; shapes must be equal. Otherwise every replica first sums over
        `axis`, an int or a tuple; the lengths along it may differ, and MEAN divides by their sum.
        MEAN of integers is float64. Of `IndexedSlices` (axis None) the rows are joined, duplicates
        kept, and divided for MEAN. Raises, on every rank alike and before anything is reduced,
        ShapeMismatchError (also of nests), DtypeMismatchError or OpMismatchError (also of axes)
        where the replicas don't fit together, ValueError where an axis doesn't exist; TypeError for
        a list as axis, ValueError for an op that is neither SUM nor MEAN (MismatchError where not
        all ranks give these); RuntimeError inside `run` or another strategy's scope.
        """
        contexts.require_cross_replica("Strategy.reduce", self)
        return reduce_nest(self, reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate each array of a nest along the axis, in replica order, on every replica.

        Raises as `Communicator.all_gather`, on every rank alike (MismatchError where not all ranks
        would), ValueError for a number, which has no axis, NotImplementedError for `IndexedSlices`;
        RuntimeError inside `run` and inside the scope of another strategy.
        """
        contexts.require_cross_replica("Strategy.gather", self)
        return gather_nest(self, values.local(value), axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas: a tuple of one."""
        return (values.local(value),)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Iterable[Any]:
        """This replica's share of a re-iterable of global batches, the same one on every rank.

        Batches are nests of arrays of equal length on axis 0. The AutoShardPolicy in `options`
        decides how they are split, else that of the dataset's own `options()`, else AUTO: a dataset
        of files by file where there are enough, any other by cutting each batch into contiguous
        parts of ⌈n/W⌉, the last of which may be shorter or empty. Collective, as is
        iteration: the end is agreed on at every step, and a rank whose data ends early gets empty
        batches until all have ended. Raises, on every rank alike, TypeError where the dataset can
        be iterated only once or is distributed already, ValueError where the policy doesn't fit it.
        """
        return distribute(self.communicator, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """The dataset that `dataset_fn` makes for this rank, whose batches are taken as they are.

        The end is agreed on as in `experimental_distribute_dataset`. Where the function raises
        on a rank, the others raise DatasetError; ValueError for options that ask for sharding.
        """
        return distribute_from_function(self.communicator, dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """What `value_fn` gives for this replica: it is called once on every rank."""
        replicas = self.num_replicas_in_sync
        return value_fn(ValueContext(self.communicator.rank % replicas, replicas))

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> ArraysDataset:
        """The slices of a nest of arrays along axis 0, to be shuffled, batched and distributed.

        `session` is ignored. ValueError where the arrays lack an axis 0 or their lengths differ.
        """
        return make_numpy_dataset(numpy_input)

    def distribute(
        self,
        model: Any,
        optimizer: Any,
        *,
        unused: Literal["error", "zeros"] = "error",
        weighted: bool = False,
        wire_dtype: Any = None,
    ) -> tuple[Any, Any]:
        """Train a torch module in step on all ranks; returns the two arguments. Collective.

        Parameters, buffers and the optimizer's state become the chief's. From then on `grad` holds
        the mean over the replicas when `backward` returns, so that clipping, gradient scalers and
        `step` need no change. `gradients_of(model)` has `no_sync()`, `weight`, `synchronize()` and
        `wait()`. Call `distribute` again after parameters were frozen, unfrozen or added. Under
        LocalSGDStrategy gradients are not reduced; parameters are averaged.

        optimizer: an optimizer of the model's parameters, or a list of such.
        unused: parameters without gradient in a backward: "error" raises
            `collectives.torch.gradients.GradientError`, which names them, on every rank; "zeros"
            counts them as zeros, unless no rank has one: then it stays None, as in one process.
        weighted: ranks count by `gradients_of(model).weight`, to be set before each backward.
        wire_dtype: torch.float16 or torch.bfloat16 for smaller messages; None keeps the dtype.

        Raises TypeError for other objects, and for wrappers such as DistributedDataParallel;
        ValueError for an optimizer with parameters that aren't the model's, for a `wire_dtype`
        under a strategy that compresses, and on every rank where the ranks' models, or the classes
        or settings of their optimizers, differ (not under LocalSGDStrategy: replicas train apart);
        RuntimeError inside `run`.
        """
        contexts.require_cross_replica("Strategy.distribute", self)
        from strategies.torch.distribution import distribute

        distribute(self, model, optimizer, unused=unused, weighted=weighted, wire_dtype=wire_dtype)
        return model, optimizer

    def gradients_of(self, model: Any) -> GradientReducer:
        """What reduces the gradients of a module that was given to `distribute`.

        Raises ValueError for any other object.
        """
        from strategies.torch.distribution import gradients_of

        return gradients_of(self, model)

    def value_and_grad(
        self,
        function: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        *,
        has_aux: bool = False,
    ) -> Callable[..., Any]:
        """`jax.value_and_grad` whose value and gradients are means over the replicas.

        The result may be compiled; calls of it are collective, with one message for all arrays.
        Under a strategy that compresses, the gradients are compressed, and the value isn't;
        `value_and_grad` itself is collective then.
        `function` returns the mean over this replica's batch. Auxiliary data stays the replica's
        own. Under LocalSGDStrategy nothing is averaged.

        Raises ValueError under a strategy with `cross_device_ops`, with an `all_reduce_arrays` of
        its own, or with communication options without a compression; TypeError under
        ParameterServerStrategy.
        """
        from strategies.jax.gradients import value_and_grad

        return value_and_grad(self, function, argnums, has_aux=has_aux)

    def sampler(
        self,
        dataset: Any,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Literal["repeat", "drop"] = "repeat",
    ) -> Any:
        """A torch sampler of this replica's share of a dataset, for torch's `DataLoader`.

        See `strategies.torch.sampler.ReplicaSampler`. Collective.
        """
        from strategies.torch.sampler import ReplicaSampler

        return ReplicaSampler(
            self.communicator, dataset, shuffle=shuffle, seed=seed, remainder=remainder
        )

    def experimental_run_v2(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`; TensorFlow's older name."""
        return self.run(*args, **kwargs)

    def experimental_distribute_datasets_from_function(
        self, *args: Any, **kwargs: Any
    ) -> Iterable[Any]:
        """As `distribute_datasets_from_function`; TensorFlow's older name."""
        return self.distribute_datasets_from_function(*args, **kwargs)

    def _all_reduce_by(
        self, arrays: Sequence[Any], op: ReduceOp, options: CommunicationOptions | None, batch: bool
    ) -> list[Any]:
        if self._cross_device_ops is None:
            return super()._all_reduce_by(arrays, op, options, batch)
        with self.deadline(options), contexts.entered(self, None):
            merged = self._collectives.options.merge(options)
            return reduce_by(self._cross_device_ops, op, arrays, merged, batch=batch)

    def __repr__(self) -> str:
        rank, size = self.communicator.rank, self.communicator.size
        return f"<{type(self).__name__} replica {rank} of {size}>"


def get_strategy() -> Strategy:
    """The strategy in force: the default one outside of every scope."""
    return cast(Strategy, contexts.get_strategy())
