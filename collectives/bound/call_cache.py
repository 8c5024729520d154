"""The bound calls of one communicator, by what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from collectives.bound.bind import bind
from collectives.bound.calls import as_it_is, bound_operation
from collectives.bound.movement_calls import BoundMovementCalls
from collectives.bound.reduction_calls import BoundReductionCalls
from collectives.bound.small import nothing
from collectives.caching import LRU
from collectives.calls import PASS, Operation
from collectives.consistency.signature import Signature, check_text
from collectives.execution.engine import Engine

_BARRIERS_SEEN = 64


def barrier(engine: Engine, what: str | None = None) -> Operation:
    """A call without data, which returns once every rank has made it with the same text."""
    return Operation(Signature("barrier", detail=check_text(what)), lambda engine: None)


class CallCache(BoundReductionCalls, BoundMovementCalls):
    """Those of every collective."""

    def __init__(
        self, engine: Engine, check_open: Callable[[], None], run: Callable[[Operation], Any]
    ) -> None:
        super().__init__(engine, check_open, run)
        self._barriers_seen: LRU[str | None, None] = LRU(_BARRIERS_SEEN)

    def barrier(self, what: str | None) -> None:
        """As `Communicator.barrier`; bound where a text recurs, since many texts never do."""
        what = check_text(what)
        bound = self.bound_calls.get(("barrier", what))
        if bound is not None and bound(None, None) is not PASS:
            return
        operation = barrier(self._engine, what)
        if what in self._barriers_seen:
            binder = partial(bind, signature=operation.signature, run=nothing)
            operation = bound_operation(
                operation.signature, ("barrier", what), binder, None, None, as_it_is
            )
        self._barriers_seen.put(what, None)
        self._run(operation)
