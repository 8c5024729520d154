"""Messages between two ranks over MPI, none of which is lost to a deadline.

A message is a head, which tells its length since a receiver can't learn that from a message in
parts, and the parts. Nothing is taken of a message before its head is here, so that a receive that
is given up leaves it to the next one. What is under way when a deadline comes stays under way, and
the same call made again goes on with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.transports.base import LARGEST_TAG, Bytes
from collectives.transports.mpi_mailbox import parts_of

FIRST_TAG = 1
LAST_TAG = FIRST_TAG + LARGEST_TAG

Line = tuple[int, int]
"""A peer and a tag."""


class _UnderWay(NamedTuple):
    """A message of which MPI holds the buffer."""

    requests: list[MPI.Request]
    buffer: Bytes
    nbytes: int
    kind: int

    def is_for(self, buffer: Bytes, kind: int) -> bool:
        """Whether it says the same."""
        return self.kind == kind and self.buffer == buffer


class Messages:
    """One rank's messages on one communicator."""

    def __init__(
        self, comm: MPI.Intracomm, wait: Callable[[Callable[[], bool], int], None]
    ) -> None:
        """`wait` returns when the function that it is given says so, for the sake of a peer."""
        self._comm, self._wait = comm, wait
        # Of two threads each message must keep together.
        self._lock = threading.Lock()
        self._sent: dict[Line, _UnderWay] = {}
        self._arriving: dict[Line, _UnderWay] = {}

    def send(self, buffer: Bytes, peer: int, tag: int, kind: int) -> None:
        """Send a message, unless it is the one that exceeded a deadline."""
        line = peer, tag
        sent = self._sent.pop(line, None)
        if sent is None or not sent.is_for(buffer, kind):
            head = np.array([len(buffer), kind], np.int64).data.cast("B")
            with self._lock:
                requests = [
                    self._comm.Isend(part, peer, FIRST_TAG + tag)
                    for part in (head, *parts_of(buffer))
                ]
            sent = _UnderWay(requests, buffer, len(buffer), kind)
        self._complete(sent, line, self._sent)

    def receive(self, buffer: Bytes, peer: int, tag: int) -> tuple[int, int]:
        """Receive a message, the one that exceeded a deadline before any other."""
        line = peer, tag
        arriving = self._arriving.pop(line, None) or self._await_head(buffer, line)
        self._complete(arriving, line, self._arriving)
        nbytes = arriving.nbytes
        if arriving.buffer.obj is not buffer.obj:
            kept = min(nbytes, len(buffer))
            buffer[:kept] = arriving.buffer[:kept]
        return nbytes, arriving.kind

    def _await_head(self, buffer: Bytes, line: Line) -> _UnderWay:
        begun: list[_UnderWay] = []

        def came() -> bool:
            # It is asked again where it was true: a second message would be lost.
            if not begun:
                begun.extend(self._begin(buffer, line))
            return bool(begun)

        self._wait(came, line[0])
        return begun[0]

    def _begin(self, buffer: Bytes, line: Line) -> list[_UnderWay]:
        """Take the head, if it is here, and ask for the parts; one message, or none.

        They come into memory of our own where the buffer is too short for them.
        """
        peer, tag = line
        with self._lock:
            announced = self._comm.Improbe(peer, FIRST_TAG + tag)
            if announced is None:
                return []
            head = np.empty(2, np.int64)
            announced.Recv(head.data.cast("B"))
            nbytes, kind = head.tolist()
            whole = buffer[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
            requests = [self._comm.Irecv(part, peer, FIRST_TAG + tag) for part in parts_of(whole)]
        return [_UnderWay(requests, whole, nbytes, kind)]

    def _complete(self, message: _UnderWay, line: Line, kept: dict[Line, _UnderWay]) -> None:
        try:
            self._wait(lambda: MPI.Request.Testall(message.requests), line[0])
        except BaseException:
            # MPI holds its buffer, and the same call goes on with it after a deadline.
            kept[line] = message
            raise
