"""Memory bandwidth of the node: copies and additions of all ranks, far beyond the caches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.timing import Subject, interleave

_ARRAY_BYTES = 64 << 20
_REPEATS = 9
_COPY_TOUCHES, _ADD_TOUCHES = 2, 3


@dataclass(frozen=True)
class Stream:
    """Bytes per second, loaded and stored by all ranks together."""

    copy: float
    add: float

    def __str__(self) -> str:
        return f"{self.copy / 1e9:.1f} / {self.add / 1e9:.1f}"


def measure_stream(world: Any, nbytes: int = _ARRAY_BYTES, repeats: int = _REPEATS) -> Stream:
    """The median over the repeats of the slowest rank's time. Collective."""
    # Every page is written before the measurement, so that none is mapped during it.
    first, second, target = (np.full(nbytes // 4, number, np.float32) for number in range(3))
    calls = partial(np.copyto, target, first), partial(np.add, first, second, out=target)
    subjects = [Subject([(call, target)]) for call in calls]
    seconds = np.median(interleave(subjects, world, batch=1, warmup=1, repeats=repeats), axis=1)
    moved = np.array([_COPY_TOUCHES, _ADD_TOUCHES]) * target.nbytes * world.size
    return Stream(*(moved / seconds).tolist())
