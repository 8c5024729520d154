"""The doctor's report: sections of aligned rows, printed by one process."""

from __future__ import annotations

from collections.abc import Iterable

_LABEL_WIDTH = 20


class Report:
    """Prints rows as they come, where `speaks`; elsewhere only counts the warnings."""

    def __init__(self, *, speaks: bool) -> None:
        self.speaks = speaks
        self.warnings = 0
        self._gap = ""

    def section(self, title: str) -> None:
        """Begin a section."""
        self._print(f"{self._gap}{title}")
        self._gap = "\n"

    def row(self, label: str, text: object) -> None:
        """One line: what, and how it is."""
        self._print(f"  {label:<{_LABEL_WIDTH}} {text}")

    def warn(self, text: str) -> None:
        """Say what is wrong with the row above, though nothing fails of it."""
        self.warnings += 1
        self.row("", f"warning: {text}")

    def say(self, text: str) -> None:
        """A line of its own."""
        self._print(f"\n{text}")

    def _print(self, line: str) -> None:
        if self.speaks:
            # At once, since a job may end before its buffers are written.
            print(line, flush=True)


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: "0-3, 6"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def ranks_named(ranks: Iterable[int]) -> str:
    """As in "rank 2" or "ranks 0-3, 6"."""
    listed = list(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {ranges(listed)}"


def counted(count: int, noun: str) -> str:
    """As in "1 core" or "2 cores"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
