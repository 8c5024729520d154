"""GPU memory for schedules."""

from __future__ import annotations

from functools import partial

import numpy as np

from collectives.cuda.interface import Cuda, DeviceArray
from collectives.reductions.reduction import Action, ReduceOp


class DeviceMemory:
    """`executor.Memory` on the current GPU; all work is enqueued on the current stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.empty, self.work = cuda.empty, cuda.empty
        self.address, self.at = cuda.address, cuda.at

    def message(self, array: DeviceArray) -> DeviceArray:
        """Its bytes."""
        return array.view(np.uint8)

    def copy(self, origin: DeviceArray, copied: DeviceArray) -> Action:
        """By assignment."""
        return partial(_assign, copied, origin)

    def fold(
        self, op: ReduceOp, first: DeviceArray, second: DeviceArray, out: DeviceArray
    ) -> Action:
        """By a kernel."""
        return partial(self._cuda.fold, op, first, second, out)


def _assign(target: DeviceArray, source: DeviceArray) -> None:
    target[...] = source
