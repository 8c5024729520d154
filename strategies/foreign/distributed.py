"""Objects of frameworks that a strategy trains in step, and that the guards therefore permit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

# By identity, since tensors compare element by element.
_known: dict[int, tuple[weakref.ref[Any], Any]] = {}


def permit(things: Iterable[Any], strategy: Any) -> None:
    """Note that the strategy trains the objects."""
    for thing in things:
        _known[id(thing)] = weakref.ref(thing, partial(_forget, id(thing))), strategy


def _forget(key: int, _: object) -> None:
    _known.pop(key, None)


def strategy_of(thing: Any) -> Any:
    """The strategy that trains the object; None without one."""
    reference, strategy = _known.get(id(thing), (None, None))
    return strategy if reference is not None and reference() is thing else None
