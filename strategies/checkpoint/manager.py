"""The checkpoints in a directory: find them, number new ones, delete the oldest."""

from __future__ import annotations

import operator
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from strategies.base.strategy import get_strategy
from strategies.checkpoint.checkpoint import SUFFIX, Checkpoint, run_once
from strategies.checkpoint.tensor_file import PARTIAL
from strategies.core.same_error import PropagatedErrors
from strategies.core.values import content, whole_number

_NUMBERED = re.compile(r".*-([0-9]+)\.safetensors")

# A file that is being written, as by other ranks that save without a strategy, changes more often.
_ABANDONED_SECONDS = 3600.0


class FoundCheckpoint(NamedTuple):
    """A checkpoint's file. Sorts by number (-1 where its name has none), then by time and name.

    `changed`: the file's mtime in nanoseconds. `inode` distinguishes a file from its replacement
    where the file system's clock is too coarse.
    """

    number: int
    changed: int
    path: str
    inode: int

    @property
    def step(self) -> int | None:
        """The number at the end of its name, as in "ckpt-12.safetensors"; None without one."""
        return None if self.number < 0 else self.number


def find_checkpoints(directory: str | os.PathLike[str]) -> list[FoundCheckpoint]:
    """The directory's "*.safetensors" files, the latest last; empty if it doesn't exist."""
    folder = Path(directory)
    if not folder.is_dir():
        return []
    found = []
    for path in folder.glob("[!.]*.safetensors"):
        try:
            status = path.stat()
        except FileNotFoundError:  # deleted after it was listed
            continue
        if stat.S_ISREG(status.st_mode):
            match = _NUMBERED.fullmatch(path.name)
            number = int(match[1]) if match else -1
            found.append(FoundCheckpoint(number, status.st_mtime_ns, str(path), status.st_ino))
    return sorted(found)


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the directory's latest checkpoint; None where there is none. Not collective.

    As `tf.train.latest_checkpoint`. The latest is the one with the highest number at the end of
    its name, and among files without numbers the last one written. The directory need not exist.
    (https://www.tensorflow.org/api_docs/python/tf/train/latest_checkpoint)
    """
    found = find_checkpoints(directory)
    return found[-1].path if found else None


class CheckpointManager:
    """Numbers a checkpoint's files and deletes old ones, as `tf.train.CheckpointManager`.

    The files are `directory/{checkpoint_name}-{step}.safetensors`; the latest `max_to_keep` are
    kept (None or 0: all). Only one program at a time may write to the directory. The constructor
    is collective: it uses the arguments of rank 0 (under `ParameterServerStrategy` the chief's),
    and that rank lists the directory. Raises ValueError for a negative `max_to_keep` or a name
    whose files would not be found again (a leading dot, a slash at the end), TypeError if
    `max_to_keep` is neither an integer nor None.
    (https://www.tensorflow.org/api_docs/python/tf/train/CheckpointManager)
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        checkpoint_name: str = "ckpt",
    ) -> None:

        def begun() -> tuple[str, int | None, str, list[int]]:
            if max_to_keep is not None:
                whole_number("max_to_keep", max_to_keep, 0)
            # The name may have folders.
            last = os.path.basename(checkpoint_name)
            if not last or last.startswith(".") or "\n" in last:
                raise ValueError(
                    f"checkpoint_name={checkpoint_name!r}: must end in the name of a file, without"
                    " a leading dot or a line break: its files would not be found again"
                )
            whole = Path(directory, checkpoint_name)
            steps = [
                each.number
                for each in find_checkpoints(whole.parent)
                if Path(each.path).name == f"{whole.name}-{each.number}{SUFFIX}"
            ]
            return os.fspath(directory), max_to_keep, checkpoint_name, steps

        with PropagatedErrors(get_strategy().communicator, "CheckpointManager"):
            if not isinstance(checkpoint, Checkpoint):
                raise TypeError(
                    f"checkpoint is a {type(checkpoint).__name__}: must be a strategies.Checkpoint,"
                    " as Checkpoint(model=…)"
                )
        self.checkpoint = checkpoint
        found = run_once(checkpoint, "CheckpointManager", begun)
        self.directory, self.max_to_keep, self._name, self._steps = found

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the existing checkpoints, the latest last. Not collective."""
        return [self._path(step) for step in self._steps]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest checkpoint; None where there is none. Not collective."""
        return self.checkpoints[-1] if self._steps else None

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, f"{self._name}-{step}{SUFFIX}")

    def save(self, step: ArrayLike | None = None) -> str:
        """Save the checkpoint, delete the oldest surplus ones, and return its path. Collective.

        `step`: the file's number, or a variable with it; by default the last number plus 1,
        starting at 1. Rank 0's counts. Raises ValueError where it is lower than the last one, since
        a restart would restore that file; and the errors of `Checkpoint.save`.
        """
        what, given = "CheckpointManager.save", content(step)
        number: int = run_once(self.checkpoint, what, lambda: self._checked(given))
        path = self.checkpoint.save(self._path(number))
        self._steps = [*(each for each in self._steps if each != number), number]
        surplus = len(self._steps) - (self.max_to_keep or len(self._steps))
        deleted, self._steps = self._steps[: max(surplus, 0)], self._steps[max(surplus, 0) :]
        run_once(self.checkpoint, what, lambda: self._delete(deleted))
        return path

    def _checked(self, step: ArrayLike | None) -> int:
        last = self._steps[-1] if self._steps else 0
        number = last + 1 if step is None else operator.index(np.asarray(step)[()])
        if number < last or number < 0:
            latest = (
                f", the latest step in {self.directory}. Restore that one first, or use another"
                " directory"
            )
            raise ValueError(
                f"step={number}: must be at least {last}{latest if self._steps else ''}"
            )
        return number

    def _delete(self, steps: list[int]) -> None:
        """Delete the checkpoints of these steps, and temporary files that were abandoned."""
        for step in steps:
            Path(self._path(step)).unlink(missing_ok=True)
        # A match of the whole name spares a manager whose name begins with this one's.
        whole = Path(self.directory, self._name)
        own = re.compile(rf"\.{re.escape(whole.name)}-[0-9]+{re.escape(SUFFIX)}\..*").fullmatch
        for partial in whole.parent.glob(f".*{PARTIAL}"):
            # It may have been renamed.
            with suppress(FileNotFoundError):
                seconds = time.time() - partial.stat().st_mtime
                if own(partial.name) and seconds > _ABANDONED_SECONDS:
                    partial.unlink()

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint and return its path; None where there is none. Collective.

        Raises the errors of `Checkpoint.restore`.
        """
        latest = self.latest_checkpoint
        if latest is not None:
            self.checkpoint.restore(latest)
        return latest
