"""Transfer of a program's rows to its parent process: one marked line of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MARK = "bench-rows "


def print_rows(about: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows on standard output; called on one rank."""
    print(_MARK + json.dumps({"about": about, "rows": list(rows)}), flush=True)


def read_rows(output: str) -> dict[str, Any]:
    """The rows of `print_rows` in an output; ValueError if there is no such line."""
    for line in output.splitlines():
        if _MARK in line:
            found: dict[str, Any] = json.loads(line.partition(_MARK)[2])
            return found
    raise ValueError(f"the program printed no rows, but: {output[-2000:]!r}")
