"""JSON and Markdown files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.reports.columns import ABSENT, Column, header_lines
from bench.rows import Row, as_json


def write_json(path: Path, header: dict[str, Any], rows: list[Row]) -> None:
    """Write everything, in SI units."""
    text = json.dumps(as_json(header, rows), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_markdown(
    path: Path, header: dict[str, Any], columns: list[Column], rows: list[Row]
) -> None:
    """Write the header as a list, the rows as a table."""
    lines = [
        f"# {header['collective']}",
        "",
        *(f"- {line}" for line in header_lines(header)),
        "",
        *table_lines(columns, rows),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def table_lines(columns: list[Column], rows: list[Row]) -> list[str]:
    """The rows in Markdown, without empty columns."""
    kept = [column for column in columns if any(column.cell(row) != ABSENT for row in rows)]
    titles = [" ".join(filter(None, (_short(each), each.title, each.unit))) for each in kept]
    table = [titles, ["---:"] * len(kept), *([each.cell(row) for each in kept] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in table]


def _short(column: Column) -> str:
    return {"": "", "out-of-place": "out", "in-place": "in"}[column.group]
