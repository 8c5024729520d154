"""A message: an object and arrays as byte buffers, back from them, and on its way."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays.kinds import flat, to_numpy
from collectives.errors import RankFailedError
from collectives.messaging.liveness import Processes
from collectives.reductions.buckets import check_list
from collectives.reductions.reduction import Array
from collectives.transports.base import Bytes, Sending

held: list[object] = []
"""Sends that can't end: MPI may still read their memory."""


class Message(NamedTuple):
    """A message that has arrived: copies of its object and its arrays, which can be written."""

    source: int
    header: Any
    arrays: list[Array]


class IncomingMessage(NamedTuple):
    """A message that is yet to be read."""

    source: int
    buffers: list[Array]

    @classmethod
    def copied(cls, source: int, buffers: Sequence[Bytes]) -> IncomingMessage:
        """With memory of its own."""
        return cls(source, [np.array(buffer, np.uint8) for buffer in buffers])


def write(header: Any, arrays: Iterable[Any]) -> list[Bytes]:
    """The buffers: the object with the arrays' dtypes and shapes, then each array's elements.

    The memory is the arrays' own where they are contiguous.
    """
    if hasattr(arrays, "shape"):
        raise TypeError("arrays is one array: must be a list of arrays")
    listed = check_list("arrays", arrays)
    given = [_checked(array, f"arrays[{place}]") for place, array in enumerate(listed)]
    kinds = [(_named(array.dtype), array.shape) for array in given]
    content = pickle.dumps((header, kinds), pickle.HIGHEST_PROTOCOL)
    return [memoryview(content), *(flat(array).view(np.uint8).data for array in given)]


def read(incoming: IncomingMessage) -> Message:
    """The arrays lie in the buffers' memory."""
    content, *buffers = incoming.buffers
    header, kinds = pickle.loads(content.data)
    arrays: list[Array] = [
        np.ndarray(shape, dtype, buffer.data)
        for (dtype, shape), buffer in zip(kinds, buffers, strict=True)
    ]
    return Message(incoming.source, header, arrays)


def _named(dtype: np.dtype[Any]) -> str | np.dtype[Any]:
    """The name, which pickles in a tenth of the time, for dtypes that it determines."""
    registered = dtype.isbuiltin == 2  # of another library, such as float8_e5m2
    return dtype if dtype.kind == "V" or registered else dtype.str


def _checked(array: Any, argument: str) -> Array:
    """As NumPy; TypeError for what has no elements of a fixed size."""
    if type(array) is np.ndarray and array.dtype.kind in "SUMm" and array.dtype.itemsize:
        return array
    return to_numpy(array, argument)


class Sender(Protocol):
    """What a message on its way needs of the mailbox that sends it."""

    def advance(self, sent: SendRequest) -> bool:
        """Advance it; whether it is done or has failed."""

    def wait(
        self, ready: Callable[[], bool], what: str, absent: Callable[[], dict[int, str]]
    ) -> None:
        """Return when `ready()`; DeadlineExceededError names the ranks in `absent()`."""


class SendRequest:
    """A message on its way. It may be dropped: the mailbox keeps it until it is done."""

    def __init__(self, sender: Sender, peer: int, sending: Sending, kept: Sequence[Bytes]):
        self._sender, self.peer = sender, peer
        self._sending: Sending | None = sending
        self._kept: Sequence[Bytes] = kept
        self._error: RankFailedError | None = None

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once: the arrays may be changed then."""
        return self._sender.advance(self)

    def wait(self) -> None:
        """Return when the arrays may be changed.

        The peer may have yet to take the message then. Raises RankFailedError where the peer has
        died, DeadlineExceededError where it doesn't take the message within the communicator's
        deadline (the message is on its way all the same).
        """
        what = f"mailbox: send(to rank {self.peer})"
        self._sender.wait(self.done, what, lambda: {self.peer: ""})
        if self._error is not None:
            raise self._error

    def advance(self, processes: Processes) -> bool:
        """Whether it is done, or has failed; the mailbox holds its lock."""
        if self._sending is None:
            return True
        dead = processes.died_lately(self.peer)
        try:
            if not self._sending.done():
                if not dead:
                    return False
                text = f"rank {self.peer} has died, and did not take what was sent to it"
                raise RankFailedError(text)
        except RankFailedError as error:
            self._error = error
            held.append((self._sending, self._kept))
        self._sending, self._kept = None, ()
        return True
