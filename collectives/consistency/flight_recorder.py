"""Flight recorder: the last calls of a rank, kept for the analysis of a failure."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from collectives.consistency.signature import Signature

CALLS_KEPT = 256
DIRECTORY_VARIABLE = "COLLECTIVES_RECORD_DIRECTORY"

clock = time.perf_counter_ns
"""Monotonic clock in nanoseconds, common to all processes of a machine."""

Entry = tuple[int, Signature, str, int, int]
"""Sequence number, call, algorithm, start and end in nanoseconds."""


_numbers = itertools.count()


class FlightRecorder:
    """Ring buffer of one rank's last calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # A process has one for each communicator, and another for asynchronous calls.
        self._number = next(_numbers)
        self.ring: list[Entry | None] = [None] * CALLS_KEPT
        self.position = 0

    def add(self, entry: Entry) -> None:
        """Add a call, replacing the oldest."""
        self.ring[self.position & (CALLS_KEPT - 1)] = entry
        self.position += 1

    def last(self) -> Signature | None:
        """The signature of the last call on record."""
        entry = self.ring[(self.position - 1) & (CALLS_KEPT - 1)]
        return None if entry is None else entry[1]

    def entries(self) -> list[Entry]:
        """The calls, the oldest first."""
        start = self.position & (CALLS_KEPT - 1)
        ring = self.ring[start:] + self.ring[:start]
        return [entry for entry in ring if entry is not None]

    def calls(self) -> list[dict[str, Any]]:
        """The calls as JSON-compatible dicts; times in seconds."""
        return [
            {
                "sequence": sequence,
                "collective": call.collective,
                "call": str(call),
                "nbytes": call.nbytes,
                "algorithm": algorithm,
                "start": start / 1e9,
                "end": end / 1e9,
            }
            for sequence, call, algorithm, start, end in self.entries()
        ]

    def dump(self, reason: str) -> Path:
        """Write the calls and the reason to a file, and return its path.

        The file lies in the directory COLLECTIVES_RECORD_DIRECTORY, or in that for temporary files.
        """
        directory = Path(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())
        path = directory / f"collectives-rank{self.rank}-{os.getpid()}-{self._number}.json"
        content = {"rank": self.rank, "reason": reason, "calls": self.calls()}
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return path
