"""Errors of datasets: raised by one rank's dataset, or by ranks at different steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.errors import summary_of
from strategies.core.same_error import Errors, by_rank, call_on_all, lowest_error, raise_on_all

Result = TypeVar("Result")


class DatasetError(RuntimeError):
    """Another rank's dataset raised an exception, or the ranks are at different steps."""


def text_for_others(rank: int, error: Exception) -> str:
    """The text for the other ranks; that of an error of a third rank stays as it is."""
    if isinstance(error, DatasetError):
        return str(error)
    return f"the dataset of rank {rank} raised {summary_of(error)}"


def raise_together(communicator: Communicator, own: Exception | None) -> None:
    """Raise this rank's own exception, or DatasetError for the others'. Collective."""
    sent = partial(_sent, communicator.rank)
    raise_on_all(communicator, "a dataset's errors", own, _own_or_others, sent)


def call_together(communicator: Communicator, function: Callable[[], Result]) -> Result:
    """The result of the user's function; errors as in `raise_together`. Collective."""
    sent = partial(_sent, communicator.rank)
    return call_on_all(communicator, "a dataset's function", function, _own_or_others, sent)


def check_together(communicator: Communicator, check: Callable[[], Result]) -> Result:
    """The result of the check; a TypeError or ValueError of any rank is the same one on all."""
    return call_on_all(communicator, "a dataset's arguments", check, _refusal)


def _sent(rank: int, error: Exception) -> Exception:
    return DatasetError(text_for_others(rank, error))


def _own_or_others(errors: Errors, rank: int) -> Exception:
    own = errors[rank]
    if own is not None:
        return raised_on_all(own, rank, rank)
    texts = {failed: str(error) for failed, error in enumerate(errors) if error is not None}
    error = DatasetError("; ".join(dict.fromkeys(texts.values())))
    return raised_on_all(error, rank, min(texts))


def _refusal(errors: Errors, rank: int) -> Exception:
    lowest = lowest_error(errors, rank)
    if not isinstance(lowest, TypeError | ValueError):
        return lowest
    texts = [(failed, str(error)) for failed, error in enumerate(errors) if error is not None]
    if len(texts) == len(errors) and len({text for _, text in texts}) == 1:
        text = str(lowest)
    else:
        text = "; ".join(f"rank {failed}: {each}" for failed, each in texts)
    kind = TypeError if isinstance(lowest, TypeError) else ValueError
    return raised_on_all(kind(text), rank)


def raise_apart(communicator: Communicator, place: tuple[int, int]) -> NoReturn:
    """DatasetError, the same on all ranks, where they are at different steps. Collective.

    `place` is the number of an iteration, or of the dataset at the first step, and the step.
    """
    places = [
        f"step {step + 1} of {'iteration' if step else 'a new iteration of dataset'} {number}"
        for number, step in communicator.all_gather_object(place)
    ]
    text = "the ranks' iterations have come apart: must be left by all ranks at the same step"
    raise raised_on_all(DatasetError(by_rank(text, places)), communicator.rank)
