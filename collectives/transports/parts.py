"""How work on arrays is divided: parts, slices on cache lines, blocks, the order of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

Lengths = Sequence[int]

# Alignment of a boundary between two ranks' slices, in bytes: no two ranks write one cache line.
LINE_BYTES = 128


@lru_cache(maxsize=256)
def bounds(length: int, parts: int, itemsize: int) -> tuple[int, ...]:
    """Boundaries of `parts` slices of nearly equal length, on cache lines."""
    unit = max(1, LINE_BYTES // itemsize)
    lines = -(-length // unit)
    edges = [lines * part // parts * unit for part in range(parts + 1)]
    return tuple(min(edge, length) for edge in edges)


def blocks_of(stop: int, most: int, start: int = 0) -> Iterator[slice]:
    """Slices of at most `most` elements between `start` and `stop`."""
    for first in range(start, stop, most):
        yield slice(first, min(first + most, stop))


def part_starts(lengths: Lengths) -> list[int]:
    """Start of each rank's part, and end of the last one."""
    return list(accumulate(lengths, initial=0))


def own_part(whole: Any, lengths: Sequence[int], rank: int) -> Any:
    """A rank's part, as a view, of a buffer that holds one part for each rank."""
    return whole[sum(lengths[:rank]) :][: lengths[rank]]


def parts_by_rank(whole: Any, lengths: Sequence[int]) -> list[Any]:
    """Every rank's part, as views, of a buffer that holds one part for each rank."""
    ends = list(accumulate(lengths))
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def others(rank: int, size: int) -> Iterator[int]:
    """The other ranks, the next one first, so that not all ranks read the same one at once."""
    for distance in range(1, size):
        yield (rank + distance) % size
