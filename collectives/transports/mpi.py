"""Messages over MPI, on a communicator of our own, so that the user's traffic can't interfere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.transports.base import Bytes, Message, Native, Transport
from collectives.transports.mpi_native import native

# An MPI 3 library counts a message's bytes in 31 bits.
_LARGEST_MESSAGE = 1 << 30
_EXCHANGE_TAG = 0
_FIRST_USER_TAG = 1

# How a patient wait backs off: polls that only yield, then sleeps of this many seconds.
_YIELDING_POLLS = 200
_POLL_SLEEP = 50e-6


class MpiTransport(Transport):
    """One rank's end of an MPI communicator, which it owns.

    A patient transport polls and sleeps while it waits instead of spinning in MPI, so that it can
    run beside a thread that computes.
    """

    def __init__(self, owned: MPI.Intracomm, *, patient: bool = False) -> None:
        self._comm: MPI.Intracomm | None = owned
        self._patient = patient
        self._wait = _wait_patiently if patient else MPI.Request.Waitall
        self.rank, self.size = owned.rank, owned.size
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    @classmethod
    def over(cls, comm: MPI.Intracomm) -> MpiTransport:
        """A transport over a duplicate of the user's communicator. Collective."""
        return cls(comm.Dup())

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator; RuntimeError after `close`."""
        if self._comm is None:
            raise RuntimeError("the communicator is closed")
        return self._comm

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post everything, wait for everything; in one call where there is one message each way."""
        comm = self.comm
        if len(sends) == len(receives) == 1 and not self._patient:
            (target, sent), (source, received) = sends[0], receives[0]
            if len(sent) <= _LARGEST_MESSAGE and len(received) <= _LARGEST_MESSAGE:
                tag = _EXCHANGE_TAG
                comm.Sendrecv(sent, target, tag, received, source, tag)
                return
        requests = [
            comm.Irecv(part, peer, _EXCHANGE_TAG)
            for peer, buffer in receives
            for part in _parts(buffer)
        ]
        requests += [
            comm.Isend(part, peer, _EXCHANGE_TAG)
            for peer, buffer in sends
            for part in _parts(buffer)
        ]
        self._wait(requests)

    def send(self, buffer: Bytes, peer: int, tag: int) -> None:
        """Its length goes ahead, since a receiver can't learn it from a message in parts."""
        parts = [np.array([len(buffer)], np.int64).data.cast("B"), *_parts(buffer)]
        self._wait([self.comm.Isend(part, peer, _FIRST_USER_TAG + tag) for part in parts])

    def receive(self, buffer: Bytes, peer: int, tag: int) -> int:
        """Learn the length, then receive all of it, into memory of our own where it is too long."""
        length = np.empty(1, np.int64)
        self._wait([self.comm.Irecv(length.data.cast("B"), peer, _FIRST_USER_TAG + tag)])
        nbytes = int(length[0])
        whole = buffer[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
        self._wait([self.comm.Irecv(part, peer, _FIRST_USER_TAG + tag) for part in _parts(whole)])
        if whole is not buffer and nbytes > len(buffer):
            buffer[:] = whole[: len(buffer)]
        return nbytes

    def node_leader(self) -> int:
        """The lowest rank among those that MPI can give shared memory with this one."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        leader: int = node.bcast(self.rank, root=0)
        node.Free()
        return leader

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """MPI's own split."""
        part: Any = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if part == MPI.COMM_NULL else MpiTransport(part)

    def begin_duplicate(self) -> Callable[[], Transport]:
        """MPI's non-blocking duplication."""
        twin, request = self.comm.Idup()

        def complete() -> Transport:
            request.Wait()
            return MpiTransport(twin, patient=True)

        return complete

    def close(self) -> None:
        """Free the communicator."""
        if self._comm is not None and not MPI.Is_finalized():
            self._comm.Free()
        self._comm = None

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """MPI's own collective, where it gives what ours promises."""
        return native(self.comm, collective, op, dtype)


def _parts(buffer: Bytes) -> list[Bytes]:
    if len(buffer) <= _LARGEST_MESSAGE:
        return [buffer]
    return [
        buffer[start : start + _LARGEST_MESSAGE]
        for start in range(0, len(buffer), _LARGEST_MESSAGE)
    ]


def _wait_patiently(requests: list[MPI.Request]) -> None:
    polls = 0
    while not MPI.Request.Testall(requests):
        polls += 1
        if polls < _YIELDING_POLLS:
            os.sched_yield()
        else:
            time.sleep(_POLL_SLEEP)
