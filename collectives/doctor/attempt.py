"""Attempts of an action on all ranks that may fail or hang on some, with every rank's outcome."""

from __future__ import annotations

import faulthandler
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from collectives.communicator import Communicator
from collectives.doctor.report import ranks_by, ranks_named
from collectives.errors import summary_of

Results: TypeAlias = Iterable[tuple[Any, Any]]
"""Pairs of the actual and the expected result."""

_LONGEST_REASON = 400
_LONGEST_VALUE = 90


@dataclass
class Outcome:
    """Outcome on one rank; the reason is empty if it succeeded."""

    reason: str = ""
    stuck: bool = False


def attempt(mpi: Any, action: Callable[[], Any], limit: float) -> list[Outcome]:
    """Run `action` on every rank; every rank gets all outcomes, in rank order. Collective.

    If a rank raises, the others may wait for it inside the action. They stop waiting after `limit`
    seconds, and their outcomes are stuck: no further attempt is possible then.
    """
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        outcomes: list[Outcome] = mpi.COMM_WORLD.allgather(_run_in_thread(action, limit))
        return outcomes
    return _attempt_in_this_thread(mpi, action, limit)


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """The distinct reasons, each with its ranks."""
    ranks = ranks_by(outcome.reason for outcome in outcomes)
    return [f"{ranks_named(where)}: {reason}" for reason, where in ranks.items() if reason]


def _run_in_thread(action: Callable[[], Any], limit: float) -> Outcome:
    """Run the action in a thread, which is abandoned if it hangs."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_run(action)), daemon=True)
    thread.start()
    thread.join(limit)
    return outcomes[0] if outcomes else Outcome(f"did not end within {limit:g} s", stuck=True)


def _attempt_in_this_thread(mpi: Any, action: Callable[[], Any], limit: float) -> list[Outcome]:
    """Run the action in this thread, if MPI permits no other; a rank that hangs is ended."""
    faulthandler.dump_traceback_later(limit, exit=True)
    outcome = _run(action)
    if outcome.reason:
        # Printed now, because the ranks may not complete the exchange of outcomes.
        print(f"rank {mpi.COMM_WORLD.rank}: {outcome.reason}", file=sys.stderr, flush=True)
    outcomes: list[Outcome] = mpi.COMM_WORLD.allgather(outcome)
    faulthandler.cancel_dump_traceback_later()
    return outcomes


def _run(action: Callable[[], Any]) -> Outcome:
    try:
        action()
    except WrongResultError as error:
        return Outcome(str(error))
    except Exception as error:
        return Outcome(textwrap.shorten(summary_of(error), _LONGEST_REASON))
    return Outcome()


class WrongResultError(Exception):
    """A collective returned a wrong result; the message is complete."""


def check(trial: Callable[[Communicator], Results], comm: Communicator) -> None:
    """Run a trial; WrongResultError for the first wrong result."""
    for actual, expected in list(trial(comm)):
        same_dtype = np.asarray(actual).dtype == np.asarray(expected).dtype
        if not (np.array_equal(actual, expected) and same_dtype):
            raise WrongResultError(f"got {_shown(actual)}, expected {_shown(expected)}")


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), _LONGEST_VALUE)
