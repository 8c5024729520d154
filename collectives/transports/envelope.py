"""A message of several buffers as an envelope, followed by the large buffers.

The envelope holds the length of every buffer and the short buffers themselves: a short message is
an envelope alone. A long buffer is sent separately, so that the receiver, which then has its
length, can receive it directly into its final memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collectives.transports.base import Bytes

Buffer = NDArray[np.uint8]

LARGEST_ENVELOPE = 8 << 10
"""In bytes, without the lengths: an MPI library's eager limit, sent without a handshake."""
_LARGEST_ENCLOSED = 4 << 10
# Elements of any dtype may be read in place, so enclosed buffers are aligned.
_ALIGNMENT = 16
_WORD_BYTES = 8


def pack(buffers: Sequence[Bytes]) -> tuple[Buffer, list[Bytes]]:
    """The envelope, and the buffers that follow it, in this order."""
    lengths = [len(buffer) for buffer in buffers]
    places, size = _places(lengths)
    envelope = np.empty(size, np.uint8)
    head = envelope[: _head_bytes(len(lengths))].view(np.int64)
    head[0] = len(lengths)
    head[1 : len(lengths) + 1] = lengths
    following = []
    for buffer, place in zip(buffers, places, strict=True):
        if place is None:
            following.append(buffer)
        elif len(buffer):
            envelope[place : place + len(buffer)] = buffer
    return envelope, following


def unpack(envelope: Buffer) -> tuple[list[Buffer], list[Buffer]]:
    """All buffers of the message, and those that are still to be received, in order.

    Enclosed buffers are views of the envelope.
    """
    count = int(envelope[:_WORD_BYTES].view(np.int64)[0])
    lengths = envelope[_WORD_BYTES : _WORD_BYTES * (count + 1)].view(np.int64).tolist()
    buffers, unfilled = [], []
    for length, place in zip(lengths, _places(lengths)[0], strict=True):
        if place is None:
            unfilled.append(np.empty(length, np.uint8))
            buffers.append(unfilled[-1])
        else:
            buffers.append(envelope[place : place + length])
    return buffers, unfilled


def _places(lengths: Sequence[int]) -> tuple[list[int | None], int]:
    """Offset of each buffer in the envelope, None if it follows; and the envelope's length."""
    at = start = _head_bytes(len(lengths))
    places: list[int | None] = []
    for length in lengths:
        if length > _LARGEST_ENCLOSED or at - start + length > LARGEST_ENVELOPE:
            places.append(None)
        else:
            places.append(at)
            at += _rounded(length)
    return places, at


def _head_bytes(count: int) -> int:
    return _rounded(_WORD_BYTES * (count + 1))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
