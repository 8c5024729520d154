"""Results: the rows of the table, and their form in files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bench.problem import Array
from bench.timing import Timing


@dataclass(frozen=True)
class PeerMeasurement:
    """The peer's call, timed in alternation with ours. `ratio` is peer / ours.

    `model` is the range of the ratio that memory traffic predicts.
    """

    seconds: Timing
    ratio: float
    wrong: int
    model: tuple[float, float] | None = None

    @classmethod
    def of(
        cls, seconds: Array, wrong: int, model: tuple[float, float] | None = None
    ) -> PeerMeasurement:
        """Of the seconds of our repeats and of the peer's, two rows."""
        ratio = float(np.median(seconds[1] / seconds[0]))
        return cls(Timing.of(seconds[1]), ratio, wrong, model)


@dataclass(frozen=True)
class Measurement:
    """Our call in one form; bandwidths in bytes per second.

    `of_stream` is the used part of the memory's bandwidth, `graph` the time of a call that is
    replayed in a CUDA graph.
    """

    seconds: Timing
    algbw: float
    busbw: float
    wrong: int
    peer: PeerMeasurement | None = None
    of_stream: float | None = None
    graph: Timing | None = None


@dataclass(frozen=True)
class Row:
    """One algorithm at one size; None marks what the collective does not have."""

    nbytes: int
    count: int
    dtype: str
    op: str | None
    root: int | None
    algorithm: str
    out_of_place: Measurement | None = None
    in_place: Measurement | None = None

    @property
    def wrong(self) -> int:
        """Number of wrong elements, including the peer's."""
        forms = [form for form in (self.out_of_place, self.in_place) if form]
        return sum(form.wrong + (form.peer.wrong if form.peer else 0) for form in forms)


def as_json(header: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """The results in JSON-compatible types."""
    return {"header": header, "rows": [asdict(row) for row in rows]}
