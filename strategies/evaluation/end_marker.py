"""The file that tells evaluators that training is over."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategies.checkpoint import tensor_file

END_MARKER = "training_ended.json"

PROCESS_BEGAN = time.time()
"""An end of training before this is an earlier run's: ranks of one program begin together."""


@contextlib.contextmanager
def training_ends(
    directory: str | os.PathLike[str], *, run: str | None = None, writes: bool = True
) -> Iterator[None]:
    """Tell, when the block ends or fails, that no more checkpoints will come. Not collective.

        with strategies.training_ends("checkpoints", writes=strategy.is_chief):
            train()

    run: the name of this run, if the evaluator was given one; writes: only one rank should. The
    marker of an earlier run is removed first. Raises OSError where the directory can't be written.
    """
    marker = Path(directory, END_MARKER)
    if writes:
        marker.unlink(missing_ok=True)
    failure: str | None = None
    try:
        yield
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        if writes:
            told = {"run": run, "ended": time.time(), "failure": failure}
            tensor_file.write(str(marker), json.dumps(told).encode())


class EndOfTraining:
    """Whether a run has ended, as one evaluator finds it out by looking again and again.

    Without a name it is any run whose marker appears after the first look, whatever the clock of
    its host says, or whose end came after this process began.
    """

    def __init__(self, directory: str | os.PathLike[str], run: str | None) -> None:
        self._directory, self._run = directory, run
        self._first_look: list[dict[str, Any] | None] = []

    def has_come(self) -> bool:
        """Look. Raises ValueError for a marker that isn't one of ours."""
        told = _told(self._directory)
        if not self._first_look:
            self._first_look.append(told)
        if told is None or self._run is not None:
            return told is not None and told["run"] == self._run
        return told not in self._first_look or bool(told["ended"] >= PROCESS_BEGAN)


def _told(directory: str | os.PathLike[str]) -> dict[str, Any] | None:
    """What the marker says, None where there is none."""
    marker = Path(directory, END_MARKER)
    try:
        told = dict(json.loads(marker.read_bytes()))
        return told | {"run": told["run"], "ended": float(told["ended"])}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{marker} says nothing about the end of training: {error!r}") from None
