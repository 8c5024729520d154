"""Nests: arrays inside dicts, lists, tuples and named tuples. Everything else is a leaf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def leaves(nest: Any) -> list[Any]:
    """The leaves of a nest, in the order of its keys and positions (dicts by sorted key)."""
    if isinstance(nest, Mapping):
        return [leaf for key in _keys(nest) for leaf in leaves(nest[key])]
    if isinstance(nest, list | tuple):
        return [leaf for part in nest for leaf in leaves(part)]
    return [nest]


def pack_like(nest: Any, flat: Iterable[Any]) -> Any:
    """A nest of the same structure with these leaves."""
    rest = iter(flat)
    if isinstance(nest, Mapping):
        packed = {key: pack_like(nest[key], rest) for key in _keys(nest)}
        return {key: packed[key] for key in nest}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(pack_like(part, rest) for part in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(pack_like(part, rest) for part in nest)
    return next(rest)


def map_leaves(function: Callable[[Any], Any], nest: Any) -> Any:
    """A nest of the same structure with the function's results for leaves."""
    return pack_like(nest, [function(leaf) for leaf in leaves(nest)])


def map_by_kind(
    flat: Sequence[Any],
    is_special: Callable[[Any], bool],
    of_plain: Callable[[list[Any]], Iterable[Any]],
    of_special: Callable[[list[Any]], Iterable[Any]],
) -> list[Any]:
    """The results of two functions, each called with all leaves of a kind, in the leaves' order.

    Plain leaves come first. Neither function is called without leaves.
    """
    special = [is_special(leaf) for leaf in flat]
    kinds = []
    for wanted, function in ((False, of_plain), (True, of_special)):
        found = [leaf for leaf, kind in zip(flat, special, strict=True) if kind is wanted]
        kinds.append(iter(function(found) if found else ()))
    return [next(kinds[kind]) for kind in special]


def structure(nest: Any) -> str:
    """The nest as text, with * for its leaves: equal texts are equal structures."""
    if isinstance(nest, Mapping):
        parts = [f"{key!r}: {structure(nest[key])}" for key in _keys(nest)]
        return f"{{{', '.join(parts)}}}"
    if isinstance(nest, list | tuple):
        name = type(nest).__name__ if hasattr(nest, "_fields") else ""
        inner = ", ".join(map(structure, nest))
        return f"[{inner}]" if isinstance(nest, list) else f"{name}({inner})"
    return "*"


def _keys(nest: Mapping[Any, Any]) -> list[Any]:
    # Ranks may fill a dict in different orders; keys that can't be compared are sorted by text.
    return sorted(nest, key=lambda key: (type(key).__name__, repr(key)))
