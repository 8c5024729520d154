"""Requests, answers and notifications between ranks, over a mailbox.

A request has a number, and its answer bears the same one. A notification has no number and no
answer. Messages between two ranks keep their order: a request is handled after every notification
that its sender sent before. An answer may be sent at any later time, and in any order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from collectives.errors import RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.message import SendRequest
from collectives.messaging.remote_error import Failure, rebuild
from collectives.reductions.reduction import Array

POLL_SECONDS = 0.1
"""How often the liveness of peers is polled."""

Result: TypeAlias = tuple[Any, Sequence[Array]]
"""What an answer carries: a value, and arrays that belong to the receiver."""


class Call(NamedTuple):
    """A request or notification that has arrived."""

    source: int
    number: int | None
    """None for a notification."""
    body: Any
    arrays: list[Array]


class _Question(NamedTuple):
    number: int | None
    body: Any


class _Answer(NamedTuple):
    number: int
    value: Any
    failure: Failure | None


class PendingAnswer:
    """The answer to a request, once it has arrived."""

    def __init__(self, peer: int, number: int, on_arrival: Callable[[PendingAnswer], None]) -> None:
        self.peer, self.number, self._on_arrival = peer, number, on_arrival
        self._answer: _Answer | None = None
        self._arrays: list[Array] = []

    def settle(self, answer: _Answer, arrays: list[Array]) -> None:
        """The answer has arrived. For the endpoint."""
        self._answer, self._arrays = answer, arrays
        self._on_arrival(self)

    def done(self) -> bool:
        """Whether the answer has arrived."""
        return self._answer is not None

    def error(self) -> BaseException | None:
        """The error that the answer carries, with its place and traceback as the cause."""
        assert self._answer is not None, "no answer has arrived"
        return None if self._answer.failure is None else rebuild(self._answer.failure)

    def result(self) -> Result:
        """The value and arrays of the answer; raises the error that it carries instead."""
        error = self.error()
        if error is not None:
            raise error
        assert self._answer is not None
        return self._answer.value, self._arrays


class Endpoint:
    """One rank's requests to others, and others' requests to this rank.

    Any thread may send; one thread at a time receives, that is calls `step`, `drain` or `wait`.
    There `handle` is called with what other ranks request or notify. It answers a request with
    `answer` or `fail`, then or later.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        handle: Callable[[Call], None],
        name: Callable[[int], str] = "rank {}".format,
        ended: str = "has ended",
    ) -> None:
        """`name` names a rank in errors, `ended` says there why a living one doesn't answer."""
        self._mailbox, self._handle = mailbox, handle
        self._name, self._ended = name, ended
        self._numbers = itertools.count()
        self.outstanding: dict[int, PendingAnswer] = {}
        """The requests without an answer, by number."""
        self._next_poll = 0.0
        self._next_check: dict[int, float] = {}

    def request(
        self,
        peer: int,
        body: Any,
        arrays: Iterable[Any] = (),
        on_arrival: Callable[[PendingAnswer], None] = lambda answer: None,
    ) -> PendingAnswer:
        """Send a request; the arrays must not be changed before the answer has arrived.

        `on_arrival` is called with the answer, by the thread that receives it. Raises
        RankFailedError where the peer has died or closed its mailbox.
        """
        pending = PendingAnswer(peer, next(self._numbers), on_arrival)
        self.outstanding[pending.number] = pending
        try:
            self._send(peer, _Question(pending.number, body), arrays)
        except BaseException:
            self.withdraw(pending)
            raise
        return pending

    def withdraw(self, pending: PendingAnswer) -> None:
        """Throw the answer away when it arrives, if it has not."""
        self.outstanding.pop(pending.number, None)

    def notify(self, peer: int, body: Any, arrays: Iterable[Any] = ()) -> SendRequest:
        """Send what has no answer. Raises RankFailedError as `request`."""
        return self._send(peer, _Question(None, body), arrays)

    def answer(
        self, call: Call, value: Any = None, arrays: Iterable[Any] = ()
    ) -> SendRequest | None:
        """Answer a request; None where the peer has ended and needs no answer."""
        return self._answer(call, value, None, arrays)

    def fail(self, call: Call, failure: Failure) -> SendRequest | None:
        """Answer a request with an error, which `PendingAnswer.result` raises there."""
        return self._answer(call, None, failure, ())

    def _answer(
        self, call: Call, value: Any, failure: Failure | None, arrays: Iterable[Any]
    ) -> SendRequest | None:
        assert call.number is not None, "a notification has no answer"
        try:
            return self._mailbox.send(call.source, _Answer(call.number, value, failure), arrays)
        except RankFailedError:
            return None

    def _send(self, peer: int, question: _Question, arrays: Iterable[Any]) -> SendRequest:
        try:
            return self._mailbox.send(peer, question, arrays)
        except RankFailedError as error:
            raise RankFailedError(f"nothing can be sent to {self._name(peer)}: {error}") from error

    def step(self, timeout: float | None = 0.0) -> bool:
        """Receive and handle one message; False where none arrives in time."""
        message = self._mailbox.receive(timeout)
        if message is None:
            return False
        header = message.header
        if isinstance(header, _Question):
            self._handle(Call(message.source, header.number, header.body, message.arrays))
        else:
            pending = self.outstanding.pop(header.number, None)
            if pending is not None:
                pending.settle(header, message.arrays)
        return True

    def drain(self) -> None:
        """Receive and handle every message that is here."""
        while self.step():
            pass

    def alive(self, peer: int) -> bool:
        """False once a rank is known to have died."""
        return self._mailbox.alive(peer)

    def departed(self, peers: Iterable[int]) -> list[int]:
        """Those of the peers that have died or closed their mailbox; polled every 0.1 s.

        Messages that they sent before may still be here: see `drain`.
        """
        now = time.monotonic()
        if now < self._next_poll:
            return []
        self._next_poll = now + POLL_SECONDS
        return [peer for peer in peers if not self._mailbox.present(peer)]

    def check_present(self, peer: int) -> None:
        """RankFailedError where a peer has died or closed its mailbox; polled every 0.1 s."""
        now = time.monotonic()
        if now >= self._next_check.get(peer, 0.0):
            if not self._mailbox.present(peer):
                raise RankFailedError(self.absence(peer))
            self._next_check[peer] = now + POLL_SECONDS

    def absence(self, peer: int) -> str:
        """The reason why a peer that isn't present doesn't answer."""
        state = self._ended if self._mailbox.alive(peer) else "has died"
        return f"{self._name(peer)} {state}"

    def wait(
        self,
        ready: Callable[[], bool],
        peers: Collection[int],
        what: str,
        absent: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        """Return when `ready()`, which depends on these peers; messages are handled meanwhile.

        Raises RankFailedError where one of the peers ends before, DeadlineExceededError after the
        communicator's deadline; that names `what`, and the ranks in `absent()` or the peers.
        """

        def arrived() -> bool:
            self.drain()
            return ready()

        def check_alive() -> None:
            for peer in peers:
                if not self._mailbox.present(peer) and not arrived():
                    raise RankFailedError(f"{self.absence(peer)}: {what} waited for it")

        if not arrived():
            waited_for = absent or (lambda: dict.fromkeys(peers, ""))
            self._mailbox.wait(arrived, what, waited_for, check_alive)

    def results(
        self,
        pending: Sequence[PendingAnswer],
        what: str,
        absent: Callable[[], dict[int, str]] | None = None,
    ) -> list[Result]:
        """The answers' values and arrays; waits for them as `wait` does.

        Raises the first error that an answer carries. Late answers are thrown away.
        """
        try:
            for each in pending:
                self.wait(each.done, [each.peer], what, absent)
        finally:
            for each in pending:
                self.withdraw(each)
        return [each.result() for each in pending]
