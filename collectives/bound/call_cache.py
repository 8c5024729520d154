"""The bound calls of one communicator, by what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.bound.bind import bind
from collectives.bound.calls import Bound
from collectives.bound.movement_calls import BoundMovementCalls
from collectives.bound.reduction_calls import BoundReductionCalls
from collectives.bound.small import nothing
from collectives.caching import LRU
from collectives.calls import PASS
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine

_BARRIERS_SEEN = 64


class CallCache(BoundReductionCalls, BoundMovementCalls):
    """Those of every collective that has some."""

    def __init__(self, engine: Engine, check_open: Callable[[], None]) -> None:
        super().__init__(engine, check_open)
        self._barriers_seen: LRU[str | None, None] = LRU(_BARRIERS_SEEN)

    def barrier(self, what: str | None) -> Any:
        """As `Communicator.barrier`; bound where a text recurs, since many texts never do."""
        key = "barrier", what
        if key not in self.known:
            if not (what is None or type(what) is str):
                return PASS
            if what not in self._barriers_seen:
                self._barriers_seen.put(what, None)
                return PASS

        def bind_barrier() -> Bound:
            return bind(self._engine, Signature("barrier", detail=what), nothing)

        return self._call(key, bind_barrier, None, None)
