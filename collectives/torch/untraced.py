"""Methods and functions that torch.compile runs, and does not trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Class = TypeVar("Class", bound=type)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def untraced(cls: Class) -> Class:
    """Exclude the class's own public methods, and what they call, from compilation."""
    own = dict(vars(cls))
    methods = [own[name] for name in own if not name.startswith("_") and callable(own[name])]
    excluded = {method: untraced_function(method) for method in methods}
    for name, method in own.items():
        # By any name.
        if callable(method) and method in excluded:
            setattr(cls, name, excluded[method])
    return cls


def untraced_function(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Exclude a function from compilation.

    The exclusion costs something at every call, and the compiler's import a second: both are paid
    only once the compiler is in use.
    """
    excluded: list[Callable[Arguments, Result]] = []

    @functools.wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if not excluded:
            excluded.append(torch.compiler.disable(function))
        return excluded[0](*arguments, **options)

    return call
