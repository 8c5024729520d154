"""Messages over MPI, on a separate communicator, so that the user's traffic can't interfere."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from collectives.errors import UnusableError
from collectives.transports import mpi_windows
from collectives.transports.base import (
    ORDERED_MACHINES,
    Actions,
    Bytes,
    ControlChannel,
    Message,
    MessageChannel,
    Native,
    Receiving,
    Sending,
    Transport,
    abandoned,
)
from collectives.transports.mpi_control import MpiControlChannel
from collectives.transports.mpi_end import before_end
from collectives.transports.mpi_mailbox import MpiMessageChannel, parts_of
from collectives.transports.mpi_messages import LAST_TAG, other_tag, receive, send
from collectives.transports.mpi_native import native
from collectives.transports.mpi_neighbors import MpiNeighborChannel
from collectives.transports.neighbors import NeighborChannel
from collectives.transports.pages import give_pages_back, has_room, take_pages
from collectives.waiting.last_resort import abort
from collectives.waiting.wait_policy import WaitPolicy, warn_once

_EXCHANGE_TAG = 0
_UNUSED_TAG = LAST_TAG + 3
_NOTHING: Actions = iter(())

_HANDOVER_SECONDS = 0.2


class MpiTransport(Transport):
    """One rank's end of an MPI communicator, which the transport owns."""

    def __init__(self, owned: MPI.Intracomm, *, beside: bool = False) -> None:
        """`beside`: another thread uses it than the one that uses its original."""
        self._comm: MPI.Intracomm | None = owned
        self._beside = beside
        self.wait_policy, self.watchdog = WaitPolicy(), nullcontext()
        self._windows: dict[int, tuple[MPI.Win, list[memoryview]]] = {}
        self.rank, self.size = owned.rank, owned.size
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.library = " ".join(MPI.Get_library_version().strip("\0\n ").splitlines()[0].split())

    @property
    def world_ranks(self) -> Sequence[int]:  # type: ignore[override]  # for errors alone
        """The numbers in MPI_COMM_WORLD; none where MPI may not be called."""
        if self._comm is None or not self._is_usable():
            return ()
        own, world = self._comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = own.Translate_ranks(None, world)
        own.Free()
        world.Free()
        return () if MPI.UNDEFINED in ranks else ranks

    def _is_usable(self) -> bool:
        """Whether this thread may call MPI."""
        return not MPI.Is_finalized() and (self.threads or MPI.Is_thread_main())

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator; UnusableError after `close`."""
        if self._comm is None:
            raise UnusableError("the communicator is closed")
        return self._comm

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Post all requests, then wait for all of them."""
        self.exchange_beside(sends, receives, _NOTHING)

    def exchange_beside(
        self, sends: Sequence[Message], receives: Sequence[Message], overlapped: Actions
    ) -> None:
        """MPI makes progress between the actions."""
        comm = self.comm
        requests: list[MPI.Request] = []
        try:
            # Open MPI clears a large message with one that waits behind what this rank sends to the
            # same rank. With the receives first, the clearance for a rank that comes first would be
            # sent before the own announcement, and the messages would move one after the other.
            requests += [
                comm.Isend(part, peer, _EXCHANGE_TAG)
                for peer, buffer in sends
                for part in parts_of(buffer)
            ]
            requests += [
                comm.Irecv(part, peer, _EXCHANGE_TAG)
                for peer, buffer in receives
                for part in parts_of(buffer)
            ]
            arrived = partial(MPI.Request.Testall, requests)
            while not arrived() and (action := next(overlapped, None)):
                action()
            absent = partial(self._unfinished, sends, receives, requests)
            self.wait_policy.spin_until(arrived, absent, in_transit=True)
        except BaseException:
            # MPI may still read from these buffers and write into them.
            abandoned.append((sends, receives, requests))
            raise

    def _unfinished(
        self, sends: Sequence[Message], receives: Sequence[Message], requests: list[MPI.Request]
    ) -> dict[int, str]:
        """The ranks whose requests aren't done. None is absent whose message has arrived."""
        parts = [peer for peer, buffer in (*sends, *receives) for _ in parts_of(buffer)]
        pairs = zip(parts, requests, strict=True)
        return self.absent(sorted({peer for peer, request in pairs if not request.Get_status()}))

    def progress(self) -> None:
        """Probe for a message that never comes, from this rank: no other's failure ends it."""
        if self._comm is not None and self._is_usable():
            self._comm.Iprobe(self.rank, _UNUSED_TAG)

    def send(self, buffer: Bytes, peer: int, tag: int, kind: int) -> Sending:
        """The length is sent first, because a receiver can't get it from a message in parts."""
        return send(self.comm, buffer, peer, tag, kind)

    def receive(self, buffer: Bytes, peer: int, tag: int) -> Receiving | None:
        """Receive the length, then all parts, into own memory if the buffer is too short."""
        return receive(self.comm, buffer, peer, tag)

    def other_tag(self, peer: int) -> int | None:
        """Of the first message that has arrived."""
        return other_tag(self.comm, peer)

    def before_end(self, action: Callable[[], None]) -> None:
        """In MPI_Finalize."""
        before_end(action)

    def open_control_channel(self) -> ControlChannel:
        """One message to every rank for each word."""
        return MpiControlChannel(self.comm)

    def open_neighbor_channel(self, target: int, source: int, nbytes: int) -> NeighborChannel:
        """Persistent requests."""
        return MpiNeighborChannel(self.comm, target, source, nbytes)

    def open_message_channel(self) -> MessageChannel:
        """On a duplicate, so that another thread may use it."""
        with self.watchdog:
            return MpiMessageChannel(self.comm.Dup())

    @property
    def fence(self) -> Callable[[], None] | None:  # type: ignore[override]  # known when it is asked for
        """MPI's own (MPI_Win_sync), on processors that need one."""
        if platform.machine() in ORDERED_MACHINES or not self._windows:
            return None
        window, _ = next(iter(self._windows.values()))
        return lambda: window.Sync()

    @property
    def shares(self) -> bool:
        """Unless creating a window could crash the process."""
        return not (self._beside and mpi_windows.may_crash())

    def share(self, nbytes: int) -> list[memoryview] | None:
        """A shared window (MPI 4.1, 12.2.3)."""
        return self._share(nbytes, range(self.size))

    def share_one(self, nbytes: int) -> list[memoryview] | None:
        """A shared window in which only the first rank has memory."""
        return self._share(nbytes, range(1))

    def _share(self, nbytes: int, owners: range) -> list[memoryview] | None:
        """A window with a segment for each of these ranks; None if there is no room."""
        if not self.shares and self.rank == 0:
            warn_once(
                "asynchronous calls between the ranks of a node go by messages, which are slower:"
                " Open MPI was initialized before collectives.world() could set OMPI_MCA_osc=^ucx"
            )
        if not self._all(self.shares and has_room(nbytes * len(owners))):
            return None
        own_bytes = nbytes if self.rank in owners else 0
        with self.watchdog:
            window = mpi_windows.allocate(self.comm, own_bytes)
        parts = [cast(Any, window.Shared_query(rank)[0]) for rank in owners]
        segments = [memoryview(part).cast("B")[:nbytes] for part in parts]
        self._windows[id(segments)] = (window, segments)
        return segments

    def _all(self, value: bool) -> bool:
        """Logical and over all ranks."""
        # MPI's calls for objects would hold Python's lock while they duplicate the communicator.
        result = np.array([value], np.intc)
        with self.watchdog:
            self.comm.Allreduce(MPI.IN_PLACE, result, MPI.MIN)
        return bool(result[0])

    def reserve(self, memory: memoryview) -> bool:
        """Check the room for all ranks' pages before any rank allocates its own."""
        if not self._all(has_room(len(memory) * self.size)):
            return False
        reserved = self._all(take_pages(memory))
        if not reserved:
            give_pages_back(memory)
        return reserved

    def free(self, segments: list[memoryview]) -> None:
        """Free the window."""
        window, _ = self._windows.pop(id(segments))
        with self.watchdog:
            mpi_windows.free(window)

    def node_leader(self) -> int:
        """The lowest rank with which MPI can share memory (MPI_COMM_TYPE_SHARED)."""
        leader = np.array([self.rank], np.intc)
        with self.watchdog:
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
            node.Bcast(leader, root=0)
            node.Free()
        return int(leader[0])

    def split(self, color: int | None, key: int) -> MpiTransport | None:
        """By MPI_Comm_split."""
        with self.watchdog:
            part: Any = self.comm.Split(MPI.UNDEFINED if color is None else color, key)
        return None if part == MPI.COMM_NULL else MpiTransport(part, beside=self._beside)

    def duplicate(self) -> Transport:
        """By MPI_Comm_dup."""
        with self.watchdog:
            return MpiTransport(self.comm.Dup(), beside=True)

    def abort(self) -> None:
        """By MPI_Abort, or, with a single-threaded library, by ending this process."""
        # mpirun forwards no more output once a rank aborts.
        time.sleep(_HANDOVER_SECONDS)
        if self.threads:
            abort(self.comm)
        os._exit(1)

    @property
    def ended(self) -> bool:
        """Whether MPI is finalized."""
        return bool(MPI.Is_finalized())

    def close(self) -> None:
        """Free the communicator."""
        if self._comm is not None and not MPI.Is_finalized():
            with self.watchdog:
                self._comm.Free()
        self._comm = None

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """MPI's own collective, where its results satisfy this package's guarantees."""
        return native(self.comm, collective, op, dtype)
