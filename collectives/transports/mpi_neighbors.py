"""Messages between neighbours as persistent requests (MPI 4.1, section 3.9)."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from collectives.transports.mpi_messages import LAST_TAG
from collectives.transports.neighbors import NeighborChannel

_TAG = LAST_TAG + 2
_SIZES_KEPT = 16


class MpiNeighborChannel(NeighborChannel):
    """A request for each size of a message, which each call starts again."""

    def __init__(self, comm: MPI.Intracomm, target: int, source: int, nbytes: int) -> None:
        super().__init__(nbytes)
        self._comm, self._target = comm, target
        self._receive = comm.Recv_init([self.incoming.content, MPI.BYTE], source, _TAG)
        self._posted = self._here = False
        self._requests: list[dict[int, MPI.Prequest]] = [{}, {}]
        self._abandoned: list[Any] = []

    def send(self, parity: int, nbytes: int) -> None:
        """Start the request of that size, which is made the first time."""
        requests = self._requests[parity]
        request = requests.get(nbytes)
        if request is None:
            if len(requests) == _SIZES_KEPT:
                _free(requests)
            content = self._outgoing[parity].content[:nbytes]
            request = self._comm.Send_init([content, MPI.BYTE], self._target, _TAG)
            requests[nbytes] = request
        self._sending[parity] = request
        request.Start()

    def sent(self, parity: int) -> bool:
        """By MPI_Test."""
        sending = self._sending[parity]
        if sending is None or sending.Test():
            self._sending[parity] = None
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
        for parity, requests in enumerate(self._requests):
            if self.sent(parity):
                _free(requests)

    def _abandon(self, parity: int) -> None:
        # MPI still reads from the buffer.
        self._abandoned.append((self._outgoing[parity], self._requests[parity]))
        self._requests[parity] = {}


def _free(requests: dict[int, MPI.Prequest]) -> None:
    for request in requests.values():
        request.Free()
    requests.clear()
