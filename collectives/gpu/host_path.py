"""Host staging: device arrays are copied through host memory, over the host's own paths.

MPI is not passed GPU addresses: neither of its wheels can read them, and an MPI that can't ends the
process or corrupts the message, without an error. Copies go through pinned memory in chunks, so
that the GPU copies one chunk while the ranks exchange another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cuda.interface import Cuda, Event
from collectives.cuda.runtime import wait_for
from collectives.execution.device_path import DevicePath, Request
from collectives.execution.engine import Engine
from collectives.gpu.stream_work import SideStream

CHUNK_BYTES = 4 << 20
"""Size of a chunk: a few hundred microseconds of a bus's time."""


class HostPath(DevicePath):
    """Path through pinned host memory. The host waits for the copies."""

    name = "staged"

    def __init__(self, cuda: Cuda, host: Engine) -> None:
        """`host` runs the collectives on the copies."""
        self._cuda, self._host = cuda, host
        self._side = SideStream(cuda)
        self._stream = self._side.stream
        self._pinned: list[NDArray[np.uint8]] = []

    def run(self, request: Request) -> str:
        """Run the collective on a side stream; return when the ranks have exchanged the data."""
        request.reduction()  # raises TypeError for what the host can't reduce
        if request.empty:
            return self.name
        with self._side.work(request.source, request.target):
            if request.lengths is None:
                self._run_in_chunks(request)
            else:
                self._run_whole(request)
        return self.name

    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """Refuse every capture, because the host takes part in every call."""
        raise RuntimeError("a graph can't capture copies to the host: NCCL's collectives can be")

    def _run_in_chunks(self, request: Request) -> None:
        """Copy the next chunk from the GPU while the ranks exchange the present one."""
        target = request.target
        given = request.given
        length = max(1, CHUNK_BYTES // target.itemsize)
        starts = range(0, target.size, length)
        buffers = self._buffers(min(length, target.size) * target.itemsize)
        on_root = self._host.rank == request.root
        sends = request.collective != "broadcast" or on_root
        receives = request.collective == "all_reduce" or on_root == (request.collective == "reduce")

        def fetch(number: int) -> tuple[NDArray[Any], Event]:
            part = given[starts[number] : starts[number] + length]
            chunk = buffers[number % 2][: part.nbytes].view(target.dtype)
            if sends:
                self._cuda.copy_to_host(part, chunk)
            return chunk, self._stream.record()

        following = fetch(0)
        for number, start in enumerate(starts):
            chunk, copied = following
            if number + 1 < len(starts):
                following = fetch(number + 1)
            wait_for(copied)
            self._exchange(request, None, chunk)
            if receives:
                self._cuda.copy_to_device(chunk, target[start : start + length])

    def _run_whole(self, request: Request) -> None:
        """Stage the whole buffers, for collectives with chunks of their own."""
        source, target = request.source, request.target
        nbytes = [0 if source is None else source.nbytes, target.nbytes]
        buffers = self._buffers(max(nbytes))
        host_target = buffers[1][: target.nbytes].view(target.dtype)
        host_source = None
        if source is None:
            self._cuda.copy_to_host(target, host_target)
        else:
            host_source = buffers[0][: source.nbytes].view(source.dtype)
            self._cuda.copy_to_host(source, host_source)
        wait_for(self._stream.record())
        self._exchange(request, host_source, host_target)
        # The target of a gather is its source elsewhere than on the root.
        if request.collective != "gather" or self._host.rank == request.root:
            self._cuda.copy_to_device(host_target, target)

    def _exchange(
        self, request: Request, source: NDArray[Any] | None, target: NDArray[Any]
    ) -> None:
        """Run the collective between the hosts, on copies."""
        self._host.run(
            request.collective,
            source,
            target,
            lengths=request.lengths,
            op=request.op,
            root=request.root,
            algorithm=request.algorithm,
        )

    def _buffers(self, nbytes: int) -> list[NDArray[np.uint8]]:
        """Two buffers of pinned memory, reused by later calls because pinning is slow.

        Copies of earlier calls come first on the stream.
        """
        if not self._pinned or self._pinned[0].nbytes < nbytes:
            self._stream.synchronize()
            size = 1 << max(nbytes - 1, 0).bit_length()
            self._pinned = [self._cuda.pinned(size) for _ in range(2)]
        return self._pinned

    def abandon(self) -> None:
        """Wait for the copies in progress, which need no other rank."""
        self._stream.synchronize()
        self._pinned.clear()
        self._side.release()

    close = abandon
