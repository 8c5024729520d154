"""Search for frameworks' objects that a function reaches by arguments, closures and globals.

The search follows functions, methods, `functools.partial`, containers, and the program's own
classes and their objects, but not what libraries define. Every `run` repeats it, so it is limited
to about 0.1 ms: to the first elements of a container, and to a number of objects, nearest first.
Time has no influence, so that ranks with equal objects get equal results.
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

from strategies.foreign.registry import framework_of, framework_of_class

_MOST_ELEMENTS = 64
_MOST_OBJECTS = 400
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_THIS_PROJECT = {__name__.partition(".")[0], "collectives"}

Children = Callable[[Any], Iterable[Any]]


def find_trainable(fn: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """The nearest framework's object that trains, by breadth-first search; None without one."""
    level: list[Any] = [*_children(fn), *args, *kwargs.values()]
    visited: dict[int, Any] = {}  # keeps the objects alive, so that ids are unique
    budget = _MOST_OBJECTS
    while level and budget > 0:
        budget -= len(level)
        next_level: list[Any] = []
        for thing in level:
            kind: type = type(thing)
            children = _children_function(kind)
            if children is None or id(thing) in visited:
                continue
            visited[id(thing)] = thing
            if children is _of_framework:
                framework = framework_of(thing)
                if framework and framework.trains(thing) and not framework.is_input(thing):
                    return thing
            elif len(next_level) <= budget:
                next_level.extend(children(thing))
        # Levels are searched completely or not at all: the order of a set differs between ranks.
        level = next_level if len(next_level) <= budget else []
    return None


def _children(fn: Any) -> Iterable[Any]:
    """The direct children of the function given to `run`, even if a library defines it."""
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
def _children_function(kind: type) -> Children | None:
    """The function that gives the children of objects of this class; None to ignore them."""
    if framework_of_class(kind) is not None:
        return _of_framework
    if issubclass(kind, type):
        return _of_class
    for base, children in _CHILDREN.items():
        if issubclass(kind, base):
            return children
    if issubclass(kind, ModuleType) or kind.__module__ == "builtins":
        return None
    if not _is_own(sys.modules.get(kind.__module__)):
        return _wrapped if any("__call__" in vars(each) for each in kind.__mro__) else None
    return _attributes


def _of_framework(thing: Any) -> Iterable[Any]:
    """None: `Framework.trains` includes the parts of an object."""
    return ()


def _of_class(kind: type) -> Iterable[Any]:
    """Class attributes of the program's own classes, without methods, which may be unused."""
    if not _is_own(sys.modules.get(kind.__module__)):
        return ()
    attributes = vars(kind).items()
    return [
        *(each for name, each in attributes if name[:2] != "__" and type(each) is not FunctionType),
        *kind.__bases__,
    ]


def _of_own_function(function: FunctionType) -> Iterable[Any]:
    if _is_library(function.__code__.co_filename) or _is_this_project(function.__module__):
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
    """Globals loaded by a function and its inner functions, with the attributes read of each."""
    paths: list[list[str]] = []
    in_path = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            paths.append([instruction.argval])
            in_path = True
        elif in_path and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            paths[-1].append(instruction.argval)
        elif instruction.opname != "EXTENDED_ARG":
            in_path = False
    own = [(path[0], tuple(path[1:])) for path in paths]
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(dict.fromkeys([*own, *(path for each in inner for path in _globals(each))]))


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a variable that isn't assigned yet
        return ()


def _wrapped(thing: Any) -> Iterable[Any]:
    """The wrapped function of a `tf.function`, `jax.jit` or other decorator."""
    inner = getattr(thing, "__wrapped__", None)
    return () if inner is None else (inner,)


def _attributes(thing: Any) -> Iterable[Any]:
    kind: type = type(thing)
    slots = [getattr(thing, name, None) for name in slots_of_class(kind)]
    return [*getattr(thing, "__dict__", {}).values(), *slots, kind]


@lru_cache(maxsize=4096)
def slots_of_class(kind: type) -> tuple[str, ...]:
    """The names in the `__slots__` of a class and its bases."""
    slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return tuple(name for each in slots for name in ([each] if isinstance(each, str) else each))


_CHILDREN: dict[type | tuple[type, ...], Children] = {
    FunctionType: _of_own_function,
    MethodType: lambda method: (method.__self__, method.__func__),
    partial: lambda bound: (bound.func, *bound.args, *bound.keywords.values()),
    CellType: _of_cell,
    (list, tuple, deque): lambda nest: islice(nest, _MOST_ELEMENTS),
    (set, frozenset): lambda nest: nest if len(nest) <= _MOST_ELEMENTS else (),
    dict: lambda nest: list(islice(nest.values(), _MOST_ELEMENTS)),
}


def _is_own(module: ModuleType | None) -> bool:
    """Whether a module belongs to the user's program, not to a library or this project."""
    if module is None or _is_this_project(module.__name__):
        return False
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if path is None else not _is_library(path)


def _is_this_project(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _THIS_PROJECT


@lru_cache(maxsize=4096)
def _is_library(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    return path.startswith(_STANDARD_LIBRARY) or "site-packages" in path or "dist-packages" in path
