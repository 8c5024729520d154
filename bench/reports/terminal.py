"""The table on a terminal, drawn with rich and updated with each row."""

from __future__ import annotations

import atexit

from rich.console import Console
from rich.live import Live
from rich.table import Table

from bench.reports.columns import Column, header_lines
from bench.reports.text import TextTable
from bench.rows import Row


class RichTable(TextTable):
    """A table that is redrawn with every row."""

    def __init__(self, header: dict[str, object], columns: list[Column]) -> None:
        self._columns = columns
        self._console = Console(highlight=False)
        for line in header_lines(header):
            self._console.print(line, style="dim")
        self._table = Table()
        for column in columns:
            titles = (column.group, column.title, column.unit)
            self._table.add_column("\n".join(titles), justify="right", no_wrap=True)
        self._live = Live(self._table, console=self._console, vertical_overflow="visible")
        self._live.start()
        # A program that is interrupted would leave the terminal without its cursor.
        atexit.register(self._live.stop)

    def add(self, row: Row) -> None:
        """Add a row; red if anything is wrong."""
        cells = [column.cell(row) for column in self._columns]
        self._table.add_row(*cells, style="red" if row.wrong else None)

    def close(self, notes: list[str]) -> None:
        """Stop drawing, and print the notes."""
        self._live.stop()
        for note in notes:
            self._console.print(note)
