"""Short messages to one fixed rank and from another, in buffers that are set up once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

_TAG = 32_001
"""Beyond the tags of all other messages (`base.LARGEST_TAG`)."""


class Buffer:
    """Memory of messages; both members show the same bytes."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: a multiple of 8."""
        self.content = np.empty(nbytes, np.uint8)
        self.words = self.content.data.cast("Q")
        self.sending: Any = None
        """The message that is being sent from it."""
        self.requests: dict[int, Any] = {}
        """What the channel keeps of its messages, by their size."""


class NeighborChannel(ABC):
    """One rank's end: one message at a time in each direction, of at most `nbytes` bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.incoming = Buffer(nbytes)
        self._outgoing = Buffer(nbytes)
        self._before: Buffer | None = None
        """From which an earlier message may still be sent."""

    def outgoing(self) -> Buffer:
        """The buffer for the next message, to be changed until it is sent.

        It is another one than before if that is still being sent; else the same, which is in the
        caches.
        """
        if self._outgoing.sending is not None and not self.sent():
            other = self._before or Buffer(self.nbytes)
            self._outgoing, self._before = other, self._outgoing
            if not self.sent():
                self._abandon(self._outgoing)
                self._outgoing = Buffer(self.nbytes)
        return self._outgoing

    @abstractmethod
    def send(self, nbytes: int) -> None:
        """Start to send the first bytes of that buffer. Does not wait."""

    @abstractmethod
    def sent(self) -> bool:
        """Whether the message from that buffer is sent. Does not wait."""

    @abstractmethod
    def arrived(self) -> bool:
        """Whether a message lies in `incoming`, where it stays until `discard`. Does not wait."""

    @abstractmethod
    def discard(self) -> None:
        """Make room for the next message, if one has arrived."""

    @abstractmethod
    def close(self) -> None:
        """Release the channel's resources, before the transport is closed."""

    def _abandon(self, buffer: Buffer) -> None:  # noqa: B027
        """Keep a buffer that is replaced, though a message is still being sent from it."""


class _Messages(Protocol):
    """What a channel uses of a transport."""

    def send(self, buffer: memoryview, peer: int, tag: int, kind: int) -> Any:
        """Start to send a message."""

    def receive(self, buffer: memoryview, peer: int, tag: int) -> Any:
        """Start to receive a message, or None."""


class MessageNeighborChannel(NeighborChannel):
    """By the messages of any transport."""

    def __init__(self, transport: _Messages, target: int, source: int, nbytes: int) -> None:
        """Messages to `target` and from `source`."""
        super().__init__(nbytes)
        self._transport, self._target, self._source = transport, target, source
        self._receiving: Any = None
        self._here = False

    def send(self, nbytes: int) -> None:
        """By `Transport.send`."""
        outgoing = self._outgoing
        content = outgoing.content[:nbytes].data
        outgoing.sending = self._transport.send(content, self._target, _TAG, 0)

    def sent(self) -> bool:
        """By `Sending.done`."""
        sending = self._outgoing.sending
        return sending is None or sending.done()

    def arrived(self) -> bool:
        """By `Transport.receive`."""
        if self._here:
            return True
        if self._receiving is None:
            buffer = self.incoming.content.data
            self._receiving = self._transport.receive(buffer, self._source, _TAG)
        if self._receiving is None or not self._receiving.done():
            return False
        content = np.frombuffer(self._receiving.content, np.uint8)
        self.incoming.content[: len(content)] = content
        self._here = True
        return True

    def discard(self) -> None:
        """Poll for the next message from now on."""
        if self._here:
            self._receiving, self._here = None, False

    def close(self) -> None:
        """Nothing to release."""
