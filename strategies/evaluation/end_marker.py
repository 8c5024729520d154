"""The end marker: a file that signals the end of training to evaluators."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collectives.errors import summary_of
from strategies.checkpoint import tensor_file

log = logging.getLogger("strategies")

END_MARKER = "training_ended.json"

PROCESS_START = time.time()
"""An end of training before this time belongs to an earlier run."""


@contextlib.contextmanager
def training_ends(
    directory: str | os.PathLike[str], *, run: str | None = None, writes: bool = True
) -> Iterator[None]:
    """Write the end marker when the block ends or fails: no more checkpoints. Not collective.

        with strategies.training_ends("checkpoints", writes=strategy.is_chief):
            train()

    run: the name of this run, if the evaluator waits for one. writes: whether this rank writes the
    marker; one rank should. It removes the marker of an earlier run first. Raises OSError where
    the directory can't be written; after a failure of the block, its error, and logs the OSError.
    """
    marker = Path(directory, END_MARKER)
    if writes:
        marker.unlink(missing_ok=True)

    def write(failure: str | None) -> None:
        if writes:
            content = {"run": run, "ended": time.time(), "failure": failure}
            tensor_file.write(str(marker), json.dumps(content).encode())

    try:
        yield
    except BaseException as error:
        try:
            write(summary_of(error))
        except OSError as problem:
            log.warning("the end of training is not marked for evaluators: %s", problem)
        raise
    write(None)


class EndOfTraining:
    """Detects the end of a run by polling the marker.

    Without a run's name, any marker that appears or changes after the first poll counts, whatever
    its host's clock says, and so does an end after the start of this process.
    """

    def __init__(self, directory: str | os.PathLike[str], run: str | None) -> None:
        self._directory, self._run = directory, run
        self._first_poll: list[dict[str, Any] | None] = []

    def poll(self) -> bool:
        """Whether the run has ended. Raises ValueError for a file that isn't an end marker."""
        content = _read(self._directory)
        if not self._first_poll:
            self._first_poll.append(content)
        if content is None or self._run is not None:
            return content is not None and content["run"] == self._run
        return content not in self._first_poll or bool(content["ended"] >= PROCESS_START)


def _read(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The marker's content; None where there is no marker."""
    marker = Path(directory, END_MARKER)
    try:
        content = dict(json.loads(marker.read_bytes()))
        return content | {"run": content["run"], "ended": float(content["ended"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{marker} is not a marker of the end of training: {error!r}") from None
