"""Memory that other processes of the host can map, without a collective and at any time.

It is an anonymous file (`memfd_create`, Linux 3.17), which the others open through the maker's
entry in /proc. Nothing has to be removed: the memory goes with the last process that has it mapped,
however that ends.
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

_TOKEN_BYTES = 16
HEADER_BYTES = 64
_ORDERED_MACHINES = ("x86_64", "AMD64", "i686", "i386")


class SegmentAddress(NamedTuple):
    """How other processes find a segment. Picklable."""

    process: int
    descriptor: int
    nbytes: int
    token: bytes
    """What the segment begins with: elsewhere another process could have this number."""


class Segment:
    """A process's own segment of `nbytes` bytes, zeros at first. Raises OSError without room."""

    def __init__(self, nbytes: int) -> None:
        size, token = HEADER_BYTES + nbytes, secrets.token_bytes(_TOKEN_BYTES)
        descriptor = os.memfd_create("collectives")
        # The memory itself is given back once no array refers to the map any more.
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        content = mmap.mmap(descriptor, size)
        content[:_TOKEN_BYTES] = token
        self.memory = memoryview(content)[HEADER_BYTES:]
        """Aligned to 64 bytes."""
        self.address = SegmentAddress(os.getpid(), descriptor, size, token)


def make_segment(nbytes: int) -> Segment | None:
    """A segment; None where the system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Segment(nbytes)
    except OSError:
        return None


def map_segment(address: SegmentAddress) -> memoryview | None:
    """Another process's segment, or one's own, to be read only; None where it can't be reached.

    It can't from another host or container, or by another user.
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
    return memoryview(content)[HEADER_BYTES:]


def _ordering() -> Callable[[], None]:
    """Orders what a thread stores, or loads, before and after it, as others see it.

    x86 does so by itself. Elsewhere a lock does when it is taken and given back twice: nothing
    moves up over the taking nor down over the giving back, nor the second over the first.
    """
    if platform.machine() in _ORDERED_MACHINES:
        return lambda: None
    lock = threading.Lock()

    def order() -> None:
        for _ in range(2):
            with lock:
                pass

    return order


order = _ordering()
