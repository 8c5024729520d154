"""CheckpointManager: numbered checkpoints in a directory, the oldest of which are deleted."""

from __future__ import annotations

import operator
import os
import re
from pathlib import Path

from strategies.checkpoint.checkpoint import SUFFIX, Checkpoint, done_once
from strategies.checkpoint.directory import find_checkpoints
from strategies.checkpoint.tensor_file import PARTIAL


class CheckpointManager:
    """Saves a checkpoint again and again, as `tf.train.CheckpointManager`.

    The files are `directory/{checkpoint_name}-{step}.safetensors`; the latest `max_to_keep` remain
    (None or 0: all). Only one program at a time may write to the directory, which rank 0 (the
    chief, where parameter servers hold the variables) looks through when the manager is made. That
    is collective.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        *,
        checkpoint_name: str = "ckpt",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 0:
            raise ValueError(f"max_to_keep={max_to_keep}: must be None or from 0 up")
        self.checkpoint, self.max_to_keep = checkpoint, max_to_keep
        self._name = checkpoint_name
        self.directory, self._steps = done_once(
            checkpoint, lambda: (os.fspath(directory), self._found(directory))
        )

    def _found(self, directory: str | os.PathLike[str]) -> list[int]:
        own = find_checkpoints(directory)
        names = {Path(each.path).name: each.number for each in own}
        return [
            number for name, number in names.items() if name == f"{self._name}-{number}{SUFFIX}"
        ]

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints that are kept, the latest last. No traffic."""
        return [self._path(step) for step in self._steps]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest checkpoint, None where there is none. No traffic."""
        return self.checkpoints[-1] if self._steps else None

    def _path(self, step: int) -> str:
        return os.path.join(self.directory, f"{self._name}-{step}{SUFFIX}")

    def save(self, step: int | None = None) -> str:
        """Save the checkpoint, delete those that are too many, and return its path. Collective.

        `step`: the file's number, by default the last one and 1 more, from 1 up. Raises ValueError
        where it is lower than the last one (restore first, or take another directory: a restart
        would find the older run's file), and what `Checkpoint.save` raises.
        """
        last = self._steps[-1] if self._steps else 0
        step = last + 1 if step is None else operator.index(step)
        if step < last or step < 0:
            raise ValueError(
                f"step={step}: {self.directory} holds step {last}; must not be lower. Restore that"
                " one first, or take another directory"
            )
        path = self.checkpoint.save(self._path(step))
        self._steps = [*(each for each in self._steps if each != step), step]
        surplus = len(self._steps) - (self.max_to_keep or len(self._steps))
        dropped, self._steps = self._steps[: max(surplus, 0)], self._steps[max(surplus, 0) :]
        done_once(self.checkpoint, lambda: self._sweep(dropped))
        return path

    def _sweep(self, dropped: list[int]) -> None:
        """Delete what is too old, and what a program that was killed has left half-written."""
        for step in dropped:
            Path(self._path(step)).unlink(missing_ok=True)
        # Not those of a manager whose name begins with this one's.
        own = re.compile(rf"\.{re.escape(self._name)}-[0-9]+{re.escape(SUFFIX)}\..*").fullmatch
        for partial in Path(self.directory).glob(f".*{PARTIAL}"):
            if own(partial.name):
                partial.unlink(missing_ok=True)

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint and return its path; None where there is none. Collective.

        Raises what `Checkpoint.restore` raises.
        """
        latest = self.latest_checkpoint
        if latest is not None:
            self.checkpoint.restore(latest)
        return latest
