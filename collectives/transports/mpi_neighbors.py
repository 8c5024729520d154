"""Messages between neighbours as persistent requests (MPI 4.1, section 3.9)."""

from __future__ import annotations

from mpi4py import MPI

from collectives.transports.base import abandoned
from collectives.transports.mpi_messages import LAST_TAG
from collectives.transports.neighbors import Buffer, NeighborChannel

_TAG = LAST_TAG + 2
_SIZES_KEPT = 16


class MpiNeighborChannel(NeighborChannel):
    """A request for each size of a message, which each call starts again."""

    def __init__(self, comm: MPI.Intracomm, target: int, source: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._comm, self._target = comm, target
        self._receive = comm.Recv_init([self.incoming.content, MPI.BYTE], source, _TAG)
        self._posted = self._here = False

    def send(self, nbytes: int) -> None:
        """Start the request of that size, which is made the first time."""
        outgoing = self._outgoing
        request = outgoing.requests.get(nbytes)
        if request is None:
            if len(outgoing.requests) == _SIZES_KEPT:
                _free(outgoing)
            content = [outgoing.content[:nbytes], MPI.BYTE]
            request = self._comm.Send_init(content, self._target, _TAG)
            outgoing.requests[nbytes] = request
        outgoing.sending = request
        request.Start()

    def sent(self) -> bool:
        """By MPI_Test."""
        outgoing = self._outgoing
        if outgoing.sending is None or outgoing.sending.Test():
            outgoing.sending = None
            return True
        return False

    def arrived(self) -> bool:
        """Post the receive unless it is, and test it."""
        if not self._posted:
            # First, since a signal's handler may raise after the start.
            self._posted = True
            self._receive.Start()
        self._here = self._here or self._receive.Test()
        return self._here

    def discard(self) -> None:
        """The next message is received once it is awaited."""
        self._posted = self._posted and not self._here
        self._here = False

    def close(self) -> None:
        """Free the requests. A receive that is posted is that of a call that was never made."""
        if self._posted and not self._here and not self._receive.Test():
            self._receive.Cancel()
            self._receive.Wait()
        self._receive.Free()
        for buffer in (self._outgoing, self._before):
            if buffer is None:
                continue
            if buffer.sending is None or buffer.sending.Test():
                _free(buffer)
            else:
                self._abandon(buffer)

    def _abandon(self, buffer: Buffer) -> None:
        # MPI still reads from it.
        abandoned.append(buffer)


def _free(buffer: Buffer) -> None:
    for request in buffer.requests.values():
        request.Free()
    buffer.requests.clear()
