"""A message on its way, as its sender sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from collectives.errors import RankFailedError
from collectives.messaging.liveness import Processes
from collectives.transports.base import Bytes, Sending

abandoned: list[object] = []
"""Sends that can't end: MPI may still read their memory."""


class Sender(Protocol):
    """What a message on its way needs of the mailbox that sends it."""

    def advance(self, sent: SendRequest) -> bool:
        """Advance it; whether it is done or has failed."""

    def wait(
        self, ready: Callable[[], bool], what: str, absent: Callable[[], dict[int, str]]
    ) -> None:
        """Return when `ready()`; DeadlineExceededError names the ranks in `absent()`."""


class SendRequest:
    """A message on its way. It may be dropped: the mailbox keeps it until it is done."""

    def __init__(self, sender: Sender, peer: int, sending: Sending, kept: Sequence[Bytes]):
        self._sender, self.peer = sender, peer
        self._sending: Sending | None = sending
        self._kept: Sequence[Bytes] = kept
        self._error: RankFailedError | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once: the arrays may be changed then."""
        return self._sender.advance(self)

    def wait(self) -> None:
        """Return when the arrays may be changed.

        The peer may have yet to take the message then. Raises RankFailedError where the peer has
        died, DeadlineExceededError where it doesn't take the message within the communicator's
        deadline (the message is on its way all the same).
        """
        what = f"mailbox: send(to rank {self.peer})"
        self._sender.wait(self.done, what, lambda: {self.peer: ""})
        if self._error is not None:
            raise self._error

    def advance(self, processes: Processes) -> bool:
        """Whether it is done, or has failed; the mailbox holds its lock."""
        if self._sending is None:
            return True
        dead = processes.died_lately(self.peer)
        try:
            if not self._sending.done():
                if not dead:
                    return False
                text = f"rank {self.peer} has died, and did not take what was sent to it"
                raise RankFailedError(text)
        except RankFailedError as error:
            self._error = error
            abandoned.append((self._sending, self._kept))
        self._sending, self._kept = None, ()
        return True
