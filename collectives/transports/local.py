"""Ranks as threads of one process, for tests and for use without MPI."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.errors import RankFailedError
from collectives.transports.base import (
    Bytes,
    ControlChannel,
    Copied,
    Message,
    MessageChannel,
    Receiving,
    Sending,
    Transport,
)
from collectives.waiting.wait_policy import CHECK_SECONDS, WaitPolicy

Result = TypeVar("Result")

_EXCHANGE_TAG = -1
_SPLIT_TAG = -2
_WORDS_TAG = -3
_POST_TAG = -4
_ANY_SOURCE = -1


class _Switchboard:
    """The queues between the ranks of one world, created on first use."""

    def __init__(self) -> None:
        self._queues: dict[tuple[Any, int, int, int], queue.SimpleQueue[Any]] = defaultdict(
            queue.SimpleQueue
        )
        self._lock = threading.Lock()
        self.failed: int | None = None

    def line(self, world: Any, source: int, target: int, tag: int) -> queue.SimpleQueue[Any]:
        with self._lock:
            line = self._queues[world, source, target, tag]
            if self.failed is not None:
                line.put(None)
            return line

    def take(self, line: queue.SimpleQueue[Any], timeout: float = 0.0) -> Any:
        """The next content of a queue; queue.Empty if there is none in time.

        Raises RankFailedError if a rank has ended.
        """
        content = line.get(timeout=timeout) if timeout else line.get_nowait()
        if content is None:
            raise RankFailedError(f"rank {self.failed} ended with an exception")
        return content

    def fail(self, rank: int) -> None:
        """End every present and future wait."""
        with self._lock:
            if self.failed is None:
                # The others end by the first one's.
                self.failed = rank
            for line in self._queues.values():
                line.put(None)


class LocalTransport(Transport):
    """One thread's transport. `run` starts a world of them."""

    one_process = True

    def __init__(self, switchboard: _Switchboard, world: Any, rank: int, size: int) -> None:
        self._switchboard, self._world = switchboard, world
        self._children = 0
        self.rank, self.size = rank, size
        self.wait_policy = WaitPolicy()

    def put(self, content: Any, peer: int, tag: int) -> None:
        """Put something into the queue to a peer."""
        self._switchboard.line(self._world, self.rank, peer, tag).put(content)

    def take(self, peer: int, tag: int, timeout: float = 0.0) -> Any:
        """Take the next content of the queue from a peer; queue.Empty if there is none in time."""
        line = self._switchboard.line(self._world, peer, self.rank, tag)
        return self._switchboard.take(line, timeout)

    def _get(self, peer: int, tag: int) -> Any:
        deadline = self.wait_policy.deadline
        end = math.inf if deadline is None else time.monotonic() + deadline
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return self.take(peer, tag, min(CHECK_SECONDS, left))
            except queue.Empty:
                self.wait_policy.check_alive()
                if time.monotonic() >= end:
                    raise self.wait_policy.exceeded(self.absent([peer])) from None

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Put copies of all sends into their queues, then wait for each receive."""
        for peer, buffer in sends:
            self.put(bytes(buffer), peer, _EXCHANGE_TAG)
        for peer, buffer in receives:
            buffer[:] = self._get(peer, _EXCHANGE_TAG)

    def send(self, buffer: Bytes, peer: int, tag: int, kind: int) -> Sending:
        """Put a copy into the peer's queue."""
        self.put((bytes(buffer), kind), peer, tag)
        return Copied()

    def receive(self, buffer: Bytes, peer: int, tag: int) -> Receiving | None:
        """Take the next message from the peer's queue."""
        try:
            content, kind = self.take(peer, tag)
        except queue.Empty:
            return None
        return Copied(memoryview(content), kind)

    def node_leader(self) -> int:
        """Rank 0, because all threads share one memory."""
        return 0

    def open_control_channel(self) -> ControlChannel:
        """Words in separate queues."""
        return _LocalControlChannel(self)

    def open_message_channel(self) -> MessageChannel:
        """One queue for each rank, filled by all others."""
        return _LocalMessageChannel(self._switchboard, self._child_world(), self.rank)

    def _child_world(self) -> Any:
        """A name for a new world: equal on all ranks, because the creation is collective."""
        self._children += 1
        return (self._world, self._children)

    def split(self, color: int | None, key: int) -> LocalTransport | None:
        """Every rank sends its color and key to every other."""
        world = self._child_world()
        for peer in range(self.size):
            self.put((color, key), peer, _SPLIT_TAG)
        received = [self._get(peer, _SPLIT_TAG) for peer in range(self.size)]
        if color is None:
            return None
        members = sorted(
            (key, rank) for rank, (other, key) in enumerate(received) if other == color
        )
        ranks = [rank for _, rank in members]
        return LocalTransport(self._switchboard, (world, color), ranks.index(self.rank), len(ranks))

    def close(self) -> None:
        """Nothing to release."""


class _LocalControlChannel(ControlChannel):
    """Words through queues."""

    def __init__(self, transport: LocalTransport) -> None:
        self._transport = transport
        self._words = [[0] * transport.size, [0] * transport.size]

    def post(self, word: int) -> None:
        for peer in range(self._transport.size):
            self._transport.put(word, peer, _WORDS_TAG)

    def take(self) -> bool:
        found = False
        for peer in range(self._transport.size):
            with contextlib.suppress(queue.Empty):
                while True:
                    word = self._transport.take(peer, _WORDS_TAG)
                    self._words[word & 1][peer], found = word, True
        return found

    def of(self, number: int) -> list[int]:
        return self._words[number & 1]

    def close(self) -> None:
        """Nothing to release."""


class _LocalMessageChannel(MessageChannel):
    """Messages through one queue for each rank, filled by all others."""

    def __init__(self, switchboard: _Switchboard, world: Any, rank: int) -> None:
        self._switchboard, self._world, self._rank = switchboard, world, rank

    def _inbox(self, rank: int) -> queue.SimpleQueue[Any]:
        return self._switchboard.line(self._world, _ANY_SOURCE, rank, _POST_TAG)

    def send(self, buffers: Sequence[Bytes], peer: int) -> Sending:
        copies = [np.array(buffer, np.uint8) for buffer in buffers]
        self._inbox(peer).put((self._rank, copies))
        return Copied()

    def poll(self) -> tuple[int, list[NDArray[np.uint8]]] | None:
        try:
            message: tuple[int, list[NDArray[np.uint8]]] = self._switchboard.take(
                self._inbox(self._rank)
            )
        except queue.Empty:
            return None
        return message

    def close(self, *, together: bool) -> None:
        """Nothing to release."""


def alone() -> LocalTransport:
    """The transport of a world of one rank."""
    return LocalTransport(_Switchboard(), (), 0, 1)


def run(size: int, function: Callable[[LocalTransport], Result]) -> list[Result]:
    """Run `function` in `size` threads, each with its rank's transport; results in rank order.

    If a rank raises, the other ranks' waits end with RankFailedError, and the first exception is
    raised.
    """
    switchboard = _Switchboard()

    def one_rank(rank: int) -> Result:
        try:
            return function(LocalTransport(switchboard, (), rank, size))
        except BaseException:
            switchboard.fail(rank)
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one_rank, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankFailedError)):
        raise error
    return [future.result() for future in futures]
