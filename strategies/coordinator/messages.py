"""What the chief and the workers tell each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Packed: TypeAlias = list[NDArray[np.uint8]]
"""A thing in arrays of bytes, as `packing` makes them."""


class Run(NamedTuple):
    """To a worker: call what is packed, and answer with this number."""

    number: int


class NewDataset(NamedTuple):
    """To a worker: what is packed gives a dataset when it is called, which is when it is needed."""

    number: int


class Restored(NamedTuple):
    """To a worker: what an optimizer of this number begins with is packed."""

    number: int


class End(NamedTuple):
    """To a worker: there is nothing more to do."""


class Finished(NamedTuple):
    """From a worker: a call's result is packed. `uses`: see `references`."""

    number: int
    uses: list[Any]


class Failed(NamedTuple):
    """From a worker: what a call raised."""

    number: int
    failure: Failure


class Failure(NamedTuple):
    """An exception as it can be sent: `pickled` is None where it can't be."""

    pickled: bytes | None
    summary: str
    traceback: str


class Message(Protocol):
    """What came from a rank."""

    @property
    def source(self) -> int:
        """The rank."""

    @property
    def header(self) -> Any:
        """One of the classes above."""

    @property
    def arrays(self) -> Packed:
        """Copies that belong to the receiver."""


class Sent(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Return when the arrays may be changed."""


class Box(Protocol):
    """A way for messages between ranks, as `Communicator.mailbox` opens."""

    rank: int

    def send(self, peer: int, header: Any, arrays: Iterable[Any] = ()) -> Sent:
        """Send; RankFailedError where the peer has died or left."""

    def receive(self, timeout: float | None = None) -> Message | None:
        """The next message; None where none comes in time. RankFailedError where all have left."""

    def alive(self, peer: int) -> bool:
        """False once a rank is known to have died."""

    def present(self, peer: int) -> bool:
        """Whether more may come from a rank: False once it has left or died."""
