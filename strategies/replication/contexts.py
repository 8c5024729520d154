"""The strategy in force, and whether code runs as one replica or for all of them.

Inside `strategy.scope()` code acts for all replicas (cross-replica context); inside
`strategy.run` it is one replica. Outside of both the default strategy is in force, as a replica.
The rules are those of `tf.distribute` (`get_strategy`, `get_replica_context`, …).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from strategies.core import nest, values
from strategies.core.indexed_slices import IndexedSlices, map_apart, refuse_slices, structure
from strategies.core.options import CommunicationOptions, ReduceOp, as_reduce_op
from strategies.core.same_error import PropagatedErrors
from strategies.foreign.guards import ScopeGuard, call_guarded
from strategies.foreign.registry import any_loaded
from strategies.replication.replication import Replication

_Frame: TypeAlias = "tuple[Replication, ReplicaContext | None]"


class _Stack(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.permanent = 0
        self.kept_out = ExitStack()


_stack = _Stack()
_defaults: list[Callable[[], Replication]] = []


class ReplicaContext:
    """This replica, and its collectives with the others, for the function given to `run`.

    As `tf.distribute.ReplicaContext`; one process is one replica.
    """

    def __init__(self, strategy: Replication) -> None:
        self.strategy = strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0 to num_replicas_in_sync − 1."""
        return self.strategy.communicator.rank % self.num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose updates are aggregated."""
        return self.strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices on which this replica runs: one."""
        return (self.strategy.device,)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Fold a nest of arrays over the replicas; each gets the nest of results.

        All replicas give nests of equal structure, shapes and dtypes. The arrays are fused into few
        messages per dtype (`collectives.Communicator.all_reduce_many`), or reduced by the
        strategy's cross-device ops. `options` override the strategy's where they aren't the
        defaults. MEAN of integers is float64. The rows of an `IndexedSlices` are concatenated,
        duplicates kept. Arrays on GPUs stay there. Raises a MismatchError on every replica where
        the nests differ, ValueError for an op that is neither SUM nor MEAN, RuntimeError outside of
        this context.
        """
        self._require_in_force("all_reduce")
        with PropagatedErrors(self.strategy.communicator, "all_reduce"):
            return self._all_reduce(as_reduce_op(reduce_op), value, options)

    def _all_reduce(self, op: ReduceOp, value: Any, options: CommunicationOptions | None) -> Any:
        strategy, value = self.strategy, values.local(value)
        leaves = _contents(value)
        self._compare("all_reduce", value, leaves, options)
        with strategy.deadline(options):
            folded = map_apart(
                leaves,
                lambda arrays: strategy.all_reduce_arrays(arrays, op, options),
                lambda slices: strategy.gather_slices(slices, op),
            )
        return nest.pack_like(value, folded)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """As `all_reduce`: whatever the destinations, every replica gets the result."""
        return self.all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate each array of a nest along the axis, in the order of the replicas.

        Lengths along the axis may differ. Raises as `collectives.Communicator.all_gather`,
        ValueError for a number, which has no axis, a MismatchError on every replica where the nests
        differ or one of them can't be gathered, and RuntimeError outside of this context.
        """
        self._require_in_force("all_gather")
        with PropagatedErrors(self.strategy.communicator, "all_gather"):
            value = values.local(value)
            leaves = _contents(value)
            refuse_slices(leaves, "all_gather")
            if any(np.ndim(leaf) == 0 for leaf in leaves):
                raise ValueError(
                    "all_gather takes arrays of at least one axis: make an array of one element"
                )
            self._compare("all_gather", value, leaves, options)
            joined = [self.strategy.all_gather(leaf, axis, options) for leaf in leaves]
        return nest.pack_like(value, joined)

    def _compare(
        self, what: str, value: Any, leaves: Sequence[Any], options: CommunicationOptions | None
    ) -> None:
        """A MismatchError where the nests' structures differ, or the shapes whose rows are given.

        Other shapes and dtypes, and so a single array, are compared when the arrays are sent.
        """
        if isinstance(value, Mapping | list | tuple | IndexedSlices):
            self.strategy.barrier(f"{what} of {structure(value, leaves)}", options)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `merge_fn(strategy, *args, **kwargs)` in cross-replica context; return its result.

        Arguments and result are this replica's own. Every replica calls it in the same order.
        RuntimeError outside of this context.
        """
        self._require_in_force("merge_call")
        with entered(self.strategy, None):
            return merge_fn(self.strategy, *args, **(kwargs or {}))

    def _require_in_force(self, what: str) -> None:
        current = get_replica_context()
        if current is None or current.strategy is not self.strategy:
            raise RuntimeError(
                f"ReplicaContext.{what} must be called as that replica of {self.strategy}, inside"
                f" `run`, but the context is {'another' if current else 'cross-replica'}"
            )


def _contents(value: Any) -> list[Any]:
    """The leaves of a nest, of variables this replica's values."""
    return list(map(values.content, nest.leaves(value)))


