"""What is to be done before a communicator's next call, or before the program ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from collectives.execution.engine import Engine


class Deferred:
    """The part of a communicator that keeps such actions."""

    _forget_bound: Callable[[], None]
    _engine: Engine
    _closed: bool

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []

    def before_next_call(self, action: Callable[[], None]) -> None:
        """Do something once, as the next call begins, `close` too. Not collective itself.

        For what other ranks wait for, where this one can't know yet whether its program goes on.
        The end of the program counts as a call, except after an exception that nobody caught. An
        action that is due already is done once.
        """
        if action not in self._due:
            self._due.append(action)
        # Bound calls don't check whether anything is due.
        self._forget_bound()

    def at_end(self, action: Callable[[], None]) -> None:
        """Call a method when the program ends without `close`, before what is due then.

        It keeps no reference to the method's object.
        """
        self._at_end.append(weakref.WeakMethod(action))

    def finish(self) -> None:
        """Do what the end of the program requires, unless no call can be made any more."""
        for kept in self._at_end:
            if (action := kept()) is not None:
                action()
        self.run_deferred()

    def run_deferred(self) -> None:
        """Do it now, unless no call can be made any more."""
        if not self._closed and self._engine.broken is None:
            self._run_deferred()

    def _run_deferred(self) -> None:
        while self._due:
            self._due.pop(0)()
