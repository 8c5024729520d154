"""Reports of nests of arrays, which the ranks compare before they send any array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives import (
    Communicator,
    DtypeMismatchError,
    MismatchError,
    OpMismatchError,
    ShapeMismatchError,
)
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import by_rank, compare, reports_after

AGREEING = "agreeing on "
"""The prefix of the texts of all ranks that can gather reports."""


class Report(NamedTuple):
    """A rank's call, its nest's structure, its arrays' shapes and dtypes; or a problem."""

    call: str = ""
    structure: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    problem: str | None = None

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return (
            ", ".join(f"{dtype} of shape {shape}" for shape, dtype in pairs)
            or self.call
            or "no arrays"
        )

    def of(self, arrays: Sequence[Any]) -> Report:
        """The same report, of these arrays."""
        shapes = tuple(array.shape for array in arrays)
        return self._replace(shapes=shapes, dtypes=tuple(array.dtype.name for array in arrays))

    @property
    def text(self) -> str:
        """Everything but the arrays' shapes and dtypes."""
        return f"{AGREEING}{self.call} of {self.structure}"


def agree(communicator: Communicator, report: Report, what: str) -> None:
    """The same error on every rank where the reports differ, or one has a problem. Collective.

    Raises OpMismatchError where calls differ, ValueError where a rank has a problem,
    ShapeMismatchError where structures or shapes differ, DtypeMismatchError where dtypes do.
    """
    text = f"{report.call} of {report.structure}: {report}"
    reports = compare(communicator, AGREEING, text, report, what)
    if reports is None and report.problem:
        reports = [report] * communicator.size
    found = None if reports is None else _difference(reports, what)
    if found is not None:
        raise raised_on_all(found, communicator.rank)


def explained(
    communicator: Communicator, report: Report, what: str, error: MismatchError
) -> Exception:
    """The error to raise after a call with different `Report.text`, the same on all ranks.

    Collective. Raises the given error where not every rank compares a report.
    """
    reports = reports_after(error, communicator, AGREEING, report, what)
    found = _difference(reports, what)
    return error if found is None else raised_on_all(found, communicator.rank)


def _difference(reports: Sequence[Report], what: str) -> Exception | None:
    """The error for these reports; None where they don't differ."""
    if len({report.call for report in reports}) > 1:
        given = tuple(report.call for report in reports)
        same = len({call.partition("(")[0] for call in given}) == 1
        differ = f"{what}: the ranks' arguments differ" if same else "the ranks' calls differ"
        return OpMismatchError(differ, given)
    calls = tuple(str(report) for report in reports)
    if any(report.problem for report in reports):
        return ValueError(by_rank(f"{what}: the value of at least one rank is invalid", calls))
    if len({report.structure for report in reports}) > 1:
        nests = tuple(report.structure for report in reports)
        return ShapeMismatchError(f"{what}: the ranks' nests differ, * being an array", nests)
    if len({report.shapes for report in reports}) > 1:
        return ShapeMismatchError(f"{what}: the ranks' shapes differ", calls)
    if len({report.dtypes for report in reports}) > 1:
        return DtypeMismatchError(f"{what}: the ranks' dtypes differ", calls)
    return None
