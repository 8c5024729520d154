"""Memory that other processes of the host can map at any time, without a collective call.

It is an anonymous file (memfd_create(2), Linux 3.17), which the others open through the creator's
entry in /proc. Nothing needs to be removed: the memory is freed with the last process that maps it,
however that process ends.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from collectives.transports.base import ORDERED_MACHINES

_TOKEN_BYTES = 16
_HEADER_BYTES = 64


class SegmentAddress(NamedTuple):
    """Address by which other processes open a segment. Picklable."""

    process: int
    descriptor: int
    nbytes: int
    token: bytes
    """The segment's first bytes, because another process could have this number elsewhere."""


class Segment:
    """A process's own segment of `nbytes` zero bytes, whose pages are taken at the first store.

    Raises OSError where the system refuses it.
    """

    def __init__(self, nbytes: int) -> None:
        size, token = _HEADER_BYTES + nbytes, secrets.token_bytes(_TOKEN_BYTES)
        descriptor = os.memfd_create("collectives")
        # The memory itself is freed once no array refers to the map any more.
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        content = mmap.mmap(descriptor, size)
        content[:_TOKEN_BYTES] = token
        self.memory = memoryview(content)[_HEADER_BYTES:]
        """Aligned to 64 bytes."""
        self.address = SegmentAddress(os.getpid(), descriptor, size, token)


def make_segment(nbytes: int) -> Segment | None:
    """A segment; None if the system does not support it."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Segment(nbytes)
    except OSError:
        return None


def map_segment(address: SegmentAddress) -> memoryview | None:
    """Map another process's segment, or one's own, read-only; None if it can't be reached.

    It can't be reached from another host or container, or by another user.
    """
    try:
        descriptor = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDONLY)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != address.nbytes:
            return None
        content = mmap.mmap(descriptor, address.nbytes, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if content[:_TOKEN_BYTES] != address.token:
        content.close()
        return None
    return memoryview(content)[_HEADER_BYTES:]


def _ordering() -> Callable[[], None]:
    """A function that orders a thread's earlier and later memory accesses.

    x86 orders them by itself. On other processors, acquiring and releasing a lock twice does:
    nothing moves up across the acquisition or down across the release, nor the second pair across
    the first.
    """
    if platform.machine() in ORDERED_MACHINES:
        return lambda: None
    lock = threading.Lock()

    def order() -> None:
        for _ in range(2):
            with lock:
                pass

    return order


order = _ordering()
