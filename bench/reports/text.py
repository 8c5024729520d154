"""The table as aligned text."""

from __future__ import annotations

from itertools import groupby

from bench.reports.columns import Column, header_lines
from bench.rows import Row


class TextTable:
    """Aligned text like that of nccl-tests, one line for each row."""

    def __init__(self, header: dict[str, object], columns: list[Column]) -> None:
        self._columns = columns
        for line in header_lines(header):
            self._print(line)
        self._print("")
        self._print(_group_line(columns))
        self._print(_aligned(columns, [column.title for column in columns]))
        self._print(_aligned(columns, [column.unit for column in columns]))

    def add(self, row: Row) -> None:
        """Print a row."""
        line = _aligned(self._columns, [column.cell(row) for column in self._columns])
        print(f"  {line}", flush=True)

    def close(self, notes: list[str]) -> None:
        """Print the notes."""
        for note in notes:
            self._print(note)

    def _print(self, line: str) -> None:
        print(f"# {line}".rstrip(), flush=True)


def _aligned(columns: list[Column], cells: list[str]) -> str:
    return "  ".join(cell.rjust(column.width) for column, cell in zip(columns, cells, strict=True))


def _group_line(columns: list[Column]) -> str:
    parts = []
    for group, members in groupby(columns, lambda column: column.group):
        widths = [column.width for column in members]
        parts.append(group.center(sum(widths) + 2 * (len(widths) - 1)))
    return "  ".join(parts)
