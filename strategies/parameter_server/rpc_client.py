"""One worker's end of the traffic with the parameter servers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator, RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.send_request import SendRequest
from collectives.waiting.wait_policy import WaitingCall, WaitPolicy
from strategies.parameter_server.buffers import Copies
from strategies.parameter_server.requests import Answer, Leave
from strategies.parameter_server.roles import Roles

Array = NDArray[Any]
Result = tuple[Any, Sequence[Array]]
"""What an answer carries: a value, and arrays."""

_MOST_BYTES_UNDER_WAY = 256 << 20
_LOOK_SECONDS = 0.2
_MOST_PUSHES_UNDER_WAY = 256
_FAILED = "these parts failed, and may be half changed; all other parts were changed:"


class RaisedOnServerError(Exception):
    """The cause of an error that was raised on a parameter server: where that was."""


class RpcClient:
    """Requests to the servers, answers, and the errors of pushes.

    A push is on its way when it returns, and its arrays may be changed. What goes wrong with it on
    the server is raised by a later `prepare`, `look` or `wait`. Waits raise RankFailedError where a
    server that is waited for has died, and DeadlineExceededError after the communicator's deadline.
    """

    def __init__(self, mailbox: Mailbox, cast: Roles, world: Communicator) -> None:
        self._mailbox, self._cast, self._world = mailbox, cast, world
        self._numbers = count()
        self._expected: set[int] = set()
        self._answers: dict[int, tuple[Answer, Sequence[Array]]] = {}
        self._errors: list[Answer] = []
        self._copies = Copies()
        self._under_way: deque[tuple[SendRequest, list[Array]]] = deque()
        self._bytes_under_way = 0
        self.has_left = False
        self._refusal: str | None = None
        self._next_look = [0.0] * len(cast.servers)
        self.lock = threading.RLock()
        """Held by whoever speaks with the servers: one thread at a time."""
        self.failures: Counter[int] = Counter()
        """How many pushes to each shard are known to have failed."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._crowded = world.local_size > cores

    def push(self, server: int, request: Any, arrays: Iterable[Array] = ()) -> None:
        """Send a request that isn't answered, with copies of the arrays.

        It doesn't raise what has gone wrong before, so that several that belong together all go:
        call `prepare` before the first one.
        """
        copies = [self._copies.copy(np.asarray(array)) for array in arrays]
        sent = self._send(server, (None, request), copies)
        self._bytes_under_way += sum(array.nbytes for array in copies)
        self._under_way.append((sent, copies))

    def ask(self, server: int, request: Any, arrays: Sequence[Array] = ()) -> int:
        """Send a request; the number of its answer. The arrays mustn't change before that."""
        number = next(self._numbers)
        self._expected.add(number)
        self._send(server, (number, request), arrays)
        return number

    def answers(
        self,
        asked: Sequence[tuple[int, int]],
        what: str,
        absent: Callable[[], dict[int, str]] | None = None,
    ) -> list[Result]:
        """Of each number and its server the answer's value and arrays.

        Raises the first error that an answer carries. What pushes have done wrong stays for later.
        """
        try:
            for number, server in asked:
                self._await(partial(self._answers.__contains__, number), [server], what, absent)
            found = [self._answers[number] for number, _ in asked]
        finally:
            # One that comes after the deadline is nobody's.
            for number, _ in asked:
                self._expected.discard(number)
                self._answers.pop(number, None)
        for answer, _ in found:
            if answer.error is not None:
                raise answer.error from RaisedOnServerError(answer.trace)
        return [(answer.value, arrays) for answer, arrays in found]

    def wait(
        self,
        ready: Callable[[], bool],
        servers: Sequence[int],
        what: str,
        absent: Callable[[], dict[int, str]] | None = None,
    ) -> None:
        """Return when `ready()`, which depends on these servers; messages move meanwhile.

        `absent` tells the ranks that are to be named where that takes longer than the deadline.
        """
        self._await(ready, servers, what, absent)
        self._raise_errors()

    def _await(
        self,
        ready: Callable[[], bool],
        servers: Sequence[int],
        what: str,
        absent: Callable[[], dict[int, str]] | None,
    ) -> None:
        ranks = [self._cast.servers[server] for server in servers]

        def look() -> bool:
            self._take_in()
            return ready()

        def check_alive() -> None:
            for rank in ranks:
                if not self._mailbox.present(rank) and not look():
                    raise RankFailedError(f"{self._gone(rank)}: {what} waited for it")

        if not look():
            patience = WaitPolicy(self._world.deadline)
            patience.call = WaitingCall(what, None)
            patience.check_alive = check_alive
            if self._crowded:
                patience.share_cores()
            patience.spin_until(look, absent or (lambda: dict.fromkeys(ranks, "")))

    def look(self) -> None:
        """Take in what has come; raise what has gone wrong. RuntimeError after `leave`."""
        self._check_here()
        self._take_in()
        self._raise_errors()

    def prepare(self) -> None:
        """Before pushes: as `look`; waits where too much is under way."""
        self.look()
        self._make_room()

    def _take_in(self) -> None:
        while (message := self._mailbox.receive(timeout=0)) is not None:
            answer: Answer = message.header
            if answer.number is None:
                self._errors.append(answer)
                if answer.shard is not None:
                    self.failures[answer.shard] += 1
            elif answer.number in self._expected:
                self._answers[answer.number] = answer, message.arrays

    def _raise_errors(self) -> None:
        """The first one; those that came with it are told of."""
        if self._errors:
            errors, self._errors = self._errors, []
            traces = "\n".join([_FAILED, *(answer.trace for answer in errors)])
            assert errors[0].error is not None
            raise errors[0].error from RaisedOnServerError(traces)

    def _send(self, server: int, header: Any, arrays: Sequence[Array]) -> SendRequest:
        self._check_here()
        rank = self._cast.servers[server]
        try:
            return self._mailbox.send(rank, header, arrays)
        except RankFailedError as error:
            name = self._cast.name(rank)
            raise RankFailedError(f"nothing can be sent to {name}: {error}") from error

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Iterator[None]:
        """Within it whatever speaks with the servers raises RuntimeError, but for `leave`."""
        before, self._refusal = self._refusal, reason
        try:
            yield
        finally:
            self._refusal = before

    def _check_here(self) -> None:
        if self._refusal is not None:
            raise RuntimeError(self._refusal)
        if self.has_left:
            raise RuntimeError("this worker has left the parameter servers: see `shutdown`")

    def check_alive(self, server: int) -> None:
        """RankFailedError where it has ended, by what was seen a short while ago."""
        now, rank = time.monotonic(), self._cast.servers[server]
        if now >= self._next_look[server]:
            self._next_look[server] = now + _LOOK_SECONDS
            if not self._mailbox.present(rank):
                self._next_look[server] = 0.0
                raise RankFailedError(self._gone(rank))

    def _gone(self, rank: int) -> str:
        """What happened to a server that answers no more."""
        ended = "has ended, or never called `serve()`" if self._mailbox.alive(rank) else "has died"
        return f"{self._cast.name(rank)} {ended}"

    def leave(self) -> None:
        """Say goodbye to all servers that live. A second call does nothing."""
        with self.lock:
            if self.has_left:
                return
            for rank in self._cast.servers:
                # A server that has died needs no goodbye.
                with contextlib.suppress(RankFailedError):
                    self._mailbox.send(rank, (None, Leave()))
            self.has_left = True
            with contextlib.suppress(RankFailedError):
                self._mailbox.flush()

    def _make_room(self) -> None:
        """Let memory go that is done with; wait where too much is under way."""
        while self._under_way and self._under_way[0][0].done():
            self._finish_first()
        while (
            len(self._under_way) > _MOST_PUSHES_UNDER_WAY
            or self._bytes_under_way > _MOST_BYTES_UNDER_WAY
        ):
            sent = self._under_way[0][0]
            self.wait(sent.done, [self._cast.servers.index(sent.peer)], "a push")
            self._finish_first()

    def _finish_first(self) -> None:
        _, copies = self._under_way.popleft()
        for copied in copies:
            self._bytes_under_way -= copied.nbytes
            self._copies.give_back(copied)
