"""Control words over MPI."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from collectives.transports.base import ControlChannel
from collectives.transports.mpi_messages import LAST_TAG

_WORDS_TAG = LAST_TAG + 1
# MPICH shows the next message of a source a few probes after the one before.
_MORE_PROBES = 4


class MpiControlChannel(ControlChannel):
    """Words as messages of 8 bytes."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._words = [[0] * comm.size, [0] * comm.size]
        self._peers = [peer for peer in range(comm.size) if peer != comm.rank]
        self._inbox = np.zeros(1, np.uint64)
        self._status = MPI.Status()
        self._sends: list[MPI.Request] = []

    def post(self, word: int) -> None:
        """Send the word; it is small enough to be sent eagerly unless the network is congested."""
        own = np.array([word], np.uint64)
        self._words[word & 1][self._comm.rank] = word
        self._sends = [each for each in self._sends if not each.Test()]
        self._sends += [
            self._comm.Isend([own, MPI.UINT64_T], peer, _WORDS_TAG) for peer in self._peers
        ]

    def take(self) -> bool:
        """Receive what has arrived. No receive stays posted, because it could not be cancelled."""
        comm, status, found, probes = self._comm, self._status, False, range(1)
        while any(comm.Iprobe(MPI.ANY_SOURCE, _WORDS_TAG, status) for _ in probes):
            source, probes = status.Get_source(), range(_MORE_PROBES)
            comm.Recv([self._inbox, MPI.UINT64_T], source, _WORDS_TAG)
            word, found = int(self._inbox[0]), True
            self._words[word & 1][source] = word
        return found

    def of(self, number: int) -> list[int]:
        """The words received last, and the own word."""
        return self._words[number & 1]

    def close(self) -> None:
        """Free the requests: every rank has received what was sent, or never will."""
        for request in self._sends:
            request.Free()
        self._sends = []
