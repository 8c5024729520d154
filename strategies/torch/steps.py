"""An optimizer's parameters, and hooks that are called once for each step of the program.

torch wraps `step` of each class that has had an instance. Where a subclass calls `super().step()`,
two wrappers call the hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from traceback import walk_stack
from typing import Any

_WRAPPER = "wrapper"
_MODULE = "torch.optim.optimizer"


def parameters_of(optimizer: Any) -> list[Any]:
    """An optimizer's parameters, by their numbers in its `state_dict`."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def closure_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The closure among the arguments of a hook of `optimizer.step`, or None."""
    return next(filter(callable, [*arguments[1:], named.get("closure")]), None)


def step_hooks(
    optimizer: Any,
    before: Callable[..., Any],
    after: Callable[..., Any] | None = None,
) -> list[Any]:
    """Register hooks as torch calls them; returns what removes them."""
    hooks = [optimizer.register_step_pre_hook(_once(before))]
    if after is not None:
        hooks.append(optimizer.register_step_post_hook(_once(after)))
    return hooks


def _once(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def call(optimizer: Any, arguments: Any, named: Any) -> Any:
        wrappers = sum(each is optimizer for each in stepping())
        return hook(optimizer, arguments, named) if wrappers < 2 else None

    return call


def stepping() -> Iterator[Any]:
    """The optimizers whose `step` is on the stack, once for each of torch's wrappers."""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == _WRAPPER and frame.f_globals.get("__name__") == _MODULE:
            yield frame.f_locals.get("self")
