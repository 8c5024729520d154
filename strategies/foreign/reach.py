"""The frameworks' objects that a function reaches: by arguments, closures, globals, attributes.

Followed are functions, methods, `functools.partial`, containers, and the program's own classes and
their objects; not what libraries define. Every `run` does this anew, for some 0.1 ms at most: of a
container only the first elements are looked at, and what is too far away is not. How far is decided
by numbers of objects alone, so that ranks which hold the same come to the same result.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import islice
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from strategies.foreign.known import framework_of, owner_of

_ELEMENTS = 64
_OBJECTS = 400
_STANDARD = sysconfig.get_path("stdlib")
_OURS = {__name__.partition(".")[0], "collectives"}

Children = Callable[[Any], Iterable[Any]]


def training_within(fn: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first object of a framework that trains, nearest first; None where there is none."""
    near: list[Any] = [*_children(fn), *args, *kwargs.values()]
    seen: dict[int, Any] = {}  # keeps them alive, and so their ids unique
    left = _OBJECTS
    while near and left > 0:
        left -= len(near)
        further: list[Any] = []
        for thing in near:
            kind: type = type(thing)
            look = _look(kind)
            if look is None or id(thing) in seen:
                continue
            seen[id(thing)] = thing
            if look is _of_framework:
                framework = framework_of(thing)
                if framework and framework.trains(thing) and not framework.is_input(thing):
                    return thing
            elif len(further) <= left:
                further.extend(look(thing))
        # All that is equally far away or nothing: the order within a set differs between ranks.
        near = further if len(further) <= left else []
    return None


def _children(fn: Any) -> Iterable[Any]:
    """What the function given to `run` reaches at once, whoever has defined it."""
    if framework_of(fn) is not None:
        return (fn,)
    if isinstance(fn, FunctionType):
        return _of_function(fn)
    if isinstance(fn, MethodType):
        return [*_children(fn.__func__), *_children(fn.__self__)]
    if isinstance(fn, partial):
        return [*_children(fn.func), *fn.args, *fn.keywords.values()]
    calls = [vars(kind).get("__call__") for kind in type(fn).__mro__]
    inner = [
        each for call in calls if isinstance(call, FunctionType) for each in _of_function(call)
    ]
    return [*inner, *_wrapped(fn), *_attributes(fn)]


@lru_cache(maxsize=4096)
def _look(kind: type) -> Children | None:
    """How objects of this class are looked into; None for what is left aside."""
    if owner_of(kind) is not None:
        return _of_framework
    if issubclass(kind, type):
        return _of_class
    for known, children in _KNOWN.items():
        if issubclass(kind, known):
            return children
    if issubclass(kind, ModuleType) or kind.__module__ == "builtins":
        return None
    if not _is_own(sys.modules.get(kind.__module__)):
        return _wrapped if any("__call__" in vars(each) for each in kind.__mro__) else None
    return _attributes


def _of_framework(thing: Any) -> Iterable[Any]:
    """Nothing: what its framework says of it holds for its parts."""
    return ()


def _of_class(kind: type) -> Iterable[Any]:
    """What objects of the program's own class share, but for methods, which may never be called."""
    if not _is_own(sys.modules.get(kind.__module__)):
        return ()
    shared = vars(kind).items()
    return [
        *(each for name, each in shared if name[:2] != "__" and type(each) is not FunctionType),
        *kind.__bases__,
    ]


def _of_own_function(function: FunctionType) -> Iterable[Any]:
    if _is_library(function.__code__.co_filename) or _is_ours(function.__module__):
        return ()
    return _of_function(function)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _wrapped(function)
    namespace = function.__globals__
    for name, attributes in _globals(function.__code__):
        found = namespace.get(name)
        for attribute in attributes:
            if not (isinstance(found, ModuleType) and _is_own(found)):
                break
            found = vars(found).get(attribute)
        yield found


@lru_cache(maxsize=4096)
def _globals(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The globals that a function and those within it load, each with what follows its dots."""
    paths: list[list[str]] = []
    follows = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            paths.append([instruction.argval])
            follows = True
        elif follows and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            paths[-1].append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            follows = False
    own = [(path[0], tuple(path[1:])) for path in paths]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*own, *(path for each in inner for path in _globals(each))]))


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name without a value as yet
        return ()


def _wrapped(thing: Any) -> Iterable[Any]:
    """The function within a `tf.function`, a `jax.jit`, or another decorator's."""
    inner = getattr(thing, "__wrapped__", None)
    return () if inner is None else (inner,)


def _attributes(thing: Any) -> Iterable[Any]:
    kind: type = type(thing)
    slots = [getattr(thing, name, None) for name in _slots(kind)]
    return [*getattr(thing, "__dict__", {}).values(), *slots, kind]


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    given = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in given for name in ([each] if isinstance(each, str) else each))


_KNOWN: dict[type | tuple[type, ...], Children] = {
    FunctionType: _of_own_function,
    MethodType: lambda method: (method.__self__, method.__func__),
    partial: lambda bound: (bound.func, *bound.args, *bound.keywords.values()),
    CellType: _of_cell,
    (list, tuple, deque): lambda nest: islice(nest, _ELEMENTS),
    (set, frozenset): lambda nest: nest if len(nest) <= _ELEMENTS else (),
    dict: lambda nest: list(islice(nest.values(), _ELEMENTS)),
}


def _is_own(module: ModuleType | None) -> bool:
    """Whether a module belongs to the program: neither to a library nor to this project."""
    if module is None or _is_ours(module.__name__):
        return False
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if path is None else not _is_library(path)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _OURS


@lru_cache(maxsize=4096)
def _is_library(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    return path.startswith(_STANDARD) or "site-packages" in path or "dist-packages" in path
