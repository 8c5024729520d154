"""Names for what calls are made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from collectives.group import Group


@contextmanager
def named_scope(comm: Group, name: str) -> Iterator[None]:
    """Let errors name what the communicator's calls within are made for.

    Of nested ones the outermost is named, as that is what the user called. Not collective.
    """
    call = comm._engine.wait_policy.call
    outer = call.scope
    call.scope = outer or name
    try:
        yield
    finally:
        call.scope = outer
