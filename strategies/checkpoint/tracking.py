"""Finding what has state: in nests, and in the attributes of objects, as TensorFlow tracks them."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from collectives import Communicator
from strategies import foreign
from strategies.base.strategy import Strategy
from strategies.checkpoint.optimizer_state import OptimizerState
from strategies.checkpoint.states import Saveable, SaveableState, State, VariableState
from strategies.optimizers import Optimizer
from strategies.variables.variable import Variable

_OPAQUE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    np.ndarray,
    np.generic,
    Communicator,
    Strategy,
)


def find_states(things: Mapping[str, Any]) -> dict[str, State]:
    """The states in what is named, each once, by path, in an order that is the same on every rank.

    A path is made of names, keys and indices with "/" between them ("/" and "~" in a name become
    "~1" and "~0", as in JSON pointers, RFC 6901). What can be reached in two ways has the shorter
    path, or that which comes first when keys are sorted. Numbers, arrays, texts, functions and
    strategies inside of things are left alone. Raises TypeError where a thing named is itself one
    of those, for keys that are neither texts nor integers, and for a state in a set, which has no
    order; ValueError for a dictionary with keys such as 1 and "1". TypeError for a model, variable
    or optimizer of torch, Keras or TensorFlow; where it isn't named itself, only if it trains.
    """
    for name, thing in things.items():
        _refuse_foreign(name, thing, named=True)
        if not _has_state(thing) and not _is_walked(thing):
            kind = type(thing).__name__
            raise TypeError(f"{name} is a {kind}: must be a Variable, or hold such")
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}  # keeps them alive, and so their ids unique
    waiting = deque(_named("", things))
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        if _has_state(thing):
            seen[id(thing)] = thing
            found[path] = thing
        elif _is_walked(thing):
            seen[id(thing)] = thing
            waiting.extend(_named(path + "/", _children(path, thing)))
    variables = {path: thing for path, thing in found.items() if isinstance(thing, Variable)}
    return {path: _state(path, thing, variables) for path, thing in sorted(found.items())}


def _has_state(thing: Any) -> bool:
    return isinstance(thing, Variable | Saveable) and not isinstance(thing, type)


def _refuse_foreign(path: str, thing: Any, *, named: bool = False) -> None:
    """Else a file would be written without it, and nobody would know."""
    refused = foreign.refused_by_checkpoint(thing, path, named=named)
    if refused is not None and not _has_state(thing):
        raise refused


def _state(path: str, thing: Any, variables: Mapping[str, Variable]) -> State:
    if isinstance(thing, Optimizer):
        return OptimizerState(path, thing, variables)
    return SaveableState(path, thing) if isinstance(thing, Saveable) else VariableState(path, thing)


def _is_walked(thing: Any) -> bool:
    if isinstance(thing, Mapping | list | tuple | set | frozenset):
        return True
    if foreign.framework_of(thing) is not None:
        return False
    return not isinstance(thing, _OPAQUE) and (hasattr(thing, "__dict__") or bool(_slots(thing)))


def _children(path: str, thing: Any) -> Mapping[Any, Any]:
    if isinstance(thing, Mapping):
        return thing
    if isinstance(thing, set | frozenset):
        if any(_has_state(each) for each in thing):
            raise TypeError(f"{path} is a set, which has no order: use a list or a dictionary")
        return {}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return dict(zip(thing._fields, thing, strict=True))
    if isinstance(thing, list | tuple):
        return dict(enumerate(thing))
    slots = {name: getattr(thing, name) for name in _slots(thing) if hasattr(thing, name)}
    return slots | getattr(thing, "__dict__", {})


def _slots(thing: Any) -> list[str]:
    """The attributes that classes keep outside of `__dict__`."""
    names: list[str] = []
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]


def _named(prefix: str, children: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Paths and things, in the order of the keys, whatever order they were put in."""
    names: dict[str, Any] = {}
    for key, child in children.items():
        if not (_has_state(child) or _is_walked(child)):
            _refuse_foreign(f"{prefix}{key}", child)
            continue
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(f"{prefix} has the key {key!r}: must be a text or an integer")
        name = prefix + str(key).replace("~", "~0").replace("/", "~1")
        if name in names:
            raise ValueError(f"{prefix} has two keys that are {str(key)!r} as text")
        names[name] = child
    yield from sorted(names.items(), key=lambda item: (len(item[0]), item[0]))
