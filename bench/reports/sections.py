"""Several runs in one file, with a common head for the machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.reports.columns import Column, machine_lines, settings_line, title_line
from bench.reports.files import table_lines
from bench.rows import Row, as_json


@dataclass(frozen=True)
class Section:
    """One run: its title, its command, and its results."""

    title: str
    command: str
    header: dict[str, Any]
    columns: list[Column]
    rows: list[Row]


def write_json_sections(path: Path, sections: Sequence[Section]) -> None:
    """Write everything, in SI units."""
    written = [
        {"title": each.title, "command": each.command, **as_json(each.header, each.rows)}
        for each in sections
    ]
    text = json.dumps({"sections": written}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def write_markdown_sections(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the machine once, then each run's settings and table."""
    lines = [f"# {title}", "", *(f"- {line}" for line in machine_lines(sections[0].header))]
    for each in sections:
        lines += ["", f"## {each.title}", "", f"`{each.command}`", ""]
        lines += [f"- {line(each.header)}" for line in (title_line, settings_line)]
        lines += ["", *table_lines(each.columns, each.rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
