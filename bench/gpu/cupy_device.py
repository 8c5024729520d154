"""Timing with CuPy's events and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy

from bench.cases.base import Call


class CupyDevice:
    """`Device` documents each method."""

    def __init__(self) -> None:
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        self.name: str = properties["name"].decode()
        self.l2_bytes: int = properties["l2CacheSize"]
        runtime, driver = (
            f"{number // 1000}.{number % 1000 // 10}"
            for number in (
                cupy.cuda.runtime.runtimeGetVersion(),
                cupy.cuda.runtime.driverGetVersion(),
            )
        )
        self.libraries = f"CuPy {cupy.__version__}, CUDA {runtime}, driver for CUDA {driver}"
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def seconds(self, work: Callable[[], Any]) -> float:
        """By the GPU's clock, between two events."""
        self._begin.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(cupy.cuda.get_elapsed_time(self._begin, self._end)) / 1e3

    def capture(self, work: Callable[[], Any]) -> Call:
        """Captures the current stream, which must not be the null stream."""
        stream = cupy.cuda.get_current_stream()
        stream.begin_capture()
        try:
            work()
        finally:
            # Also after an error, because the stream captures until then.
            graph = stream.end_capture()

        def replay() -> None:
            graph.launch(stream)

        return replay

    def synchronize(self) -> None:
        """By cudaStreamSynchronize."""
        cupy.cuda.get_current_stream().synchronize()
