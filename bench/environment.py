"""The environment of a measurement: machine, libraries and settings."""

from __future__ import annotations

import argparse
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import CASES
from bench.peers.base import Peer
from bench.sizes import shown
from bench.stream import Stream
from collectives import Communicator


def describe(
    comm: Communicator,
    options: argparse.Namespace,
    peer: Peer | None = None,
    stream: Stream | None = None,
) -> dict[str, Any]:
    """The entries of the header, by name, as seen by rank 0."""
    settings = options.settings
    calls = settings.calls or "as many as move 1M, at most 200"
    described: dict[str, Any] = {
        "collective": options.collective,
        **machine(),
        "ranks": comm.size,
        "nodes": comm.nodes,
        "form": "asynchronous, each call waited for" if settings.asynchronous else None,
        "repeats": settings.repeats,
        "warm-up calls": settings.warmup,
        "calls in a repeat": calls,
        "buffers": "registered" if settings.registered else "ordinary",
        "buffer sets": settings.rotate,
        "peer": options.peer,
        "peer's type": _other_type(options, peer),
        "stream copy / add (GB/s)": str(stream) if stream else None,
    }
    case = CASES.get(options.collective)
    if case is not None and case.takes_tensors:
        described["tensors"] = options.tensors
        if options.tensor_bytes:
            described["tensor bytes"] = shown(options.tensor_bytes)
    return described


def machine() -> dict[str, Any]:
    """The date, the libraries and the processor."""
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "thread level": _thread_level(MPI),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
    }


def _other_type(options: argparse.Namespace, peer: Peer | None) -> str | None:
    """The type that the peer reduces if it does not support the requested dtype."""
    dtype = peer.dtype_for(options.dtype) if peer else options.dtype
    if dtype == options.dtype or not CASES[options.collective].reduces:
        return None
    return f"{dtype.name} of the same element count"


def _thread_level(mpi: Any) -> str:
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(mpi, f"THREAD_{level}"): level.lower() for level in levels}
    return names[mpi.Query_thread()]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
