"""What was measured: the rows of the table, and what is written to files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.timing import Timing


@dataclass(frozen=True)
class PeerMeasurement:
    """The peer's call, timed between ours. `ratio` is peer / ours: above 1 we are faster.

    `model` is from which to which ratio memory traffic predicts.
    """

    seconds: Timing
    ratio: float
    wrong: int
    model: tuple[float, float] | None = None


@dataclass(frozen=True)
class Measurement:
    """Our call in one form; bandwidths in bytes per second.

    `of_stream` is the part of the memory's bandwidth that it uses, `graph` is what it takes where
    it is replayed in a CUDA graph.
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
    """One algorithm at one size; None stands for what the collective doesn't have."""

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
        """Elements that were wrong, the peer's included."""
        forms = [form for form in (self.out_of_place, self.in_place) if form]
        return sum(form.wrong + (form.peer.wrong if form.peer else 0) for form in forms)


def as_json(header: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Everything, in types that JSON has."""
    return {"header": header, "rows": [asdict(row) for row in rows]}
