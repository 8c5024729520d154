"""The frameworks' objects that a function reaches: by arguments, closures, globals, attributes.

Followed are functions, methods, `functools.partial`, containers, and objects of the program's own
classes; not what libraries define. Of a container only the first elements are looked at, so that
long lists of data cost nothing.
"""

from __future__ import annotations

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
_OBJECTS = 10_000
_STANDARD = sysconfig.get_path("stdlib")
_OURS = {__name__.partition(".")[0], "collectives"}

Children = Callable[[Any], Iterable[Any]]


def training_within(fn: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Any:
    """The first object of a framework that trains, nearest first; None where there is none."""
    waiting = deque([*_children(fn), *args, *kwargs.values()])
    seen: dict[int, Any] = {}  # keeps them alive, and so their ids unique
    while waiting and len(seen) < _OBJECTS:
        thing = waiting.popleft()
        kind: type = type(thing)
        look = _look(kind)
        if look is None or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        framework = framework_of(thing)
        if framework is None:
            waiting.extend(look(thing))
        elif framework.trains(thing):
            return thing
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
        return lambda thing: ()
    for known, children in _KNOWN.items():
        if issubclass(kind, known):
            return children
    if issubclass(kind, type | ModuleType) or kind.__module__ == "builtins":
        return None
    if not _is_own(sys.modules.get(kind.__module__)):
        return _wrapped if any("__call__" in vars(each) for each in kind.__mro__) else None
    return _attributes


def _of_own_function(function: FunctionType) -> Iterable[Any]:
    return () if _is_library(function.__code__.co_filename) else _of_function(function)


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from function.__closure__ or ()
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from _wrapped(function)
    namespace, names = function.__globals__, _names(function.__code__)
    for name in names:
        found = namespace.get(name)
        if isinstance(found, ModuleType) and _is_own(found):
            yield from (vars(found).get(attribute) for attribute in names)
        else:
            yield found


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a function, and in those defined within it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return tuple(
        dict.fromkeys([*code.co_names, *(name for each in inner for name in _names(each))])
    )


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a name without a value as yet
        return ()


def _wrapped(thing: Any) -> Iterable[Any]:
    """The function within a `tf.function`, a `jax.jit`, or another decorator's."""
    inner = getattr(thing, "__wrapped__", None)
    return () if inner is None else (inner,)


def _attributes(thing: Any) -> Iterator[Any]:
    yield from getattr(thing, "__dict__", {}).values()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            yield getattr(thing, name, None)


_KNOWN: dict[type | tuple[type, ...], Children] = {
    FunctionType: _of_own_function,
    MethodType: lambda method: (method.__self__, method.__func__),
    partial: lambda bound: (bound.func, *bound.args, *bound.keywords.values()),
    CellType: _of_cell,
    (list, tuple, set, frozenset): lambda nest: islice(nest, _ELEMENTS),
    dict: lambda nest: list(islice(nest.values(), _ELEMENTS)),
}


def _is_own(module: ModuleType | None) -> bool:
    """Whether a module belongs to the program: neither to a library nor to this project."""
    if module is None or module.__name__.partition(".")[0] in _OURS:
        return False
    path = getattr(module, "__file__", None)
    return module.__name__ == "__main__" if path is None else not _is_library(path)


@lru_cache(maxsize=4096)
def _is_library(path: str) -> bool:
    if path.startswith("<frozen"):
        return True
    return path.startswith(_STANDARD) or "site-packages" in path or "dist-packages" in path
