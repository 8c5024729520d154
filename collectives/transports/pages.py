"""Pages of memory that lies in a file: taken before the first store to them.

A file in a memory file system has its length at once, and takes a page when it is first stored to.
Where none is left by then, the store ends the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import lru_cache

import numpy as np

# Where MPIs put the memory that ranks share.
_SHARED_MEMORY = "/dev/shm"

# Left to MPI, which takes pages of its own there as its messages need them.
_LEFT_PART, _LEFT_BYTES = 8, 64 << 20

# madvise(2): take all pages now (Linux 5.14), give them back.
_POPULATE_WRITE, _REMOVE = 23, 9
_AGAIN = (errno.EINTR, errno.EAGAIN)
_SHORT = (errno.EFAULT, errno.ENOMEM)


def has_room(nbytes: int) -> bool:
    """Whether the memory file system has that much to spare; True where there is none."""
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return True
    left = min(found.f_blocks * found.f_frsize // _LEFT_PART, _LEFT_BYTES)
    return found.f_bavail * found.f_frsize - left > nbytes


def take_pages(memory: memoryview) -> bool:
    """Take the pages of some memory, whose content is lost; False where there are not so many.

    Where the kernel can't be asked, every page is stored to: the caller has looked for room.
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
    """Give back the whole pages of some memory, whose content is lost.

    What the kernel doesn't take now goes with the memory.
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
    """0, or the error's number."""
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
