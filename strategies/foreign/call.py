"""Calling a function as a replica, where a framework is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strategies.foreign.reach import training_within
from strategies.foreign.refusal import refused_here
from strategies.foreign.scope import StepsRefused


def call_guarded(
    strategy: str,
    rank: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the function, if neither it nor its arguments hold what would train apart.

    `rank` is this one's in the strategy's communicator. Raises TypeError otherwise, and where the
    function makes a foreign optimizer's step by other ways.
    """
    where = f"run of {strategy}"
    found = training_within(fn, args, kwargs)
    if found is not None:
        raise refused_here(found, f"is reached by what {where} calls", rank)
    with StepsRefused(where, rank):
        return fn(*args, **kwargs)
