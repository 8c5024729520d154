"""Cross-memory attach: copies between the address spaces of a node's ranks.

process_vm_readv(2) copies directly between two processes, once, where a copy through shared memory
takes two. The kernel permits it if one process may trace the other, which is tested.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import secrets
from collections.abc import Callable

import numpy as np

from collectives.errors import RankFailedError
from collectives.shm.addresses import address_of
from collectives.shm.layout import PROCESS
from collectives.shm.progress import ProgressCounters

# prctl(2): let any process of the same user trace this one, because Yama permits parents only.
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_Copy = Callable[..., int]


class PeerMemory:
    """Copies by address between this process's memory and that of the node's other ranks."""

    def __init__(self, steps: ProgressCounters, read: _Copy, write: _Copy) -> None:
        self._read, self._write, self._name = read, write, steps.name
        self._processes = [words[PROCESS] for words in steps.memory.words]
        self._own, self._theirs = _Span(), _Span()

    def read(self, peer: int, address: int, nbytes: int, into: int) -> None:
        """Copy from a rank's memory; RankFailedError if it has died or can't be reached."""
        self._copy(self._read, peer, address, nbytes, into)

    def write(self, peer: int, address: int, nbytes: int, given: int) -> None:
        """Copy to a rank's memory; errors as of `read`."""
        self._copy(self._write, peer, address, nbytes, given)

    def _copy(self, copy: _Copy, peer: int, address: int, nbytes: int, here: int) -> None:
        own, theirs = self._own, self._theirs
        # The kernel copies at most 2 GiB at a time.
        while nbytes:
            own.address, own.nbytes = here, nbytes
            theirs.address, theirs.nbytes = address, nbytes
            copied = copy(self._processes[peer], own, 1, theirs, 1, 0)
            if copied <= 0:
                raise self._error(peer)
            here, address, nbytes = here + copied, address + copied, nbytes - copied

    def _error(self, peer: int) -> RankFailedError:
        number, rank = ctypes.get_errno(), self._name(peer)
        if number == errno.ESRCH:
            return RankFailedError(f"{rank} has died in the middle of the call")
        reason = os.strerror(number)
        return RankFailedError(f"the memory of {rank} can't be reached any more: {reason}")


def open_peer_memory(steps: ProgressCounters) -> PeerMemory | None:
    """Access to the memory of all ranks of the node; None if any rank has none. Collective."""
    calls = _system_calls()
    if not _all(steps, bool(calls)):
        return None
    memory = PeerMemory(steps, *calls)
    if _all(steps, _try(steps, memory)):
        return memory
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    return memory if _all(steps, _try(steps, memory)) else None


def _system_calls() -> tuple[_Copy, ...]:
    """process_vm_readv and process_vm_writev, or nothing if they do not exist."""
    if platform.system() != "Linux":
        return ()
    library = ctypes.CDLL(None, use_errno=True)
    names = ("process_vm_readv", "process_vm_writev")
    if not all(hasattr(library, name) for name in names):
        return ()
    found = [getattr(library, name) for name in names]
    span, count = ctypes.POINTER(_Span), ctypes.c_ulong
    for call in found:
        call.argtypes = (ctypes.c_int, span, count, span, count, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
    return tuple(found)


def _try(steps: ProgressCounters, memory: PeerMemory) -> bool:
    """Whether every other rank's secret can be read, as its process number may be reused."""
    secret, found = np.array([secrets.randbits(63)]), np.zeros(1, np.int64)
    gathered = steps.exchange_numbers(address_of(secret), int(secret[0]))
    try:
        for peer, (address, expected) in enumerate(gathered):
            memory.read(peer, address, found.nbytes, address_of(found))
            if found[0] != expected:
                return False
    except RankFailedError:
        return False
    finally:
        steps.barrier()
    return True


def _all(steps: ProgressCounters, value: bool) -> bool:
    return all(each for (each,) in steps.exchange_numbers(int(value)))
