"""Messages between two ranks over MPI, none of which is lost to a deadline.

A message is a head, which holds the length because a receiver can't get it from a message in parts,
followed by the parts. Nothing of a message is received before its head has arrived, so that an
abandoned receive leaves the message to the next one. What is in transit at a deadline stays in
transit, and repeating the same call continues it.
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

PeerTag = tuple[int, int]
"""A peer and a tag."""


class _InTransit(NamedTuple):
    """A message whose buffer MPI holds."""

    requests: list[MPI.Request]
    buffer: Bytes
    nbytes: int
    kind: int

    def matches(self, buffer: Bytes, kind: int) -> bool:
        """Whether it is a message of this content."""
        return self.kind == kind and self.buffer == buffer


class Messages:
    """One rank's messages on one communicator."""

    def __init__(
        self, comm: MPI.Intracomm, wait: Callable[[Callable[[], bool], int], None]
    ) -> None:
        """`wait` returns when the given function is true; the second argument is the peer."""
        self._comm, self._wait = comm, wait
        # The parts of a message must stay together if two threads send.
        self._lock = threading.Lock()
        self._sent: dict[PeerTag, _InTransit] = {}
        self._arriving: dict[PeerTag, _InTransit] = {}

    def send(self, buffer: Bytes, peer: int, tag: int, kind: int) -> None:
        """Send a message, unless it is the one that exceeded a deadline."""
        key = peer, tag
        sent = self._sent.pop(key, None)
        if sent is None or not sent.matches(buffer, kind):
            head = np.array([len(buffer), kind], np.int64).data.cast("B")
            with self._lock:
                requests = [
                    self._comm.Isend(part, peer, FIRST_TAG + tag)
                    for part in (head, *parts_of(buffer))
                ]
            sent = _InTransit(requests, buffer, len(buffer), kind)
        self._complete(sent, key, self._sent)

    def receive(self, buffer: Bytes, peer: int, tag: int) -> tuple[int, int]:
        """Receive a message; one that exceeded a deadline comes before any other."""
        key = peer, tag
        arriving = self._arriving.pop(key, None) or self._await_head(buffer, key)
        self._complete(arriving, key, self._arriving)
        nbytes = arriving.nbytes
        if arriving.buffer.obj is not buffer.obj:
            kept = min(nbytes, len(buffer))
            buffer[:kept] = arriving.buffer[:kept]
        return nbytes, arriving.kind

    def _await_head(self, buffer: Bytes, key: PeerTag) -> _InTransit:
        begun: list[_InTransit] = []

        def arrived() -> bool:
            # The wait may call it again after it was true: a second message would be lost.
            if not begun:
                begun.extend(self._begin(buffer, key))
            return bool(begun)

        self._wait(arrived, key[0])
        return begun[0]

    def _begin(self, buffer: Bytes, key: PeerTag) -> list[_InTransit]:
        """Receive the head, if it has arrived, and post the parts; one message, or none.

        The parts are received into own memory if the buffer is too short.
        """
        peer, tag = key
        with self._lock:
            announced = self._comm.Improbe(peer, FIRST_TAG + tag)
            if announced is None:
                return []
            head = np.empty(2, np.int64)
            announced.Recv(head.data.cast("B"))
            nbytes, kind = head.tolist()
            whole = buffer[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
            requests = [self._comm.Irecv(part, peer, FIRST_TAG + tag) for part in parts_of(whole)]
        return [_InTransit(requests, whole, nbytes, kind)]

    def _complete(self, message: _InTransit, key: PeerTag, kept: dict[PeerTag, _InTransit]) -> None:
        try:
            self._wait(lambda: MPI.Request.Testall(message.requests), key[0])
        except BaseException:
            # MPI holds its buffer, and repeating the call after a deadline continues it.
            kept[key] = message
            raise
