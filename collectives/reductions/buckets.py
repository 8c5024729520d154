"""Tensor fusion: many small arrays are sent in few large messages.

The buckets follow from the arrays' dtypes, shapes and order alone, so that all ranks compute the
same ones without negotiation, and the same inputs give the same bits every time. Arrays are packed
in order into buckets of one dtype. A bucket is filled up to `bucket_bytes`; an array larger than
that has a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from collectives.errors import check_integer

# The default of PyTorch's DistributedDataParallel. Larger buckets were not faster in
# bench/results/; smaller ones cost one message each.
DEFAULT_BUCKET_BYTES = 25 << 20

Kinds: TypeAlias = tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]


@dataclass(frozen=True)
class Slot:
    """Position of one array in its bucket: elements from `start` to `stop`."""

    index: int
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Arrays of one dtype that are reduced as one."""

    dtype: np.dtype[Any]
    slots: tuple[Slot, ...]

    @property
    def length(self) -> int:
        """Number of elements in the bucket."""
        return self.slots[-1].stop


@lru_cache(maxsize=64)
def make_buckets(kinds: Kinds, bucket_bytes: int) -> tuple[Bucket, ...]:
    """The buckets for arrays of the given (shape, dtype) pairs."""
    filled: list[tuple[np.dtype[Any], list[Slot]]] = []
    open_bucket: dict[np.dtype[Any], list[Slot]] = {}
    for index, (shape, dtype) in enumerate(kinds):
        length = math.prod(shape)
        slots = open_bucket.get(dtype)
        if slots is None or (slots[-1].stop + length) * dtype.itemsize > bucket_bytes:
            slots = open_bucket[dtype] = []
            filled.append((dtype, slots))
        start = slots[-1].stop if slots else 0
        slots.append(Slot(index, shape, start, start + length))
    return tuple(Bucket(dtype, tuple(slots)) for dtype, slots in filled)


def check_bucket_bytes(bucket_bytes: int | None) -> int:
    """`bucket_bytes` as a positive int, or the default for None; TypeError or ValueError else."""
    if bucket_bytes is None:
        return DEFAULT_BUCKET_BYTES
    return check_integer("bucket_bytes", bucket_bytes, 1)


def check_list(name: str, given: Any) -> list[Any]:
    """The list of arrays, which may be given as any iterable; TypeError for anything else."""
    if isinstance(given, Mapping | str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name} is a {type(given).__name__}: must be a list of arrays")
    return list(given)


def check_many(arrays: Any, out: Any) -> tuple[list[Any], list[Any] | None]:
    """Both as lists; TypeError for what is none, ValueError unless each array has an output."""
    given = check_list("arrays", arrays)
    if out is None:
        return given, None
    outputs = check_list("out", out)
    if len(outputs) != len(given):
        raise ValueError(
            f"out has {len(outputs)} entries: must have one for each of {len(given)} arrays"
        )
    return given, outputs
