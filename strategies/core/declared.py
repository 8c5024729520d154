"""Attributes of options: only those that a class declares, so that a misspelt one is no option.

A subclass declares its own by annotations in the class, as a dataclass does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeAlias

Checks: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""By an attribute's name what makes its value of a given one, or raises."""


def declared(kind: type) -> list[str]:
    """The names of the attributes that a class of options and its bases annotate."""
    classes = reversed(kind.__mro__)
    names = dict.fromkeys(name for each in classes for name in inspect.get_annotations(each))
    names.pop("checks", None)
    return list(names)


def refuse_unknown(owner: object, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raise AttributeError for an attribute that the owner doesn't have."""
    kind = type(owner).__name__
    raise AttributeError(f"{kind} has no attribute {name!r}: it has {', '.join(allowed)}")


def refuse_change(owner: object, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raise AttributeError for an attribute of an owner whose attributes can't be set."""
    if name not in allowed:
        refuse_unknown(owner, name, allowed)
    kind = type(owner).__name__
    raise AttributeError(f"{kind}.{name} can't be changed: make a new one, {kind}({name}=…)")


class CheckedAttributes:
    """Base of options that may be changed: what is assigned is checked as in the constructor."""

    checks: ClassVar[Checks]

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.checks.get(name)
        if check is None and name not in declared(type(self)):
            refuse_unknown(self, name, declared(type(self)))
        object.__setattr__(self, name, check(value) if check else value)


class FixedAttributes:
    """Base of dataclasses of options that can't be changed: each attribute is set once."""

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = declared(type(self))
        if name in vars(self) or name not in allowed:
            refuse_change(self, name, allowed)
        object.__setattr__(self, name, value)
