"""Messages over MPI that nobody asked for: envelopes by matched probes, what follows by receives.

Of each source one message at a time is received beyond its envelope, so that a rank to which many
send holds no more than one large message of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import RankFailedError
from collectives.transports.base import Bytes, MessageChannel, Sending
from collectives.transports.envelope import Buffer, pack, unpack

# An MPI 3 library counts a message's bytes in 31 bits.
_LARGEST_MESSAGE = 1 << 30
_ENVELOPE_TAG = 0
_FOLLOWING_TAG = 1

_abandoned: list[object] = []
"""What MPI may still read from or write to after its post was closed."""


def parts_of(buffer: Bytes) -> list[Bytes]:
    """A message's buffer in pieces that MPI can count."""
    if len(buffer) <= _LARGEST_MESSAGE:
        return [buffer]
    return [
        buffer[start : start + _LARGEST_MESSAGE]
        for start in range(0, len(buffer), _LARGEST_MESSAGE)
    ]


class _MpiSending(Sending):
    """The requests of one message."""

    def __init__(self, requests: list[MPI.Request], peer: int) -> None:
        self._requests, self._peer = requests, peer

    def done(self) -> bool:
        """Whether all are; an error of MPI is a failure of the peer."""
        try:
            return MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            raise _failure(self._peer, error) from error


class _Arriving:
    """A message that has been announced."""

    def __init__(self, comm: MPI.Intracomm, announced: MPI.Message, status: MPI.Status) -> None:
        self._comm, self.source = comm, status.Get_source()
        self._envelope: Buffer | None = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._requests = [announced.Irecv(self._envelope)]
        self.buffers: list[Buffer] = []

    def advance(self) -> bool:
        """Go on with it; whether all of it is here."""
        if not MPI.Request.Testall(self._requests):
            return False
        if self._envelope is None:
            return True
        self.buffers, unfilled = unpack(self._envelope)
        self._envelope = None
        self._requests = [
            self._comm.Irecv(part, self.source, _FOLLOWING_TAG)
            for buffer in unfilled
            for part in parts_of(buffer.data)
        ]
        return not self._requests or MPI.Request.Testall(self._requests)


class MpiMessageChannel(MessageChannel):
    """One rank's end of an MPI communicator, which it owns and uses for nothing else."""

    def __init__(self, owned: MPI.Intracomm) -> None:
        self._comm = owned
        self._status = MPI.Status()
        self._lines: dict[int, deque[_Arriving]] = {}
        self._broken: set[int] = set()

    def send(self, buffers: Sequence[Bytes], peer: int) -> Sending:
        """The envelope, then what follows it, all at once: MPI keeps their order."""
        envelope, following = pack(buffers)
        try:
            requests = [self._comm.Isend(envelope, peer, _ENVELOPE_TAG)]
            requests += [
                self._comm.Isend(part, peer, _FOLLOWING_TAG)
                for buffer in following
                for part in parts_of(buffer)
            ]
        except MPI.Exception as error:
            raise _failure(peer, error) from error
        return _MpiSending(requests, peer)

    def poll(self) -> tuple[int, list[NDArray[np.uint8]]] | None:
        """The first message that is complete, of those that came before, then of new ones."""
        for source in list(self._lines):
            if self._advance(source):
                return source, self._take(source)
        while (announced := self._probe()) is not None:
            if self._advance(announced):
                return announced, self._take(announced)
        return None

    def _probe(self) -> int | None:
        """Begin to receive the next envelope, of any rank; its source."""
        try:
            announced = self._comm.Improbe(MPI.ANY_SOURCE, _ENVELOPE_TAG, self._status)
        except MPI.Exception as error:
            self._note_failed(error)
            return None
        if announced is None:
            return None
        arriving = _Arriving(self._comm, announced, self._status)
        self._lines.setdefault(arriving.source, deque()).append(arriving)
        return arriving.source

    def _advance(self, source: int) -> bool:
        """Whether the first message of a rank is complete; what a dead one began is dropped.

        MPICH copies large messages out of the sender's memory: where that is gone it fails, and
        knows of no death.
        """
        try:
            # What follows a message that was dropped isn't read.
            return source not in self._broken and self._lines[source][0].advance()
        except MPI.Exception:
            self._broken.add(source)
            self.failed |= {source}
            return False

    def _take(self, source: int) -> list[Buffer]:
        line = self._lines[source]
        buffers = line.popleft().buffers
        if not line:
            # Its next message comes after those of the others that are waiting.
            del self._lines[source]
        return buffers

    def _note_failed(self, error: MPI.Exception) -> None:
        """Learn who has died, and let the probes of any rank go on without them (MPI 5.0, ULFM)."""
        try:
            group = self._comm.Get_failed()
            self._comm.Ack_failed()
        except (NotImplementedError, MPI.Exception):
            raise error from None
        if not group.size:
            raise error
        self.failed |= frozenset(group.Translate_ranks(None, self._comm.group))

    def close(self, *, together: bool) -> None:
        """Free the communicator, which takes all ranks."""
        if self._lines:
            _abandoned.append(self._lines)
        if together and not MPI.Is_finalized():
            self._comm.Free()


def _failure(peer: int, error: MPI.Exception) -> RankFailedError:
    return RankFailedError(f"rank {peer} can't be reached: {error.Get_error_string()}")
