"""What is said of a model that would train apart."""

from __future__ import annotations

from typing import Any

from collectives.consistency.uncaught import raised_on_all
from strategies.foreign.framework import Framework
from strategies.foreign.known import framework_of


def refused(thing: Any, what: str) -> TypeError:
    """The error for a framework's object, the same on every rank that meets it.

    `what` is said of the object: where it was made or used.
    """
    framework = _framework(thing)
    reading = f"\n  What is only read passes: {framework.reading}." if framework.reading else ""
    return TypeError(
        f"the {framework.name} {framework.told(thing)} {what}: it would train apart on every rank,"
        f" since strategies keep only strategies.Variable in step; adapters for {framework.name}"
        f" are not there yet.\n  Instead: {framework.instead}.{reading}"
    )


def refused_here(thing: Any, what: str, rank: int) -> TypeError:
    """As `refused`, found on this rank by itself, which all ranks do that run the same program.

    `rank` is this one's number in the strategy's communicator. Rank 0 shows the traceback.
    """
    return raised_on_all(refused(thing, what), rank)


def refused_for_variable(thing: Any, position: int) -> TypeError | None:
    """The error for a pair of `apply_gradients`; None where the object is no framework's."""
    if framework_of(thing) is None:
        return None
    return refused(thing, f"at position {position} of apply_gradients is no strategies.Variable")


def refused_by_checkpoint(thing: Any, path: str, *, named: bool) -> TypeError | None:
    """The error for what a checkpoint would leave out; None for what it may.

    That is what is no framework's, and, unless it was named itself, what doesn't train.
    """
    framework = framework_of(thing)
    if framework is None or not (named or framework.trains(thing)):
        return None
    return TypeError(
        f"{path} is the {framework.name} {framework.told(thing)}, of which a Checkpoint saves"
        f" nothing: it knows strategies.Variable; adapters for {framework.name} are not there yet."
        f"\n  Instead: save it by {framework.name}'s own means on the chief (strategy.is_chief), or"
        " give the Checkpoint an object of yours with saved_tensors and restore_tensors"
    )


def _framework(thing: Any) -> Framework:
    framework = framework_of(thing)
    assert framework is not None
    return framework
