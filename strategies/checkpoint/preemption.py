"""Save a checkpoint of all ranks and exit, once any of them is to be terminated."""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from collectives import Communicator
from collectives.scope import named_scope
from strategies.base.strategy import get_strategy
from strategies.checkpoint.checkpoint import Checkpoint
from strategies.checkpoint.manager import CheckpointManager
from strategies.core.same_error import PropagatedErrors, call_on_all, refuse_differences

Result = TypeVar("Result")

RESTART_CODE = 42
"""With which the program exits by default, as TensorFlow's."""

_NAME = "PreemptionCheckpointHandler"
_NUMBER = re.compile(r"-([0-9]+)(\.[a-z]+)?\Z")
# The last checkpoint of a grace period begins while there is time for so many like the first one.
_RESERVE = 2
# A signal to a forked process was sent to its rank, too, if they are no further apart.
_TOGETHER_SECONDS = 1.0


@dataclass(frozen=True)
class TerminationConfig:
    """How a rank learns that it is to be terminated, and what it does then.

    termination_watcher_fn: called once per step; whether this rank is to be terminated.
    exit_fn: called on all ranks after the checkpoint; by default `sys.exit(42)`. If it returns, the
    training continues.
    grace_period: the seconds between the notice and the termination. None or 0: a checkpoint and
    the exit follow the step. Otherwise a checkpoint follows the step, and another one and the exit
    the last step that leaves time for it: twice the time that the first checkpoint took.
    save_fn: called on all ranks instead of the manager's `save`, with the arguments of
    `save_checkpoint_if_preempted`.
    signals: the ones that announce the termination; TensorFlow's configuration has none.
    (https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/TerminationConfig)
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., object] | None = None
    signals: Sequence[int] = (signal.SIGTERM,)


class PreemptionCheckpointHandler:
    """Saves a checkpoint at the same step on all ranks, once any of them is to be terminated.

    As `tf.distribute.experimental.PreemptionCheckpointHandler`: the latest checkpoint is restored
    when it is made, `run` makes one step, and after the step in which a rank has received the
    signal, all ranks save and exit. The program goes on from there when it is started again.

    cluster_resolver: not needed, the communicator connects the ranks.
    checkpoint_or_checkpoint_manager: a `Checkpoint`, of which one file is kept in `checkpoint_dir`,
    or a `CheckpointManager`.
    communicator: by default that of the checkpoint. All of its ranks make the same calls of this
    object, which is not the case under `ParameterServerStrategy`.

    The signals are handled from now on until `close`, or the end of a `with` block. Processes that
    are forked off a rank meanwhile ignore them, since launchers signal them, too; SIGTERM ends them
    unless the rank is given notice within a second of it, and a second one does. Collective. The
    constructor is to be called on the main thread. Raises TypeError for other objects, ValueError
    where `checkpoint_dir` is missing or surplus, and the errors of `restore_or_initialize`.
    (https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/PreemptionCheckpointHandler)
    """

    checkpoints: Any = Checkpoint
    managers: Any = CheckpointManager

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        self._config = config = termination_config or TerminationConfig()
        given = checkpoint_or_checkpoint_manager
        if communicator is None:
            with PropagatedErrors(get_strategy().communicator, _NAME):
                self._check_kind(given)
            communicator = self._communicator_of(given)
        self._communicator: Communicator = communicator
        call_on_all(communicator, _NAME, lambda: self._check(given, checkpoint_dir))
        self._manager = given
        if isinstance(given, self.checkpoints):
            with PropagatedErrors(communicator, _NAME):
                self._manager = self.managers(given, checkpoint_dir, max_to_keep=1)
        functions = [each is not None for each in (config.save_fn, config.exit_fn)]
        refuse_differences(
            communicator,
            f"{_NAME}: the ranks' configurations differ",
            f"grace_period={config.grace_period}, save_fn and exit_fn given: {functions}",
        )
        self._manager.restore_or_initialize()
        self._calls = self._latest()
        refuse_differences(
            communicator,
            f"{_NAME}: the ranks have restored different checkpoints; all must see the files",
            f"number {self._calls}",
        )
        self._noticed: float | None = None
        """When this rank was told that it is to be terminated, or that another one is."""
        self._saved_in: float | None = None
        """How many seconds the first checkpoint of the grace period took."""
        self._process = os.getpid()
        # A number that processes which are forked off the rank see.
        self._told = memoryview(mmap.mmap(-1, 8)).cast("d")
        """When the rank was given notice; 0: it was not, inf: it is over."""
        self._ignored = 0.0
        """The notice for which this process, a forked one, has ignored a signal."""
        self._before = {
            number: signal.signal(number, self._notice) for number in set(self._config.signals)
        }

    def _check_kind(self, given: Any) -> None:
        if not isinstance(given, (self.checkpoints, self.managers)):
            raise TypeError(f"{type(given).__name__}: must be a Checkpoint or a CheckpointManager")

    def _check(self, given: Any, directory: str | os.PathLike[str] | None) -> None:
        """Raise TypeError or ValueError for arguments of the constructor that don't fit."""
        self._check_kind(given)
        if isinstance(given, self.managers):
            if directory is not None:
                raise ValueError(f"checkpoint_dir={directory!r}: must be None, the manager has one")
        elif directory is None:
            raise ValueError("checkpoint_dir=None: must be the directory of its checkpoints")
        config = self._config
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            function = getattr(config, name)
            if function is not None and not callable(function):
                raise TypeError(f"{name}={function!r}: must be a function, or None")
        if config.grace_period is not None and not isinstance(config.grace_period, Real):
            raise TypeError(f"grace_period={config.grace_period!r}: must be seconds, or None")
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"{_NAME} is made in another thread than the main one, which signals interrupt"
            )
        handled = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        if wrong := set(config.signals) - handled:
            raise ValueError(f"signals: {wrong}: can't be handled")

    def _communicator_of(self, given: Any) -> Any:
        """That of the checkpoint's strategy."""
        return (given if isinstance(given, self.checkpoints) else given.checkpoint).communicator

    def _latest(self) -> int:
        """The number of the latest checkpoint; 0 where there is none."""
        found = _NUMBER.search(self._manager.latest_checkpoint or "")
        return int(found[1]) if found else 0

    @property
    def total_run_calls(self) -> int:
        """How often `run` was called, before the program was started again too.

        The number of the checkpoint that was restored, which this object gives it, and the calls
        since then.
        """
        return self._calls

    def run(
        self, distributed_train_function: Callable[..., Result], *args: Any, **kw: Any
    ) -> Result:
        """Call the function, which makes one step; then as `save_checkpoint_if_preempted`."""
        result = distributed_train_function(*args, **kw)
        self._calls += 1
        self.save_checkpoint_if_preempted()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint and exit, if any rank is to be terminated. Collective.

        It costs a small `all_reduce`. The arguments are those of the manager's `save`, or of
        `save_fn`. Raises their errors, and on all ranks that of `termination_watcher_fn`.
        """
        with named_scope(self._communicator, f"{_NAME}, a call for every rank"):
            noticed, over = self._agreed()
        if not noticed:
            return
        start = time.monotonic()
        self._noticed = self._noticed or start
        if self._config.grace_period and self._saved_in is None:
            self._save(*args, **kwargs)
            self._saved_in = time.monotonic() - start
        elif over:
            self._save(*args, **kwargs)
            self._noticed = self._saved_in = None
            self._told[0] = math.inf
            exit_fn = self._config.exit_fn
            sys.exit(RESTART_CODE) if exit_fn is None else exit_fn()
            self._told[0] = self._noticed or 0

    def _agreed(self) -> tuple[bool, bool]:
        """Whether any rank is to be terminated, and whether it is time for the last checkpoint."""
        with PropagatedErrors(self._communicator, _NAME):
            watcher = self._config.termination_watcher_fn
            if self._noticed is None and watcher is not None and watcher():
                self._noticed = time.monotonic()
        flags = np.array([self._noticed is not None, self._is_over()], np.int64)
        self._communicator.all_reduce(flags, "max", out=flags)
        noticed, over = flags.tolist()
        return bool(noticed), bool(over)

    def _is_over(self) -> bool:
        """Whether this rank's grace period leaves no time for a step before the last checkpoint."""
        if self._noticed is None:
            return False
        left = self._noticed + (self._config.grace_period or 0) - time.monotonic()
        return left <= _RESERVE * (self._saved_in or 0)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        elif args or kwargs:
            self._manager.save(*args, **kwargs)
        else:
            # A number of its own, also where the program numbers others, or never calls `run`.
            self._save_as(max(self._calls, self._latest() + 1))

    def _save_as(self, number: int) -> None:
        self._manager.save(number)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._told[0] = time.monotonic()
            self._noticed = self._noticed or self._told[0]
        elif number == signal.SIGTERM and not self._is_told_with_rank():
            self._handle_as_before(number)
            os.kill(os.getpid(), number)

    def _is_told_with_rank(self) -> bool:
        """Whether the rank, which needs this process, is given notice now, as launchers do."""
        start = time.monotonic()
        earliest, latest = start - _TOGETHER_SECONDS, start + _TOGETHER_SECONDS
        while self._told[0] < earliest and time.monotonic() < latest:
            time.sleep(0.01)
        # What comes after the notice is from the rank.
        before, self._ignored = self._ignored, self._told[0]
        return before != self._ignored and earliest < self._ignored < latest

    def close(self) -> None:
        """Handle the signals as before."""
        if os.getpid() == self._process:
            self._told[0] = math.inf
        for number in list(self._before):
            self._handle_as_before(number)

    def _handle_as_before(self, number: int) -> None:
        handler = self._before.get(number)
        # None: one that was installed before Python started.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.pop(number, None)

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
