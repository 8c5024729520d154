"""Operations of several calls: their names in messages, and whether they have made any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collectives.group import Group


@contextmanager
def named_scope(comm: Group, name: str) -> Iterator[None]:
    """Within the context, errors name the operation for which the communicator's calls are made.

    The outermost of nested names is used, because that is what the user called. Not collective.
    """
    call = comm._engine.wait_policy.call
    outer = call.scope
    call.scope = outer or name
    try:
        yield
    finally:
        call.scope = outer


def calls_made(comm: Group) -> int:
    """The number of calls that the ranks have compared so far."""
    check = comm._engine.call_check
    return 0 if check is None else check.sequence


def has_ended(comm: Group) -> bool:
    """Whether it can make no further call."""
    return comm._engine.broken is not None
