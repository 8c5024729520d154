"""Messages between two ranks over MPI, none of which is lost to a deadline.

A message is a head, which holds the length because a receiver can't get it from a message in parts,
followed by the parts. Nothing of a message is received before its head has arrived, so that an
abandoned receive leaves the message to the next one.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from collectives.transports.base import LARGEST_TAG, Bytes, Receiving, Sending
from collectives.transports.mpi_mailbox import MpiSending, failure, parts_of

FIRST_TAG = 1
LAST_TAG = FIRST_TAG + LARGEST_TAG


class _InTransit(MpiSending, Receiving):
    """A message whose buffers MPI holds."""

    def __init__(self, requests: list[MPI.Request], peer: int, content: Bytes, kind: int) -> None:
        super().__init__(requests, peer)
        self.content, self.kind = content, kind


def send(comm: MPI.Intracomm, buffer: Bytes, peer: int, tag: int, kind: int) -> Sending:
    """Start to send the head and the parts, which MPI keeps in order."""
    head = np.array([len(buffer), kind], np.int64).data.cast("B")
    parts = (head, *parts_of(buffer))
    try:
        requests = [comm.Isend(part, peer, FIRST_TAG + tag) for part in parts]
    except MPI.Exception as error:
        raise failure(peer, error) from error
    return _InTransit(requests, peer, buffer, kind)


def receive(comm: MPI.Intracomm, buffer: Bytes, peer: int, tag: int) -> Receiving | None:
    """Receive the head, if it has arrived, and start to receive the parts.

    The parts are received into own memory if the buffer is too short.
    """
    try:
        announced = comm.Improbe(peer, FIRST_TAG + tag)
        if announced is None:
            return None
        head = np.empty(2, np.int64)
        announced.Recv(head.data.cast("B"))
        nbytes, kind = head.tolist()
        whole = buffer[:nbytes] if nbytes <= len(buffer) else memoryview(bytearray(nbytes))
        requests = [comm.Irecv(part, peer, FIRST_TAG + tag) for part in parts_of(whole)]
    except MPI.Exception as error:
        raise failure(peer, error) from error
    return _InTransit(requests, peer, whole, kind)


def other_tag(comm: MPI.Intracomm, peer: int) -> int | None:
    """The tag of the first message from the rank that has arrived, if it is one of these."""
    status = MPI.Status()
    try:
        arrived = comm.Iprobe(peer, MPI.ANY_TAG, status)
    except MPI.Exception as error:
        raise failure(peer, error) from error
    tag = status.Get_tag() - FIRST_TAG
    return tag if arrived and 0 <= tag <= LARGEST_TAG else None
