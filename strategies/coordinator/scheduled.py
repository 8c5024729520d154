"""The context in which a scheduled function runs.

It is a replica, as inside `strategy.run`, so that it may apply gradients; and, as TensorFlow's, it
may call `strategy.run` and `strategy.reduce` itself, as if it spoke for all replicas: there is but
one, its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from strategies.base.strategy import Strategy
from strategies.core import contexts


class ScheduledContext(contexts.ReplicaContext):
    """The replica context of a scheduled function."""


def call_scheduled(
    strategy: Strategy, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Call a scheduled function in its context."""
    return contexts.call_as_replica(ScheduledContext(strategy), fn, args, kwargs)


def across_replicas(strategy: Strategy) -> AbstractContextManager[None]:
    """Cross-replica context where a scheduled function asks for it itself; else no change."""
    if isinstance(contexts.get_replica_context(), ScheduledContext):
        return contexts.entered(strategy, None)
    return nullcontext()
