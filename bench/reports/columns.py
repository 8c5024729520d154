"""The columns of the table, the same in every kind of report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.cases.base import Case
from bench.rows import Measurement, PeerMeasurement, Row
from bench.yardstick import MODELLED, MODELLED_PEER

ABSENT = "-"
_FORMS = ("out-of-place", "in-place")
# Entries of the header that the lines above the settings contain.
_NAMED = {"collective", "ranks", "nodes", "date", "mpi", "mpi4py", "numpy", "python"}
_NAMED |= {"thread level", "cpu", "cores"}


@dataclass(frozen=True)
class Column:
    """A title, the unit below it, the width in characters, and the cell of a row."""

    title: str
    unit: str
    width: int
    cell: Callable[[Row], str]
    group: str = ""


def columns(
    case: Case,
    peer: str | None,
    algorithms: list[str],
    *,
    stream: bool = False,
    graph: bool = False,
) -> list[Column]:
    """The columns of a collective.

    Those of the peer, the memory's bandwidth and the replayed graph are optional.
    """
    modelled = case.name == MODELLED
    has_model, has_stream = modelled and peer == MODELLED_PEER, modelled and stream
    forms = [
        column
        for form in range(len(_FORMS))
        for column in (
            *_own_columns(form),
            *(_stream_columns(form) if has_stream else ()),
            *(_peer_columns(form, peer) if peer else ()),
            *(_model_columns(form) if has_model else ()),
            *(_graph_columns(form) if graph else ()),
        )
    ]
    return [*_problem_columns(case, algorithms), *forms]


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


def _ours(form: int, cell: Callable[[Measurement], str]) -> Callable[[Row], str]:
    def of_row(row: Row) -> str:
        measured = (row.out_of_place, row.in_place)[form]
        return cell(measured) if measured else ABSENT

    return of_row


def _theirs(form: int, cell: Callable[[PeerMeasurement], str]) -> Callable[[Row], str]:
    return _ours(form, lambda measured: cell(measured.peer) if measured.peer else ABSENT)


def _own_columns(form: int) -> list[Column]:
    def column(title: str, unit: str, width: int, cell: Callable[[Measurement], str]) -> Column:
        return Column(title, unit, width, _ours(form, cell), _FORMS[form])

    return [
        column("time", "(µs)", 10, lambda each: _microseconds(each.seconds.median)),
        column("algbw", "(GB/s)", 7, lambda each: _gigabytes(each.algbw)),
        column("busbw", "(GB/s)", 7, lambda each: _gigabytes(each.busbw)),
        column("#wrong", "", 6, lambda each: str(each.wrong)),
    ]


def _stream_columns(form: int) -> list[Column]:
    cell = _ours(form, lambda each: ABSENT if each.of_stream is None else _percent(each.of_stream))
    return [Column("% of stream", "", 11, cell, _FORMS[form])]


def _peer_columns(form: int, peer: str) -> list[Column]:
    time = _theirs(form, lambda each: _microseconds(each.seconds.median))
    ratio = _theirs(form, lambda each: f"{each.ratio:.2f}")
    group = _FORMS[form]
    return [Column(peer, "(µs)", 10, time, group), Column("ratio", "", 6, ratio, group)]


def _model_columns(form: int) -> list[Column]:
    cell = _theirs(form, lambda each: _range(*each.model) if each.model else ABSENT)
    return [Column("model", "", 11, cell, _FORMS[form])]


def _graph_columns(form: int) -> list[Column]:
    cell = _ours(form, lambda each: _microseconds(each.graph.median) if each.graph else ABSENT)
    return [Column("graph", "(µs)", 10, cell, _FORMS[form])]


def _range(low: float, high: float) -> str:
    return f"{low:.2f}–{high:.2f}"


def _percent(part: float) -> str:
    return f"{100 * part:.0f}"


def _microseconds(seconds: float) -> str:
    value = seconds * 1e6
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _gigabytes(bandwidth: float) -> str:
    value = bandwidth / 1e9
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def header_lines(header: dict[str, object]) -> list[str]:
    """The header in a few lines."""
    return [title_line(header), *machine_lines(header), settings_line(header)]


def title_line(header: dict[str, object]) -> str:
    """The collective, the ranks and the date."""
    ranks, nodes = counted(header["ranks"], "rank"), counted(header["nodes"], "node")
    return f"{header['collective']}: {ranks} on {nodes}, {header['date']}"


def machine_lines(header: dict[str, object]) -> list[str]:
    """The libraries and the processor."""
    return [
        f"{header['mpi']}, mpi4py {header['mpi4py']}, numpy {header['numpy']},"
        f" Python {header['python']}, thread level {header['thread level']}",
        f"{header['cpu']}, {counted(header['cores'], 'core')}",
    ]


def settings_line(header: dict[str, object]) -> str:
    """All other settings that apply."""
    others = [name for name in header if name not in _NAMED and header[name] is not None]
    return ", ".join(f"{name}: {header[name]}" for name in others)


def counted(count: object, noun: str) -> str:
    """A number of things; the noun has a regular plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
