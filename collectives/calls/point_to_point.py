"""Messages between two ranks: what each sends and receives, with checked arguments.

Device arrays are staged through the host, because NCCL has no tags and waits for the receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from collectives.arrays.kinds import flat, given_output, is_device, to_array
from collectives.consistency.signature import check_index, dtype_name, fingerprint
from collectives.cuda.runtime import fetched, filled
from collectives.errors import DtypeMismatchError, ShapeMismatchError
from collectives.transports.base import LARGEST_TAG, Receiving, Sending, Transport


class Transfer(ABC):
    """One message that this rank sends or receives."""

    direction: str

    def __init__(self, name: str, peer: int, tag: int) -> None:
        self.name, self.peer = name, peer
        self.tag = check_index("tag", tag, LARGEST_TAG + 1)
        self.key = peer, self.tag
        self.line: str | None = None
        """Where the user started it, for messages."""
        self.arrived = False
        """Whether the transport has the message."""
        self.moved = False
        """Whether the transport no longer uses the buffer."""

    @property
    def call(self) -> str:
        """The call, for messages."""
        return f"{self.name}({self.direction} rank {self.peer}, tag={self.tag})"

    @abstractmethod
    def advance(self) -> bool:
        """Whether it has moved. Does not wait."""

    @abstractmethod
    def deliver(self) -> Any:
        """The result, once it has moved. Called in the user's thread."""


class Outgoing(Transfer):
    """A message to another rank."""

    direction = "to"

    def __init__(self, name: str, array: Any, peer: int, tag: int) -> None:
        super().__init__(name, peer, tag)
        given = to_array(array)
        elements = flat(given)
        self._content = (fetched(elements) if is_device(elements) else elements).view(np.uint8).data
        self._kind = _kind(given.dtype)
        self._sending: Sending | None = None

    def start(self, transport: Transport) -> None:
        """Hand the message to the transport."""
        self._sending = transport.send(self._content, self.peer, self.tag, self._kind)
        self.arrived = True

    def advance(self) -> bool:
        """Whether the transport has sent it."""
        if not self.moved and self._sending is not None and self._sending.done():
            self.moved, self._sending = True, None
        return self.moved

    def repeats(self, other: Outgoing) -> bool:
        """Whether it is a message of the same content."""
        return self._kind == other._kind and self._content == other._content

    def deliver(self) -> None:
        """Nothing: the array may be changed."""


class Incoming(Transfer):
    """A message of another rank."""

    direction = "from"

    def __init__(self, name: str, out: Any, peer: int, tag: int) -> None:
        super().__init__(name, peer, tag)
        view = to_array(out, "out")
        self._output = given_output(out, view.shape, view.dtype)
        self._dtype = view.dtype
        on_gpu = is_device(self._output.buffer)
        self._host = np.empty(self._output.buffer.size, view.dtype) if on_gpu else None
        elements = self._output.buffer if self._host is None else self._host
        self.buffer = elements.view(np.uint8).data
        self.receiving: Receiving | None = None
        """The message that has begun to arrive for it."""
        self._refusal: BaseException | None = None
        self._delivered, self._result = False, None

    def take(self, receiving: Receiving) -> None:
        """Receive this message, which has begun to arrive."""
        self.receiving, self.arrived = receiving, True

    def advance(self) -> bool:
        """Whether the message has arrived completely."""
        if not self.moved and self.receiving is not None and self.receiving.done():
            self.moved = True
        return self.moved

    def refuse(self, error: BaseException) -> None:
        """End it without a message."""
        self._refusal, self.arrived, self.moved = error, True, True

    def deliver(self) -> Any:
        """`out`, with the message; every call raises an error of the message."""
        if self._refusal is not None:
            raise self._refusal
        if self._delivered:
            return self._result
        assert self.receiving is not None
        content = self.receiving.content
        if self.receiving.kind != _kind(self._dtype):
            sent, held = _name_of(self.receiving.kind), dtype_name(self._dtype)
            raise DtypeMismatchError(
                f"{self.call}: the message has {sent}, the receiving array {held}"
            )
        if len(content) != len(self.buffer):
            sent_count, count = (
                len(each) // self._dtype.itemsize for each in (content, self.buffer)
            )
            raise ShapeMismatchError(
                f"{self.call}: the message has {sent_count} elements of {dtype_name(self._dtype)},"
                f" the receiving array {count}"
            )
        if content.obj is not self.buffer.obj:
            self.buffer[:] = content
        if self._host is not None:
            filled(self._output.buffer, self._host)
        self._result, self._delivered = self._output.deliver(), True
        return self._result


def _kind(dtype: np.dtype[Any]) -> int:
    return fingerprint((dtype_name(dtype),))


def _name_of(kind: int) -> str:
    """The dtype of a kind, for messages: a receiver gets no more of what was sent."""
    names = {dtype_name(np.dtype(each)) for each in np.sctypeDict.values()}
    known = (f"dtype {name}" for name in names if fingerprint((name,)) == kind)
    return next(known, "another dtype, such as a record or one of another byte order")
