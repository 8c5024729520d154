"""System-wide memory barrier by membarrier(2)."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import lru_cache

_NUMBERS = {"x86_64": 324, "aarch64": 283, "ppc64le": 365, "riscv64": 283, "s390x": 356}
_GLOBAL = 1


@lru_cache(maxsize=1)
def _membarrier() -> Callable[[], int] | None:
    number = _NUMBERS.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return None
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return lambda: int(syscall(number, _GLOBAL, 0, 0))


def order_all_threads() -> bool:
    """Order the stores of all threads on the machine; False if the system does not support it."""
    barrier = _membarrier()
    return barrier is not None and barrier() == 0
