"""Output of a run: a table on standard output, and files."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec

from bench.reports.columns import Column
from bench.reports.text import TextTable


def open_table(header: dict[str, object], columns: list[Column]) -> TextTable:
    """The table for standard output; rich is used on a terminal that is wide enough."""
    needed = sum(column.width + 3 for column in columns) + 1
    is_wide = shutil.get_terminal_size().columns >= needed
    if sys.stdout.isatty() and is_wide and find_spec("rich"):
        from bench.reports.terminal import RichTable

        return RichTable(header, columns)
    return TextTable(header, columns)
