"""What the members of a group exchange through torch's store, outside of any call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from collectives.errors import DeadlineExceededError

_CLOSING = "closing"
_POLL_SECONDS = 1e-3
_SHORTEST_WAIT = 0.1
_PAUSE_SECONDS = 1.0
"""The longest time between two groups that one call closes."""


class Members:
    """The members of one group, by its own part of the store.

    The keys of an earlier group of the same name begin with another `session`.
    """

    _gave_up = -math.inf
    """When this process last waited in vain for others to close a group."""

    def __init__(self, store: Any, rank: int, size: int, session: str) -> None:
        self._store, self._rank, self._size, self._session = store, rank, size, session
        self._closes = False

    def await_creation(self, ranks: Sequence[int], timeout: timedelta) -> None:
        """Wait until every member creates the group, or DeadlineExceededError after the timeout.

        MPI, which creates its communicators together, has no deadline. A member that comes later
        than another's timeout raises, too. ValueError if another member creates it of other ranks
        than these.
        """
        names = [self._key(f"created by {rank}") for rank in range(self._size)]
        self._store.set(names[self._rank], str(list(ranks)))
        late = []
        try:
            self._store.wait(names, timeout)
        except RuntimeError:
            every = zip(ranks, names, strict=True)
            late = [rank for rank, name in every if not self._store.check([name])]
        if not self._decide("create", not late):
            reason = f"ranks {late} have not created it within {timeout.total_seconds():g} s"
            if not late:
                reason = "another of these ranks has waited for its timeout, and gave up"
            raise DeadlineExceededError(f"a group of ranks {list(ranks)}: {reason}", tuple(late))
        for name in names:
            given = self._store.get(name).decode()
            if given != str(list(ranks)):
                raise ValueError(
                    f"a group of ranks {list(ranks)}: another of these ranks made it of ranks"
                    f" {given}. All ranks must give the same lists to new_group, in the same order"
                )

    def end(self) -> None:
        """Announce that this member makes no call any more."""
        with suppress(RuntimeError):  # of a store whose server has ended: nobody can read it then
            self._store.set(self._key(f"ended by {self._rank}"), "")

    def begin_closing(self) -> None:
        """Announce that this member closes the group. A second call does nothing."""
        if not self._closes:
            self._closes = True
            # In this order: who finds that all have ended finds how many close it, too.
            with suppress(RuntimeError):
                self._store.add(self._key(_CLOSING), 1)
            self.end()

    def have_ended(self, rank: int | None) -> bool:
        """Whether a member makes no call any more; None: whether all others make none."""
        others = [each for each in range(self._size) if each != self._rank]
        ranks = others if rank is None else [rank]
        try:
            return bool(self._store.check([self._key(f"ended by {each}") for each in ranks]))
        except RuntimeError:
            # The rank that serves the store has ended: what the others do can't be known.
            return False

    def await_all_closing(self, seconds: float) -> bool:
        """Whether every member closes it within that time: the same for all members.

        A member that arrives later must not close what the others keep: it would wait for them.
        The whole wait is made once for groups that are closed one after the other, and none where
        the others' programs have ended.
        """
        try:
            return self._await_closing(seconds)
        except RuntimeError:
            # The rank that serves the store has ended, and so keeps the group.
            return False

    def _await_closing(self, seconds: float) -> bool:
        began = time.monotonic()
        limit = began + (_SHORTEST_WAIT if began < Members._gave_up + _PAUSE_SECONDS else seconds)
        while True:
            ended = self.have_ended(None)
            if self._store.add(self._key(_CLOSING), 0) == self._size:
                return self._decide("close", True)
            if ended:
                return self._decide("close", False)
            if time.monotonic() > limit:
                Members._gave_up = time.monotonic()
                return self._decide("close", False)
            time.sleep(_POLL_SECONDS)

    def _decide(self, what: str, proposal: bool) -> bool:
        """The first member's proposal holds for all."""
        decision = self._key(f"decision to {what}")
        if self._store.add(self._key(f"proposals to {what}"), 1) == 1:
            self._store.set(decision, "yes" if proposal else "no")
        return bool(self._store.get(decision) == b"yes")

    def _key(self, name: str) -> str:
        return f"{self._session}{name}"
