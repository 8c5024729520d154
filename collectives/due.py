"""What is to be done before a communicator's next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Due:
    """The part of a communicator that keeps such actions."""

    _quick: dict[Any, Callable[..., Any]]

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def before_next_call(self, action: Callable[[], None]) -> None:
        """Do something once, as the next call begins, `close` too. Not collective itself.

        For what other ranks wait for, where this one can't know yet whether its program goes on.
        """
        self._due.append(action)
        # The short ways don't ask whether anything is due.
        self._quick.clear()

    def _do_what_is_due(self) -> None:
        while self._due:
            self._due.pop(0)()
