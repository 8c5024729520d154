"""What goes wrong on one rank alone is known to all of them, at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all

Result = TypeVar("Result")


class DatasetError(RuntimeError):
    """Another rank's dataset raised an exception, or the ranks are at different steps."""


def as_told(rank: int, error: Exception) -> str:
    """What the other ranks are told; what this one was told by another is passed on as it is."""
    if isinstance(error, DatasetError):
        return str(error)
    return f"the dataset of rank {rank} raised {type(error).__name__}: {error}"


def raise_together(communicator: Communicator, own: Exception | None) -> NoReturn:
    """Raise this rank's own exception, or DatasetError for the others'. Collective.

    To be called on every rank, once it is known that at least one has an exception.
    """
    told = None if own is None else as_told(communicator.rank, own)
    texts = communicator.all_gather_object(told)
    if own is not None:
        raise own
    error = DatasetError("; ".join(dict.fromkeys(text for text in texts if text is not None)))
    failed = next(rank for rank, text in enumerate(texts) if text is not None)
    raise raised_on_all(error, communicator.rank, failed)


def call_together(communicator: Communicator, function: Callable[[], Result]) -> Result:
    """The result of the user's function; what it raises on a rank, `raise_together` raises."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    if any(communicator.all_gather_object(error is not None)):
        raise_together(communicator, error)
    return result  # type: ignore[return-value]


def check_together(communicator: Communicator, check: Callable[[], Result]) -> Result:
    """The result of the check; its TypeError or ValueError on a rank is the same one on all."""
    result, refusal = None, None
    try:
        result = check()
    except (TypeError, ValueError) as error:
        refusal = isinstance(error, TypeError), str(error)
    found = communicator.all_gather_object(refusal)
    refused = [(rank, *each) for rank, each in enumerate(found) if each]
    if refused:
        texts = [f"rank {rank}: {text}" for rank, _, text in refused]
        everywhere = len(set(found)) == 1
        kind = TypeError if refused[0][1] else ValueError
        text = refused[0][2] if everywhere else "; ".join(texts)
        raise raised_on_all(kind(text), communicator.rank)
    return result  # type: ignore[return-value]


def raise_apart(communicator: Communicator, place: tuple[int, int]) -> NoReturn:
    """DatasetError, the same on all ranks, where they are at different steps. Collective.

    `place` is the number of an iteration, or of the dataset at the first step, and the step.
    """
    lines = [
        f"  rank {rank}: step {step + 1} of {'iteration' if step else 'a new iteration of dataset'}"
        f" {number}"
        for rank, (number, step) in enumerate(communicator.all_gather_object(place))
    ]
    text = "the ranks' iterations have come apart: must be left by all ranks at the same step"
    raise raised_on_all(DatasetError("\n".join([text, *lines])), communicator.rank)
