"""A rank's buffers on its GPU, and their content on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.cases.base import Case
from bench.problem import Array, Problem
from bench.task import Buffers
from collectives.cuda.interface import Cuda, DeviceArray
from collectives.cuda.runtime import fetched, filled

MOST_SETS = 256
# Factor by which the sets exceed the cache, so that a set has left it before its next use.
_CACHES = 2


def sets_of(nbytes: int, cache_bytes: int) -> int:
    """Number of buffer sets of that many bytes that exceed the GPU's cache, within limits."""
    return min(MOST_SETS, max(1, -(-_CACHES * cache_bytes // max(nbytes, 1))))


def buffer_sets(
    case: Case, problem: Problem, rank: int, cuda: Cuda, rotate: int | None, cache_bytes: int
) -> list[Buffers]:
    """The sets of buffers; `rotate` is their number, if given."""
    given = case.given(problem, rank)
    expected = case.expected(problem, rank) if case.out_of_place else None
    source = None if given is None else uploaded(cuda, given)

    # Each rank cycles as many sets, as all make as many calls.
    fullest = case.fullest(problem)
    most = [case.given(problem, fullest)]
    if case.out_of_place:
        most.append(case.expected(problem, fullest))

    def room(part: Array | None) -> DeviceArray:
        return cuda.empty(0, problem.dtype) if part is None else cuda.empty(part.size, part.dtype)

    nbytes = sum(part.nbytes for part in most if part is not None)
    count = rotate or sets_of(nbytes, cache_bytes)
    return [Buffers(lambda: source, room(given), room(expected)) for _ in range(count)]


def uploaded(cuda: Cuda, values: Array) -> DeviceArray:
    """A device array of these values."""
    array = cuda.empty(values.size, values.dtype)
    filled(array, values)
    return array


def on_host(result: Any) -> Any:
    """A call's result, with device arrays copied to the host."""
    if isinstance(result, list):
        return [on_host(each) for each in result]
    if result is None or type(result) is np.ndarray:
        return result
    return fetched(result.reshape(-1))
