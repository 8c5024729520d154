"""What all ranks must hold alike: compared by fingerprint, told in full only where it differs.

TensorFlow's collectives stay broken for the rest of the process after one mismatch. Here the ranks
compare a text before anything is sent, which costs as much as a barrier. Where the texts differ,
the ranks gather reports, raise the same error, and the next call works.
"""

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
from collectives.scope import named_scope

AGREEING = "agreeing on "
"""How the text begins by which ranks compare a report: all that have one can gather reports."""


class Report(NamedTuple):
    """What a rank asks for, the nest it holds, the shapes and dtypes of its arrays; or what is
    wrong.
    """

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
        """The same of these arrays."""
        shapes = tuple(array.shape for array in arrays)
        return self._replace(shapes=shapes, dtypes=tuple(array.dtype.name for array in arrays))

    @property
    def text(self) -> str:
        """Everything but the arrays' shapes and dtypes."""
        return f"{AGREEING}{self.call} of {self.structure}"


def agree(communicator: Communicator, report: Report, what: str) -> None:
    """The same error on every rank where the reports differ, or tell a problem. Collective.

    Raises OpMismatchError where calls differ, ValueError where a rank has a problem,
    ShapeMismatchError where nests or shapes differ, DtypeMismatchError where dtypes do.
    """
    try:
        communicator.barrier(f"{report.text}: {report}")
    except MismatchError as error:
        raise explained(communicator, report, what, error) from None
    if report.problem:
        found = _difference(_gathered(communicator, report, what), what) or ValueError(report)
        raise raised_on_all(found, communicator.rank)


def explained(
    communicator: Communicator, report: Report, what: str, error: MismatchError
) -> Exception:
    """What to raise for ranks that came with different texts, the same on all of them.

    Collective between ranks of which each has a report; the very error where some have none.
    """
    if not all(AGREEING in call for call in error.calls):
        return error
    found = _difference(_gathered(communicator, report, what), what)
    return error if found is None else raised_on_all(found, communicator.rank)


def _gathered(communicator: Communicator, report: Report, what: str) -> list[Report]:
    with named_scope(communicator, what):
        return communicator.all_gather_object(report)


def _difference(reports: Sequence[Report], what: str) -> Exception | None:
    """The error for these reports; None where they don't differ."""
    if len({report.call for report in reports}) > 1:
        asked = tuple(report.call for report in reports)
        same = len({call.partition("(")[0] for call in asked}) == 1
        differ = f"{what}: the ranks' arguments differ" if same else "the ranks' calls differ"
        return OpMismatchError(differ, asked)
    calls = tuple(str(report) for report in reports)
    if any(report.problem for report in reports):
        lines = [f"  rank {rank}: {call}" for rank, call in enumerate(calls)]
        return ValueError("\n".join([f"{what}: not every rank's value will do", *lines]))
    if len({report.structure for report in reports}) > 1:
        nests = tuple(report.structure for report in reports)
        return ShapeMismatchError(f"{what}: the ranks' nests differ, * being an array", nests)
    if len({report.shapes for report in reports}) > 1:
        return ShapeMismatchError(f"{what}: the ranks' shapes differ", calls)
    if len({report.dtypes for report in reports}) > 1:
        return DtypeMismatchError(f"{what}: the ranks' dtypes differ", calls)
    return None
