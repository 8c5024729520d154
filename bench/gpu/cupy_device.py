"""Timing with CuPy's events and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from bench.cases.base import Call

_NANOSECONDS = 1_000_000
SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


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
        self._spin = cupy.RawKernel(SPIN, "spin")

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

    def compute(self) -> None:
        """By one block that reads the clock."""
        self._spin((1,), (1,), (np.int64(_NANOSECONDS),))

    def synchronize(self) -> None:
        """By cudaStreamSynchronize."""
        cupy.cuda.get_current_stream().synchronize()
