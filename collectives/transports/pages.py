"""Allocation of the pages of file-backed memory before the first store.

A file in a memory file system has its length at once, and allocates a page at the first store to
it. If no page is left then, the store ends the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import lru_cache

import numpy as np

# Where MPI libraries allocate memory that ranks share.
_SHARED_MEMORY = "/dev/shm"

# Reserved for MPI, which allocates pages there for its messages.
_LEFT_PART, _LEFT_BYTES = 8, 64 << 20

# madvise(2): MADV_POPULATE_WRITE allocates all pages (Linux 5.14), MADV_REMOVE frees them.
_POPULATE_WRITE, _REMOVE = 23, 9
_AGAIN = (errno.EINTR, errno.EAGAIN)
_SHORT = (errno.EFAULT, errno.ENOMEM)


def has_room(nbytes: int) -> bool:
    """Whether the memory file system has so many bytes to spare; True if there is none."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return True
    left = min(found.f_blocks * found.f_frsize // _LEFT_PART, _LEFT_BYTES)
    return found.f_bavail * found.f_frsize - left > nbytes


def take_pages(memory: memoryview) -> bool:
    """Allocate the pages of some memory, whose content is lost; False if there are not enough.

    If the kernel does not support this, every page is stored to: the caller has checked the room.
    """
    if not len(memory):
        return True
    address, nbytes = _place(memory)
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    error = errno.EAGAIN
    while error in _AGAIN:
        error = _advise(start, address + nbytes - start, _POPULATE_WRITE)
    if error and error not in _SHORT:
        np.frombuffer(memory, np.uint8)[...] = 0
    return error not in _SHORT


def give_pages_back(memory: memoryview) -> None:
    """Free the whole pages of some memory, whose content is lost.

    Pages that the kernel does not free now are freed with the memory.
    """
    if not len(memory):
        return
    address, nbytes = _place(memory)
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > start:
        _advise(start, stop - start, _REMOVE)


def _place(memory: memoryview) -> tuple[int, int]:
    return np.frombuffer(memory, np.uint8).ctypes.data, len(memory)


def _advise(start: int, nbytes: int, advice: int) -> int:
    """0, or the errno."""
    madvise = _madvise()
    if madvise is None:
        return errno.ENOSYS
    return ctypes.get_errno() if madvise(start, nbytes, advice) else 0


@lru_cache(maxsize=1)
def _madvise() -> ctypes._NamedFuncPointer | None:
    found = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
