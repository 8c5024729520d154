"""Deferred actions: run before a communicator's next call, or before the program ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from collectives.execution.engine import Engine


class Deferred:
    """The part of a communicator that keeps deferred actions."""

    _forget_bound: Callable[[], None]
    _engine: Engine
    _closed: bool

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []

    def before_next_call(self, action: Callable[[], None]) -> None:
        """Run an action once, when the next call (including `close`) begins. Not collective itself.

        For an action that other ranks wait for, while this rank can't know whether its program
        continues. The end of the program counts as a call, except after an uncaught exception. An
        action that is already deferred is not added again.
        """
        if action not in self._due:
            self._due.append(action)
        # Bound calls don't check whether anything is due.
        self._forget_bound()

    def at_end(self, action: Callable[[], None]) -> None:
        """Call a method when the program ends without `close`, before the deferred actions.

        Keeps no reference to the method's object.
        """
        self._at_end.append(weakref.WeakMethod(action))

    def finish(self) -> None:
        """Run the actions of the program's end, unless the communicator is closed.

        The deferred ones only if it is not broken.
        """
        if self._closed:
            return
        for kept in self._at_end:
            if (action := kept()) is not None:
                action()
        self.run_deferred()

    def run_deferred(self) -> None:
        """Run the deferred actions now, unless the communicator is closed or broken."""
        if not self._closed and self._engine.broken is None:
            self._run_deferred()

    def _run_deferred(self) -> None:
        while self._due:
            self._due.pop(0)()
