"""Methods that torch.compile runs, and does not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def untraced(cls: Class) -> Class:
    """Exclude the class's own public methods, and what they call, from compilation."""
    own = dict(vars(cls))
    methods = [own[name] for name in own if not name.startswith("_") and callable(own[name])]
    excluded = {method: _untraced(method) for method in methods}
    for name, method in own.items():
        # By any name.
        if callable(method) and method in excluded:
            setattr(cls, name, excluded[method])
    return cls


def _untraced(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; its exclusion costs something at every call, and the compiler's import a second.

    Both are paid only once the compiler is in use.
    """
    excluded: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return method(*arguments, **options)
        if not excluded:
            excluded.append(torch.compiler.disable(method))
        return excluded[0](*arguments, **options)

    return call
