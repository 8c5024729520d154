"""A real GPU, with the tests' additional functions."""

import cupy
import numpy as np

from collectives.cuda.cupy_cuda import CupyCuda

SPIN = """
extern "C" __global__ void spin(long long nanoseconds) {
    long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


class RealGpu(CupyCuda):
    """The additional functions that the simulated GPU offers to tests, too."""

    def __init__(self):
        super().__init__()
        self._spin = cupy.RawKernel(SPIN, "spin")
        # Compiled and loaded here: the first launch would make the host wait.
        self.slow(self.current_stream(), 0)

    def from_host(self, values):
        """A device array of these values. By its bytes: CuPy has no copies of some dtypes."""
        values = np.asarray(values)
        flat = cupy.asarray(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        return flat.view(values.dtype).reshape(values.shape)

    def slow(self, stream, seconds):
        """Work that only takes time."""
        with self.on(stream):
            self._spin((1,), (1,), (np.int64(seconds * 1e9),))

    def capture(self, stream, function):
        """Capture the work of `function` on the stream; a function that runs it again."""
        with self.on(stream):
            stream.stream.begin_capture()
            try:
                function()
            finally:
                graph = stream.stream.end_capture()
        return lambda: graph.launch(stream.stream)
