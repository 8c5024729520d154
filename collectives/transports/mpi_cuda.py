"""Whether MPI accepts GPU memory (CUDA-aware MPI).

MPI is queried, never tried: an MPI that can't read GPU memory ends the process or corrupts the
message, without an error.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

VARIABLE = "COLLECTIVES_CUDA_AWARE"
"""0 or 1 overrides the detection."""

_KINDS = "mpi_memory_alloc_kinds"
_LIBRARY = re.compile(r"(/.*/libmpi[^/\n]*\.so[^/\n]*)$")
# Of MPICH: MPIX_GPU_SUPPORT_CUDA.
_CUDA = 0

_found: bool | None = None


def cuda_aware(comm: Any) -> bool:
    """Whether the MPI of an mpi4py communicator reports that it reads GPU memory.

    Determined once per process; ranks may get different results. Raises ValueError for a
    COLLECTIVES_CUDA_AWARE other than 0 or 1.
    """
    global _found
    given = os.environ.get(VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={given!r}: must be 0 or 1")
    if given:
        return given == "1"
    if _found is None:
        _found = _lists_cuda(comm) or any(map(_reports_cuda, _loaded()))
    return _found


def _lists_cuda(comm: Any) -> bool:
    """Whether the memory allocation kinds of MPI 4.1 (11.4.3) include CUDA's."""
    info = comm.Get_info()
    try:
        kinds = info.Get(_KINDS) or ""
    finally:
        info.Free()
    return any(kind.strip().partition(":")[0] == "cuda" for kind in kinds.split(","))


def _loaded() -> Iterator[Any]:
    """The MPI libraries that this process has loaded."""
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        paths = libraries_among(maps)
    for path in paths:
        try:
            yield ctypes.CDLL(path)
        except OSError:  # for example, its file was replaced meanwhile
            continue


def libraries_among(maps: Iterable[str]) -> list[str]:
    """Paths of the mapped MPI libraries, sorted and unique."""
    return sorted({match[1] for line in maps if (match := _LIBRARY.search(line))})


def _reports_cuda(library: Any) -> bool:
    """By Open MPI's query function, which MPICH has as well, or by MPICH's own."""
    if hasattr(library, "MPIX_Query_cuda_support"):
        return bool(library.MPIX_Query_cuda_support())
    if hasattr(library, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer))
        return not failed and bool(answer.value)
    return False
