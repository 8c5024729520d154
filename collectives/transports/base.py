"""What a transport is: bytes from one rank to another.

A transport knows neither collectives nor dtypes. It numbers its ranks from 0, carries messages of
bytes, and may offer `native` collectives that beat schedules on its own ground.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from collectives.waiting.wait_policy import WaitPolicy

Bytes: TypeAlias = memoryview
Message: TypeAlias = tuple[int, Bytes]

# A native collective: (source, target, lengths in elements of each rank's part, root). Source and
# target are flat, contiguous and of equal dtype; source is None where the rank's part lies in the
# target already. The source of an all_gather and the target of a reduce_scatter are the rank's part
# alone.
Native: TypeAlias = Callable[[NDArray[Any] | None, NDArray[Any], Sequence[int], int], None]

LARGEST_TAG = 32_000


class ControlChannel(ABC):
    """A way to tell all ranks numbers below 2^64, and to hear theirs.

    Of each rank's even numbers, and of its odd ones, the last that came is kept.
    """

    @abstractmethod
    def post(self, word: int) -> None:
        """Tell everybody. Doesn't wait."""

    @abstractmethod
    def take(self) -> None:
        """Take in everything that has come. Doesn't wait."""

    @abstractmethod
    def of(self, number: int) -> list[int]:
        """Every rank's last word that is even, or odd, as the number is; 0 where there is none."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds, before the transport is closed."""


class Sending(ABC):
    """A message on its way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether its buffers may be changed. Doesn't wait.

        Raises RankFailedError where the transport knows that it won't arrive.
        """


class MessageChannel(ABC):
    """A way for messages that the receiver doesn't ask for: any rank to any other, at any time.

    A message is a list of byte buffers. Between two ranks messages keep their order. One thread at
    a time uses it, which need not be that of the transport where the transport has `threads`.
    """

    failed: frozenset[int] = frozenset()
    """The ranks that the transport itself has noticed to be dead."""

    @abstractmethod
    def send(self, buffers: Sequence[Bytes], peer: int) -> Sending:
        """Begin to send a message to another rank. Doesn't wait.

        The buffers may not be changed, nor their memory given back, before it is done.
        """

    @abstractmethod
    def poll(self) -> tuple[int, list[NDArray[np.uint8]]] | None:
        """The source and the buffers, in memory of their own, of a message that is all here.

        None where there is no such. Doesn't wait, but lets messages come nearer.
        """

    @abstractmethod
    def close(self, *, together: bool) -> None:
        """Give back what it holds; `together` says that all ranks do."""


class PointToPoint(ABC):
    """What a schedule needs: one rank's end of the wires between `size` ranks."""

    rank: int
    size: int

    @abstractmethod
    def exchange(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]
    ) -> None:
        """Send and receive all messages, given as (peer, buffer); return when all are through.

        Between two ranks messages meet in their order, across calls too. Lengths agree.
        """

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """Its own collective for this dtype and op ("sum", …), or None."""
        return None


class Transport(PointToPoint):
    """Wires that lie between the memories of hosts, and what else a communicator needs."""

    threads: bool = True
    """Whether a duplicate may be used by another thread at the same time."""
    one_process: bool = False
    """Whether the ranks are threads, so that a wait must leave Python's lock to the others."""

    @abstractmethod
    def send(self, buffer: Bytes, peer: int, tag: int, kind: int = 0) -> None:
        """Send one message outside all exchanges; return when the buffer may be changed.

        `kind`, below 2^63, goes with it. A message that exceeds the deadline stays on its way; the
        same one, sent again, is not sent twice.
        """

    @abstractmethod
    def receive(self, buffer: Bytes, peer: int, tag: int) -> tuple[int, int]:
        """Receive one message, and lose what exceeds the buffer; its length in bytes, and kind.

        A receive that exceeds the deadline takes nothing that the next one doesn't get.
        """

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """A transport between the ranks of equal color, ordered by key; None for color None.

        Collective, in order with exchanges.
        """

    @abstractmethod
    def open_control_channel(self) -> ControlChannel:
        """A way to tell all ranks numbers; one at a time. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds. Collective. A second call does nothing."""

    # What a transport need not have.

    def begin_duplicate(self) -> Callable[[], Transport]:
        """Begin to make a second transport between the same ranks, for use by another thread.

        Returns at once with a function that completes it. Collective, in order with exchanges.
        """

        def complete() -> Transport:
            twin = self.split(0, self.rank)
            assert twin is not None
            return twin

        return complete

    def open_message_channel(self) -> MessageChannel | None:
        """A way for messages that nobody asks for. Collective; None where there is no such."""
        return None

    def node_leader(self) -> int:
        """The lowest rank that shares this rank's memory. Collective."""
        return self.rank

    @property
    def shares(self) -> bool:
        """Whether `share` gives memory where there is room for it."""
        return False

    def share(self, nbytes: int) -> list[memoryview] | None:
        """Memory that all ranks see, a segment of `nbytes` bytes for each, in rank order.

        Collective, between ranks of one node. None where the transport has no such memory, or not
        so much of it. Nothing may be stored to what isn't reserved.
        """
        return None

    def share_one(self, nbytes: int) -> list[memoryview] | None:
        """As `share`, but a single segment that all ranks see: a list of one."""
        return None

    def reserve(self, memory: memoryview) -> bool:
        """Take the memory behind part of a segment; False, on every rank, where it is short.

        Collective: every rank gives a part, of about the same length. The content is not defined.
        """
        return True

    def free(self, segments: list[memoryview]) -> None:
        """Give back what `share` or `share_one` gave. Collective; no rank may touch it any more."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """Whether what carries it has ended, so that nothing can be sent any more."""
        return False

    def abort(self) -> None:
        """End the job, all ranks of it, at once."""
        os._exit(1)

    library: str = "no library"
    """What carries the messages, with its version: measured times hold for that alone."""

    fence: Callable[[], None] | None = None
    """Orders loads and stores in shared memory, where the machine doesn't by itself."""

    wait_policy: WaitPolicy
    """How the transport waits; whoever uses it sets it."""
