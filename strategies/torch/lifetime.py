"""How long what `distribute` installs is kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any


class Lifetime:
    """Calls `end` once the optimizers and all modules with trained parameters are gone.

    The model itself may be a container that the program drops, while it goes on with the modules or
    with the parameters alone.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], end: Callable[[], None]) -> None:
        self._end = end
        owners = [
            module
            for module in model.modules()
            if any(each.requires_grad for each in module.parameters(recurse=False))
        ]
        owners += optimizers
        owners = owners or [model]
        self._left = len(owners)
        self._finalizers = [weakref.finalize(each, self._lose) for each in owners]
        for each in self._finalizers:
            each.atexit = False

    def _lose(self) -> None:
        self._left -= 1
        if not self._left:
            self._end()

    def close(self) -> None:
        """Never call `end`."""
        for each in self._finalizers:
            each.detach()
        self._end = lambda: None  # it refers to this object's owner
