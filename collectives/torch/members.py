"""What the members of a group exchange through torch's store, outside of any call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

_CLOSING = "closing"
_PROPOSALS, _DECISION = "proposals to close", "decision to close"
_POLL_SECONDS = 1e-3
_PAUSE_SECONDS = 0.1
"""The longest time between two groups that one call closes."""


class Members:
    """The members of one group, by its own part of the store.

    The keys of a group that an earlier attempt of the job created begin with another `session`.
    """

    _gave_up = -math.inf
    """When this process last waited in vain for others to close a group."""

    def __init__(self, store: Any, rank: int, size: int, session: str) -> None:
        self._store, self._rank, self._size, self._session = store, rank, size, session
        self._closes = False

    def await_creation(self, ranks: Sequence[int], timeout: timedelta) -> None:
        """Wait until every member creates the group; DistStoreError after the timeout.

        MPI, which creates its communicators together, has no deadline. ValueError if another member
        creates it of other ranks than these.
        """
        names = [self._key(f"created by {rank}") for rank in range(self._size)]
        self._store.set(names[self._rank], str(list(ranks)))
        self._store.wait(names, timeout)
        for name in names:
            given = self._store.get(name).decode()
            if given != str(list(ranks)):
                raise ValueError(
                    f"a group of ranks {list(ranks)}: another of these ranks made it of ranks"
                    f" {given}. All ranks must give the same lists to new_group, in the same order"
                )

    def end(self) -> None:
        """Announce that this member makes no call any more."""
        self._store.set(self._key(f"closed by {self._rank}"), "")

    def begin_closing(self) -> None:
        """Announce that this member closes the group. A second call does nothing."""
        if not self._closes:
            self._closes = True
            self._store.add(self._key(_CLOSING), 1)
            self.end()

    def have_closed(self, rank: int | None) -> bool:
        """Whether a member makes no call any more; None: whether all others make none."""
        others = [each for each in range(self._size) if each != self._rank]
        ranks = others if rank is None else [rank]
        try:
            return bool(self._store.check([self._key(f"closed by {each}") for each in ranks]))
        except RuntimeError:
            # The rank that serves the store has ended: what the others do can't be known.
            return False

    def all_close(self, seconds: float) -> bool:
        """Whether every member closes it within that time: the same for all members.

        A member that arrives later must not close what the others keep: it would wait for them.
        Several groups that are closed one after the other wait once. Where the others' programs
        have ended it doesn't wait.
        """
        began = time.monotonic()
        limit = began + (seconds if began > Members._gave_up + _PAUSE_SECONDS else 0)
        while True:
            # In this order: members announce that they close before they make no call any more.
            gone = self.have_closed(None)
            if self._store.add(self._key(_CLOSING), 0) == self._size:
                return self._decide("yes")
            if gone or time.monotonic() > limit:
                Members._gave_up = time.monotonic()
                return self._decide("no")
            time.sleep(_POLL_SECONDS)

    def _decide(self, proposal: str) -> bool:
        """The first member's proposal holds for all."""
        if self._store.add(self._key(_PROPOSALS), 1) == 1:
            self._store.set(self._key(_DECISION), proposal)
        return bool(self._store.get(self._key(_DECISION)) == b"yes")

    def _key(self, name: str) -> str:
        return f"{self._session}{name}"
