"""Tracking: find stateful objects in nests and in attributes of objects, as TensorFlow does."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from collectives import Communicator
from strategies.base.strategy import Strategy
from strategies.checkpoint.states import OptimizerState, Saveable, State, VariableState
from strategies.foreign.reach import slots_of_class
from strategies.foreign.registry import framework_of, has_torch_state, refused_by_checkpoint
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


def find_states(objects: Mapping[str, Any]) -> dict[str, State]:
    """The states of named objects, each once, by path, in the same order on every rank.

    A path consists of names, keys and indices, joined by "/" ("/" and "~" in a name become "~1"
    and "~0", as in JSON pointers, RFC 6901). An object with two paths has the shorter one, or the
    first in the order of sorted keys. Numbers, arrays, strings, functions and strategies inside of
    objects are ignored.

    Raises TypeError where a named object is itself one of those, for keys that are neither strings
    nor integers, for a state in a set, which has no order, and for a model, variable or optimizer
    of Keras or TensorFlow, or a tensor of torch (inside of another object only if it trains).
    Raises ValueError for a dictionary with keys such as 1 and "1".
    """
    for name, value in objects.items():
        _refuse_foreign(name, value, named=True)
        if not _has_state(value) and not _has_children(value):
            kind = type(value).__name__
            raise TypeError(f"{name} is a {kind}: must be a Variable, or contain one")
    found: dict[str, Any] = {}
    visited: dict[int, Any] = {}  # keeps the objects alive, so that ids are unique
    queue = deque(_named("", objects))
    while queue:
        path, value = queue.popleft()
        if id(value) in visited:
            continue
        if _has_state(value):
            visited[id(value)] = value
            found[path] = value
        elif _has_children(value):
            visited[id(value)] = value
            queue.extend(_named(path + "/", _children(path, value)))
    variables = {path: value for path, value in found.items() if isinstance(value, Variable)}
    states: dict[str, State] = {}
    for path, value in sorted(found.items()):
        if isinstance(value, Optimizer):
            states[path] = OptimizerState(path, value, variables)
        elif has_torch_state(value):
            from strategies.torch.states import TorchState

            states[path] = State(path, TorchState(value))
        else:
            states[path] = (State if isinstance(value, Saveable) else VariableState)(path, value)
    return states


def _has_state(value: Any) -> bool:
    known = isinstance(value, Variable | Saveable) or has_torch_state(value)
    return known and not isinstance(value, type)


def _refuse_foreign(path: str, value: Any, *, named: bool = False) -> None:
    """Else a file would silently be written without it."""
    refused = refused_by_checkpoint(value, path, named=named)
    if refused is not None and not _has_state(value):
        raise refused


def _has_children(value: Any) -> bool:
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return True
    if framework_of(value) is not None:
        return False
    return not isinstance(value, _OPAQUE) and (hasattr(value, "__dict__") or bool(_slots(value)))


def _children(path: str, value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, set | frozenset):
        if any(_has_state(each) for each in value):
            raise TypeError(f"{path} is a set, which has no order: use a list or a dictionary")
        return {}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return slots | getattr(value, "__dict__", {})


def _slots(value: Any) -> list[str]:
    kind: type = type(value)
    return [name for name in slots_of_class(kind) if not name.startswith("__")]


def _named(prefix: str, children: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Paths and objects, in the order of the keys."""
    names: dict[str, Any] = {}
    for key, child in children.items():
        if not (_has_state(child) or _has_children(child)):
            _refuse_foreign(f"{prefix}{key}", child)
            continue
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise TypeError(f"{prefix} has the key {key!r}: must be a string or an integer")
        name = prefix + str(key).replace("~", "~0").replace("/", "~1")
        if name in names:
            raise ValueError(f"{prefix} has two keys that are {str(key)!r} as strings")
        names[name] = child
    yield from sorted(names.items(), key=lambda item: (len(item[0]), item[0]))
