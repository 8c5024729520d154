"""The GPU and the libraries of a measurement."""

from __future__ import annotations

import argparse
from typing import Any

from bench.environment import describe
from bench.gpu.bare import NAME
from bench.gpu.device import Device
from collectives import Communicator
from collectives.cuda.runtime import cuda
from collectives.errors import BackendUnavailableError
from collectives.gpu import probe


def gpu_problem() -> str | None:
    """Why nothing can be measured here; None if it can."""
    try:
        return cuda().problem()
    except BackendUnavailableError as error:
        return str(error)


def describe_gpu(comm: Communicator, options: argparse.Namespace, device: Device) -> dict[str, Any]:
    """The entries of the header, by name, as seen by rank 0."""
    settings = options.settings
    sets = settings.rotate or "as many as exceed twice the GPU's cache, at most 256; lists: 4"
    driver = probe.nccl_driver()
    return describe(comm, argparse.Namespace(**{**vars(options), "peer": NAME})) | {
        "calls in a repeat": settings.calls or "one for each buffer set, at least 20",
        "buffers": "on the GPU",
        "buffer sets": sets,
        "gpu": device.name,
        "gpu's cache (MiB)": device.l2_bytes >> 20,
        "libraries": device.libraries,
        "nccl": None if driver.problem() else driver.version(),
        "backend": options.backend,
    }