@contextmanager
def entered(strategy: Replication, replica: ReplicaContext | None) -> Iterator[None]:
    """A context in which a strategy is in force, as a replica or for all replicas."""
    _stack.frames.append((strategy, replica))
    try:
        yield
    finally:
        _stack.frames.pop()


def _top() -> _Frame:
    if _stack.frames:
        return _stack.frames[-1]
    return _default(), ReplicaContext(_default())


def provide_default(make: Callable[[], Replication]) -> None:
    """Register what makes the default strategy, a class of a layer above this module."""
    _defaults[:] = [make]


def _default() -> Replication:
    return _defaults[0]()


def get_strategy() -> Replication:
    """The strategy in force: the default one outside of every scope."""
    return _top()[0]


def has_strategy() -> bool:
    """Whether another strategy than the default one is in force."""
    return bool(_stack.frames) and get_strategy() is not _default()


def get_replica_context() -> ReplicaContext | None:
    """The replica context, None in cross-replica context."""
    return _top()[1]


def in_cross_replica_context() -> bool:
    """Whether code runs for all replicas."""
    return get_replica_context() is None


def require_cross_replica(what: str, strategy: Replication | None = None) -> None:
    """RuntimeError inside `run`, and inside the scope of another strategy than the given one.

    The default strategy's context will do.
    """
    if not has_strategy():
        return
    if not in_cross_replica_context():
        raise RuntimeError(
            f"{what} requires a cross-replica context, but was called inside `run`: call it after"
            " `run`, with what the replicas returned"
        )
    if strategy is not None and get_strategy() is not strategy:
        raise RuntimeError(
            f"Mixing different strategies: {what} of {strategy} was called inside the scope of"
            f" {get_strategy()}"
        )


@contextmanager
def scope_of(strategy: Replication) -> Iterator[None]:
    """A context in which the strategy is in force, for all replicas. Raises RuntimeError."""
    # It may be entered elsewhere than it was made.
    require_cross_replica("Strategy.scope()", strategy)
    with entered(strategy, None), foreign_kept_out(strategy):
        yield


def foreign_kept_out(strategy: Replication) -> AbstractContextManager[None]:
    """A context that raises TypeError for a framework's model made in it, where ranks train it."""
    if strategy.trains_alone:
        return nullcontext()
    return ScopeGuard(type(strategy).__name__, strategy.communicator.rank)


def call_as_replica(
    replica: ReplicaContext, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function as that replica.

    TypeError where it would train a model of a framework on this rank apart from the others.
    """
    strategy, frames = replica.strategy, _stack.frames
    frames.append((strategy, replica))
    try:
        if strategy.trains_alone or not any_loaded():
            return fn(*args, **kwargs)
        name, rank = type(strategy).__name__, strategy.communicator.rank
        return call_guarded(name, rank, fn, args, kwargs)
    finally:
        frames.pop()


def experimental_set_strategy(strategy: Replication | None) -> None:
    """Put a strategy in force until the next call (None: the default one), without a `with`.

    Raises RuntimeError inside a scope or `run`; TypeError as `Strategy.scope()` does when it is
    left, once the other strategy is in force.
    """
    if len(_stack.frames) > _stack.permanent:
        raise RuntimeError("experimental_set_strategy must not be called inside a strategy's scope")
    before, _stack.kept_out = _stack.kept_out, ExitStack()
    if strategy is None or strategy is _default():
        _stack.frames.clear()
    else:
        _stack.frames[:] = [(strategy, None)]
    _stack.permanent = len(_stack.frames)
    try:
        before.close()
    finally:
        if _stack.frames:
            _stack.kept_out.enter_context(foreign_kept_out(get_strategy()))
