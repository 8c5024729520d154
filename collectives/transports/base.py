"""What a transport is: bytes from one rank to another.

A transport knows neither collectives nor dtypes. It numbers its ranks from 0, carries messages of
bytes, and may offer `native` collectives that beat schedules on its own ground.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = memoryview
Message: TypeAlias = tuple[int, Bytes]

# A native collective: (source, target, lengths in elements of each rank's part, root). Source and
# target are flat, contiguous and of equal dtype; source is None where the rank's part lies in the
# target already.
Native: TypeAlias = Callable[[NDArray[Any] | None, NDArray[Any], Sequence[int], int], None]

LARGEST_TAG = 32_000


class Transport(ABC):
    """One rank's end of the wires between `size` ranks."""

    rank: int
    size: int
    threads: bool = True
    """Whether a duplicate may be used by another thread at the same time."""

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive all messages, given as (peer, buffer); return when all are through.

        Between two ranks messages meet in their order, across calls too. Lengths agree.
        """

    @abstractmethod
    def send(self, buffer: Bytes, peer: int, tag: int) -> None:
        """Send one message outside all exchanges; return when the buffer may be changed."""

    @abstractmethod
    def receive(self, buffer: Bytes, peer: int, tag: int) -> int:
        """Receive one message; return its length in bytes, and lose what exceeds the buffer."""

    @abstractmethod
    def node_leader(self) -> int:
        """The lowest rank that shares this rank's memory. Collective."""

    @abstractmethod
    def split(self, color: int | None, key: int) -> Transport | None:
        """A transport between the ranks of equal color, ordered by key; None for color None."""

    @abstractmethod
    def begin_duplicate(self) -> Callable[[], Transport]:
        """Begin to make a second transport between the same ranks, for use by another thread.

        Returns at once with a function that completes it. Collective, in order with exchanges.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds. Collective. A second call does nothing."""

    def native(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
        """The transport's own collective for this dtype and op ("sum", …), or None."""
        return None
