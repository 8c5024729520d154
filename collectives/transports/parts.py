"""The ranks' parts of a buffer that holds one part for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any


def own_part(whole: Any, lengths: Sequence[int], rank: int) -> Any:
    """A rank's part, as a view, of a buffer that holds one part for each rank."""
    return whole[sum(lengths[:rank]) :][: lengths[rank]]


def parts_by_rank(whole: Any, lengths: Sequence[int]) -> list[Any]:
    """Every rank's part, as views, of a buffer that holds one part for each rank."""
    ends = list(accumulate(lengths))
    return [whole[end - length : end] for end, length in zip(ends, lengths, strict=True)]
