"""Trying something on all ranks that may fail or hang on some of them, and agreeing how it went."""

from __future__ import annotations

import faulthandler
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.doctor.report import ranks_named

_LONGEST_REASON = 400


@dataclass
class Outcome:
    """How it went on one rank; no reason where it went well."""

    reason: str = ""
    stuck: bool = False


def attempt(mpi: Any, action: Callable[[], Any], limit: float) -> list[Outcome]:
    """Run `action` on every rank; every rank gets all outcomes, in rank order. Collective.

    A rank that raises leaves the others waiting for it inside of the action. They give up after
    `limit` seconds, and their outcomes are stuck: nothing further can be tried then.
    """
    if mpi.Query_thread() == mpi.THREAD_MULTIPLE:
        outcomes: list[Outcome] = mpi.COMM_WORLD.allgather(_run_beside(action, limit))
        return outcomes
    return _attempt_in_this_thread(mpi, action, limit)


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """What went wrong, each thing once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome.reason:
            ranks.setdefault(outcome.reason, []).append(rank)
    return [f"{ranks_named(where)}: {reason}" for reason, where in ranks.items()]


def _run_beside(action: Callable[[], Any], limit: float) -> Outcome:
    """Run it in a thread, which is left behind where it hangs."""
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(_run(action)), daemon=True)
    thread.start()
    thread.join(limit)
    return outcomes[0] if outcomes else Outcome(f"did not end within {limit:g} s", stuck=True)


def _attempt_in_this_thread(mpi: Any, action: Callable[[], Any], limit: float) -> list[Outcome]:
    """Where MPI allows for one thread alone, a rank that hangs can only be ended."""
    faulthandler.dump_traceback_later(limit, exit=True)
    outcome = _run(action)
    if outcome.reason:
        # The ranks may not come to agree on it.
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
        return Outcome(_described(error))
    return Outcome()


def _described(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST_REASON)


class WrongResultError(Exception):
    """A collective gave another result than it should; the message says it all."""
