"""Hooks in frameworks, there while somebody needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from strategies.foreign.framework import Framework, Undo


class Watches:
    """One hook in each framework, for all threads and however many contexts need it.

    Outside of all contexts the frameworks are as they were.
    """

    def __init__(self, install: Callable[[Framework], Undo]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._needed: dict[str, tuple[int, Undo]] = {}

    def enter(self, frameworks: list[Framework]) -> list[Framework]:
        """Need the hooks in these frameworks, which `leave` is to be told."""
        with self._lock:
            for framework in frameworks:
                count, undo = self._needed.get(framework.name) or (0, self._install(framework))
                self._needed[framework.name] = count + 1, undo
        return frameworks

    def leave(self, frameworks: Iterable[Framework]) -> None:
        """Need them no longer."""
        with self._lock:
            for framework in frameworks:
                count, undo = self._needed.pop(framework.name)
                if count > 1:
                    self._needed[framework.name] = count - 1, undo
                else:
                    undo()
