"""Replacements of other libraries' methods, which are undone in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

Undo = Callable[[], None]
Make = Callable[[Any], Any]

_lock = threading.Lock()
_replaced: dict[tuple[type, str], tuple[Any, list[Make]]] = {}
"""The original of each method that is replaced, and its replacements in their order."""


def replace_method(owner: Any, method: str, make: Make) -> Undo:
    """Replace a method by `make(original)` in the class or base class that defines it.

    Returns the function that removes this replacement. Others of the same method remain, such as
    those of another thread: the one made first is called last.
    """
    defining = next(kind for kind in owner.__mro__ if method in vars(kind))
    key = defining, method
    with _lock:
        original, makers = _replaced.setdefault(key, (vars(defining)[method], []))
        makers.append(make)
        setattr(defining, method, make(vars(defining)[method]))

    def undo() -> None:
        with _lock:
            makers.remove(make)
            if not makers:
                del _replaced[key]
            restored = original
            for each in makers:
                restored = each(restored)
            setattr(defining, method, restored)

    return undo


def wrap_method(owner: Any, method: str, function: Callable[..., Any]) -> Undo:
    """Replace a method by `function(original, thing, *args, **kwargs)`."""

    def make(original: Any) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return replace_method(owner, method, make)


def call_with(
    owner: Any, method: str, callback: Callable[[Any], None], *, after: bool = False
) -> Undo:
    """Have `callback` called with the object before, or after, each call of a method."""

    def call(original: Any, thing: Any, *args: Any, **kwargs: Any) -> Any:
        if not after:
            callback(thing)
        result = original(thing, *args, **kwargs)
        if after:
            callback(thing)
        return result

    return wrap_method(owner, method, call)
