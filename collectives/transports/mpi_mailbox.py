"""Unsolicited messages over MPI: envelopes by matched probes, following buffers by receives.

Beyond its envelope, only one message of each source is received at a time, so that a rank to which
many ranks send holds at most one large message of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import RankFailedError
from collectives.transports.base import Bytes, MessageChannel, Sending, abandoned
from collectives.transports.envelope import Buffer, pack, unpack

# An MPI 3 library counts a message's bytes with 31 bits.
_LARGEST_MESSAGE = 1 << 30
_ENVELOPE_TAG = 0
_FOLLOWING_TAG = 1


def parts_of(buffer: Bytes) -> list[Bytes]:
    """The buffer in pieces that MPI can count."""
    if len(buffer) <= _LARGEST_MESSAGE:
        return [buffer]
    return [
        buffer[start : start + _LARGEST_MESSAGE]
        for start in range(0, len(buffer), _LARGEST_MESSAGE)
    ]


class MpiSending(Sending):
    """The send requests of one message."""

    def __init__(self, requests: list[MPI.Request], peer: int) -> None:
        self._requests, self._peer = requests, peer

    def done(self) -> bool:
        """Whether all requests are complete; an MPI error means that the peer failed."""
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            raise failure(self._peer, error) from error


class _Arriving:
    """A message whose envelope was announced by a probe."""

    def __init__(self, comm: MPI.Intracomm, announced: MPI.Message, status: MPI.Status) -> None:
        self._comm, self.source = comm, status.Get_source()
        self._envelope: Buffer | None = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._requests = [announced.Irecv(self._envelope)]
        self.buffers: list[Buffer] = []
        self.posting = False
        """Whether some receives may be posted that are not noted."""

    def advance(self) -> bool:
        """Make progress; whether the message is complete."""
        if not MPI.Request.Testall(self._requests):
            return False
        if self._envelope is None:
            return True
        self.posting = True
        self.buffers, unfilled = unpack(self._envelope)
        self._requests = [
            self._comm.Irecv(part, self.source, _FOLLOWING_TAG)
            for buffer in unfilled
            for part in parts_of(buffer.data)
        ]
        self._envelope, self.posting = None, False
        return not self._requests or MPI.Request.Testall(self._requests)


class MpiMessageChannel(MessageChannel):
    """One rank's end of an MPI communicator, which the channel owns and uses exclusively."""

    def __init__(self, owned: MPI.Intracomm) -> None:
        self._comm = owned
        self._status = MPI.Status()
        self._queues: dict[int, deque[_Arriving]] = {}
        self._broken: set[int] = set()

    def send(self, buffers: Sequence[Bytes], peer: int) -> Sending:
        """Send the envelope and the following buffers at once; MPI keeps their order."""
        envelope, following = pack(buffers)
        parts = [part for buffer in following for part in parts_of(buffer)]
        try:
            requests = [self._comm.Isend(envelope, peer, _ENVELOPE_TAG)]
            requests += [self._comm.Isend(part, peer, _FOLLOWING_TAG) for part in parts]
        except MPI.Exception as error:
            raise failure(peer, error) from error
        except BaseException:
            self._tear(envelope, parts)
            raise
        return MpiSending(requests, peer)

    def _tear(self, *kept: object) -> None:
        """Note that a transfer has ended in its middle; MPI may use its memory any time."""
        self.torn = "the mailbox can't go on: an exception has ended a transfer halfway"
        abandoned.append((self, kept))

    def poll(self) -> tuple[int, list[NDArray[np.uint8]]] | None:
        """The first complete message, of sources already announced, then of new ones."""
        for source in list(self._queues):
            if self._advance(source):
                return source, self._take(source)
        while (announced := self._probe()) is not None:
            if self._advance(announced):
                return announced, self._take(announced)
        return None

    def _probe(self) -> int | None:
        """Start to receive the next envelope of any rank; its source."""
        matching = False
        try:
            # An exception after a matched probe loses the message, so that one follows only where
            # there is one.
            if not self._comm.Iprobe(MPI.ANY_SOURCE, _ENVELOPE_TAG):
                return None
            matching = True
            announced = self._comm.Improbe(MPI.ANY_SOURCE, _ENVELOPE_TAG, self._status)
            if announced is None:
                return None
            arriving = _Arriving(self._comm, announced, self._status)
            self._queues.setdefault(arriving.source, deque()).append(arriving)
        except MPI.Exception as error:
            self._note_failed(error)
            return None
        except BaseException:
            if matching:
                self._tear()
            raise
        return arriving.source

    def _advance(self, source: int) -> bool:
        """Whether the first message of a rank is complete; messages of a failed rank are dropped.

        MPICH copies large messages out of the sender's memory. If that memory is gone, the copy
        fails without reporting the sender's death.
        """
        try:
            # What follows a dropped message must not be received.
            return source not in self._broken and self._queues[source][0].advance()
        except MPI.Exception:
            self._broken.add(source)
            self.failed |= {source}
            return False
        except BaseException:
            if self._queues[source][0].posting:
                self._tear()
            raise

    def _take(self, source: int) -> list[Buffer]:
        queue = self._queues[source]
        buffers = queue[0].buffers
        if len(queue) > 1:
            queue.popleft()
        else:
            # A new entry goes to the end, so the source's next message waits for other sources.
            del self._queues[source]
        return buffers

    def _note_failed(self, error: MPI.Exception) -> None:
        """Record the failed ranks, and acknowledge them so that probes continue (MPI 5.0, ULFM)."""
        try:
            group = self._comm.Get_failed()
            self._comm.Ack_failed()
        except (NotImplementedError, MPI.Exception):
            raise error from None
        if not group.size:
            raise error
        self.failed |= frozenset(group.Translate_ranks(None, self._comm.group))

    def close(self, *, together: bool) -> None:
        """Free the communicator, which is collective."""
        if self._queues:
            abandoned.append(self._queues)
        if together and not MPI.Is_finalized():
            self._comm.Free()


def failure(peer: int, error: MPI.Exception) -> RankFailedError:
    """What an error of MPI in a message to or from a rank means."""
    text = error.Get_error_string()
    return RankFailedError(f"rank {peer}: MPI could not transfer a message to or from it: {text}")
