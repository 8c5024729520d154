"""The doctor's report: sections of aligned rows, printed by one process."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)

_LABEL_WIDTH = 26


class Report:
    """Prints rows at once if `prints`; otherwise only counts the warnings."""

    def __init__(self, *, prints: bool) -> None:
        self.prints = prints
        self.warnings = 0
        self._gap = ""

    def section(self, title: str) -> None:
        """Start a section."""
        self._print(f"{self._gap}{title}")
        self._gap = "\n"

    def row(self, label: str, text: object) -> None:
        """Print one line: a label and its value."""
        self._print(f"  {label:<{_LABEL_WIDTH}} {text}")

    def warn(self, text: str) -> None:
        """Print a warning about the row above, which is not a failure."""
        self.warnings += 1
        self.row("", f"warning: {text}")

    def line(self, text: str) -> None:
        """Print a separate line."""
        self._print(f"\n{text}")

    def _print(self, line: str) -> None:
        if self.prints:
            # Flushed, because a job may end before its buffers are written.
            print(line, flush=True)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def ranks_by(values: Iterable[Value]) -> dict[Value, list[int]]:
    """The ranks that have each value, from every rank's value in rank order."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def ranks_named(ranks: Iterable[int]) -> str:
    """For example "rank 2" or "ranks 0-3, 6"."""
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {ranges(listed)}"


def counted(count: int, noun: str) -> str:
    """For example "1 core" or "2 cores"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
