"""Rows for ranks, as of `alltoall`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collectives.errors import DtypeMismatchError, ShapeMismatchError


def lengths_of(count: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """How many of `count` rows each of `size` ranks gets. ValueError if they can't be cut so."""
    if splits is None:
        if count % size:
            raise ValueError(f"{count} rows: must be a multiple of {size}, or splits be given")
        return [count // size] * size
    lengths = [int(each) for each in splits]
    if sum(lengths) != count or len(lengths) != size or min(lengths) < 0:
        raise ValueError(f"splits={lengths}: must be {size} numbers of rows that add up to {count}")
    return lengths


def check_rows(received: Sequence[Any]) -> None:
    """DtypeMismatchError or ShapeMismatchError if the ranks sent rows of different kinds."""
    dtypes = [str(each.dtype) for each in received]
    if len(set(dtypes)) > 1:
        raise DtypeMismatchError("alltoall: the ranks sent tensors of different dtypes", (*dtypes,))
    shapes = [str([*each.shape[1:]]) for each in received]
    if len(set(shapes)) > 1:
        raise ShapeMismatchError("alltoall: the ranks sent rows of different shapes", (*shapes,))
