"""The columns of the table, alike in every kind of report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.cases.base import Case
from bench.rows import Measurement, PeerMeasurement, Row

ABSENT = "-"
_FORMS = ("out-of-place", "in-place")


@dataclass(frozen=True)
class Column:
    """A title, the unit below it, the width in characters, and the cell of a row."""

    title: str
    unit: str
    width: int
    cell: Callable[[Row], str]
    group: str = ""


def columns(case: Case, peer: str | None, algorithms: list[str]) -> list[Column]:
    """The columns for a collective, with those of the peer if there is one."""
    return [*_problem_columns(case, algorithms), *_form_columns(0, peer), *_form_columns(1, peer)]


def _problem_columns(case: Case, algorithms: list[str]) -> list[Column]:
    found = [
        Column("size", "(B)", 12, lambda row: str(row.nbytes)),
        Column("count", "(elements)", 12, lambda row: str(row.count)),
        Column("type", "", 10, lambda row: row.dtype),
    ]
    if case.reduces:
        found.append(Column("redop", "", 7, lambda row: str(row.op)))
    if case.rooted:
        found.append(Column("root", "", 4, lambda row: str(row.root)))
    width = max(len(name) for name in ("algorithm", *algorithms))
    return [*found, Column("algorithm", "", width, lambda row: row.algorithm)]


def _form_columns(form: int, peer: str | None) -> list[Column]:
    def ours(cell: Callable[[Measurement], str]) -> Callable[[Row], str]:
        def of_row(row: Row) -> str:
            measured = (row.out_of_place, row.in_place)[form]
            return cell(measured) if measured else ABSENT

        return of_row

    def theirs(cell: Callable[[PeerMeasurement], str]) -> Callable[[Row], str]:
        return ours(lambda measured: cell(measured.peer) if measured.peer else ABSENT)

    group = _FORMS[form]
    found = [
        Column("time", "(µs)", 10, ours(lambda each: _microseconds(each.seconds.median)), group),
        Column("algbw", "(GB/s)", 7, ours(lambda each: _gigabytes(each.algbw)), group),
        Column("busbw", "(GB/s)", 7, ours(lambda each: _gigabytes(each.busbw)), group),
        Column("#wrong", "", 6, ours(lambda each: str(each.wrong)), group),
    ]
    if peer:
        found += [
            Column(
                peer, "(µs)", 10, theirs(lambda each: _microseconds(each.seconds.median)), group
            ),
            Column("ratio", "", 6, theirs(lambda each: f"{each.ratio:.2f}"), group),
        ]
    return found


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _gigabytes(bandwidth: float) -> str:
    value = bandwidth / 1e9
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def header_lines(header: dict[str, object]) -> list[str]:
    """What was measured on what, in a few lines."""
    given = {name: value for name, value in header.items() if value is not None}
    take = given.pop
    lines = [
        f"{take('collective')}: {_counted(take('ranks'), 'rank')}"
        f" on {_counted(take('nodes'), 'node')}, {take('date')}",
        f"{take('mpi')}, mpi4py {take('mpi4py')}, numpy {take('numpy')}, Python {take('python')},"
        f" thread level {take('thread level')}",
        f"{take('cpu')}, {_counted(take('cores'), 'core')}",
    ]
    return [*lines, ", ".join(f"{name}: {value}" for name, value in given.items())]


def _counted(count: object, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
