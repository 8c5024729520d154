"""Interface of a transport, which moves bytes from one rank to another.

A transport has no notion of collectives or dtypes. Its ranks are numbered from 0. It carries
messages of bytes, and may offer `native` collectives that are faster than schedules.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from collectives.transports.neighbors import MessageNeighborChannel, NeighborChannel
from collectives.waiting.wait_policy import IN_CALL, WaitPolicy

Bytes: TypeAlias = memoryview
Message: TypeAlias = tuple[int, Bytes]
Messages: TypeAlias = Sequence[tuple[int, Any]]

Native: TypeAlias = Callable[[NDArray[Any] | None, NDArray[Any], Sequence[int], int], None]
"""A native collective: (source, target, lengths in elements of each rank's part, root).

They are flat, contiguous buffers of equal dtype. Source is None if the rank's part is in the
target. The source of all_gather and gather and the target of reduce_scatter and scatter are that
part alone. A rank that isn't the root gives a gather its source as the target too, a scatter none.
"""

Actions: TypeAlias = Iterator[Callable[[], Any]]
"""What else there is to do. An action that is taken runs once."""

LARGEST_TAG = 32_000
_NOTHING = memoryview(b"")

abandoned: list[object] = []
"""Buffers that the library may still read or write after what used them has ended."""

ORDERED_MACHINES = ("x86_64", "AMD64", "i686", "i386")
"""Processors that make a thread's loads and stores visible in program order (TSO)."""


class ControlChannel(ABC):
    """Broadcasts numbers below 2^64 to all ranks, and receives theirs.

    Of each rank, the last even and the last odd number received are kept.
    """

    @abstractmethod
    def post(self, word: int) -> None:
        """Send a word to every rank. Does not wait."""

    @abstractmethod
    def take(self) -> bool:
        """Receive all words that have arrived; whether there were any. Does not wait."""

    @abstractmethod
    def of(self, number: int) -> list[int]:
        """Every rank's last word of the same parity as `number`; 0 where there is none.

        The list is the channel's own, in which the caller may clear words.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the channel's resources, before the transport is closed."""


class Sending(ABC):
    """A message that is being sent."""

    @abstractmethod
    def done(self) -> bool:
        """Whether its buffers may be changed. Does not wait.

        Raises RankFailedError if the transport detects that the message can't be delivered.
        """


class Receiving(ABC):
    """A message that has begun to arrive."""

    kind: int
    """The number that was sent along."""
    content: Bytes
    """The message, once it is done: the start of the buffer, or other memory."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has arrived completely. Does not wait."""


class Copied(Sending, Receiving):
    """A message that was copied at once, by its sender or to its receiver."""

    def __init__(self, content: Bytes = _NOTHING, kind: int = 0) -> None:
        self.content, self.kind = content, kind

    def done(self) -> bool:
        """From the beginning."""
        return True


class MessageChannel(ABC):
    """Unsolicited messages: any rank to any other, at any time.

    A message is a list of byte buffers. Messages between two ranks keep their order. Only one
    thread at a time uses the channel; it may differ from the transport's thread if the transport
    has `threads`.
    """

    failed: frozenset[int] = frozenset()
    """The ranks that the transport itself has detected as dead."""

    torn: str | None = None
    """Why no call can follow, if an exception of a signal's handler ended a transfer halfway."""

    kept: object = None
    """What is to be kept then, as the library may still use it."""

    @abstractmethod
    def send(self, buffers: Sequence[Bytes], peer: int) -> Sending:
        """Start to send a message to another rank. Does not wait.

        The buffers may not be changed, nor their memory freed, before it is done.
        """

    @abstractmethod
    def poll(self) -> tuple[int, list[NDArray[np.uint8]]] | None:
        """Source and buffers of a completely received message, or None. Does not wait.

        The buffers own their memory. Each call makes progress on messages in transit.
        """

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """Release the channel's resources; `together` means that all ranks close it."""


class PointToPoint(ABC):
    """Messages for schedules: one rank's end of the connections between `size` ranks."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Send and receive all messages, given as (peer, buffer); return when all are complete.

        Messages between two ranks match in their order, also across calls. Lengths agree.
        """

    def exchange_beside(self, sends: Messages, receives: Messages, overlapped: Actions) -> None:
        """Like `exchange`; takes and runs some actions, or none, while messages are in transit."""
        self.exchange(sends, receives)

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """The transport's own collective for this dtype and op ("sum", …), or None.

        In host memory a "mean" is requested as a "sum", which is divided afterwards.
        """
        return None


class Transport(PointToPoint):
    """Connections between the memories of hosts, and what else a communicator needs."""

    threads: bool = True
    """Whether a duplicate may be used by another thread concurrently."""
    one_process: bool = False
    """Whether the ranks are threads, so that a wait must release Python's lock."""
    ranks: Sequence[int] = ()
    """The ranks' numbers in the whole group, for messages; empty where they are the same."""
    world_ranks: Sequence[int] = ()
    """Their numbers in the library's world, likewise."""

    def absent(self, peers: Sequence[int]) -> dict[int, str]:
        """The ranks that an exchange waits for, with a note for messages."""
        return {self.ranks[each] if self.ranks else each: IN_CALL for each in peers}

    @abstractmethod
    def send(self, buffer: Bytes, peer: int, tag: int, kind: int) -> Sending:
        """Start to send one message outside all exchanges. Does not wait.

        `kind`, below 2^63, is sent along. The buffer may not be changed, nor its memory freed,
        before the message is done. Only one thread at a time sends and receives; it may differ from
        that of the exchanges if the transport has `threads`.
        """

    @abstractmethod
    def receive(self, buffer: Bytes, peer: int, tag: int) -> Receiving | None:
        """Start to receive the next message of a rank and tag, or None if none has arrived.

        Does not wait. Messages of the same rank and tag arrive in the order in which they were
        sent. The buffer may not be used, nor its memory freed, before the message is done.
        """

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """A transport between the ranks of equal color, ordered by key; None for color None.

        Collective, in order with exchanges. As MPI_Comm_split (MPI 4.1, 7.4.2).
        """

    @abstractmethod
    def open_control_channel(self) -> ControlChannel:
        """Open the control channel; only one may be open. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources. Collective. A second call does nothing."""

    # Optional capabilities.

    def progress(self) -> None:
        """Move the messages in transit on, also those whose sending is complete for this rank.

        A library that works only while it is called has not yet delivered these. A rank that waits
        in the node's memory, for one that waits for such a message, calls it.
        """

    def duplicate(self) -> Transport:
        """A transport of the same ranks, for use by another thread. Collective."""
        return cast(Transport, self.split(0, self.rank))

    def before_end(self, action: Callable[[], None]) -> None:
        """Run a bound method, dropped with its object, before the program ends the library."""

    def open_neighbor_channel(self, target: int, source: int, nbytes: int) -> NeighborChannel:
        """Open a channel for short messages to `target` and from `source`.

        Every rank opens its channels so that both ends of each exist; between two ranks there is
        one in each direction.
        """
        return MessageNeighborChannel(self, target, source, nbytes)

    def open_message_channel(self) -> MessageChannel | None:
        """Open a channel for unsolicited messages, or None if unsupported. Collective."""
        return None

    def other_tag(self, peer: int) -> int | None:
        """The tag of a message from the rank that nothing has received; None where unknown."""
        return None

    def node_leader(self) -> int:
        """The lowest rank that shares this rank's memory. Collective."""
        return self.rank

    @property
    def shares(self) -> bool:
        """Whether `share` provides memory while there is room for it."""
        return False

    def share(self, nbytes: int) -> list[memoryview] | None:
        """Shared memory: one segment of `nbytes` bytes for each rank, in rank order.

        Collective, of one node's ranks, which `split` has joined; None if there is no room. The
        content is undefined, and nothing may be stored to memory that is not reserved.
        """
        return None

    def share_one(self, nbytes: int) -> list[memoryview] | None:
        """Like `share`, but a single segment, as a list of one."""
        return None

    def reserve(self, memory: memoryview) -> bool:
        """Allocate the memory behind part of a segment; False, on every rank, if it is short.

        Collective: every rank passes a part, of about the same length. The content is undefined.
        """
        return True

    def free(self, segments: list[memoryview]) -> None:
        """Free segments of `share` or `share_one`. Collective; no rank may access them any more."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether the underlying library has ended, so that nothing can be sent any more."""
        return False

    def abort(self) -> None:
        """End the job, with all its ranks, at once."""
        os._exit(1)

    library: str = "no library"
    """Library that carries the messages, with its version; measured times hold for it alone."""

    fence: Callable[[], None] | None = None
    """Orders loads and stores in shared memory, where the processor does not."""

    wait_policy: WaitPolicy
    """How the transport waits; set by its user."""

    watchdog: AbstractContextManager[None]
    """Around calls that block in a library: it ends the job after the deadline; set by its user."""
