"""Evaluate checkpoints while other ranks train, as `tf.estimator.train_and_evaluate` does.

Trainers and evaluators share only a directory with the checkpoints and, after training, the end
marker.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from strategies.base.strategy import Strategy, get_strategy
from strategies.checkpoint import Checkpoint
from strategies.checkpoint.manager import FoundCheckpoint, find_checkpoints
from strategies.core.same_error import PropagatedErrors, call_on_first
from strategies.evaluation.end_marker import EndOfTraining

ModelFunction: TypeAlias = Callable[[Strategy], tuple[Checkpoint, Callable[[], Any]]]
"""`model_fn(strategy)` is called once in the strategy's scope. It returns a Checkpoint of the model
and a function without arguments that evaluates the restored model."""


class Evaluation(NamedTuple):
    """A checkpoint's path, its number (None: its name has none), and the evaluation's result."""

    path: str
    step: int | None
    result: Any


def evaluate_checkpoints(
    model_fn: ModelFunction,
    directory: str | os.PathLike[str],
    *,
    strategy: Strategy | None = None,
    run: str | None = None,
    poll_seconds: float = 1.0,
    idle_seconds: float | None = None,
    on_result: Callable[[Evaluation], None] | None = None,
) -> list[Evaluation]:
    """Evaluate each checkpoint that appears in a directory, once, in order, until training ends.

        def model_fn(strategy):
            model, accuracy = Model(), metrics.Mean()
            def evaluate():
                accuracy.reset_state()
                for batch in test_data:
                    strategy.run(lambda batch: accuracy.update_state(model(batch)), (batch,))
                return accuracy.result()
            return Checkpoint(model=model), evaluate
        evaluations = evaluate_checkpoints(model_fn, "checkpoints")

    Checkpoints that exist already count as new. One that is deleted before it is read is skipped;
    one that is replaced counts as new. State in a checkpoint that isn't the model's is ignored.

    strategy: that of the evaluating ranks, all of which make this call (default: the current one).
    A worker of `ParameterServerStrategy` evaluates alone: `model_fn` creates local variables with
    the values of the file; meanwhile access to the servers' variables raises RuntimeError.
    run: the name of the run whose end is awaited (None: any that ends after this process started).
    poll_seconds: the interval at which rank 0 reads the directory.
    idle_seconds: the time without a new checkpoint after which rank 0 warns and all return; None:
    never.
    on_result: called with each evaluation.

    Returns when `training_ends` has written its marker. Emits a RuntimeWarning after
    `idle_seconds`, and if there never was a checkpoint. Raises ValueError unless `poll_seconds` is
    positive, and the errors of `Checkpoint.restore` and of the functions: those of one rank are a
    MismatchError on the others.
    """
    strategy = get_strategy() if strategy is None else strategy
    propagated = PropagatedErrors(strategy.communicator, "evaluate_checkpoints")
    with propagated:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds={poll_seconds}: must be positive")
        directory = os.fspath(directory)
        with strategy.evaluating(), strategy.scope():
            checkpoint, evaluate = model_fn(strategy)
        if not isinstance(checkpoint, Checkpoint) or not callable(evaluate):
            raise TypeError(
                f"model_fn returned a {type(checkpoint).__name__} and a {type(evaluate).__name__}:"
                " must return a strategies.Checkpoint and a function"
            )
    evaluations = []
    for path, step in _new_checkpoints(strategy, directory, run, poll_seconds, idle_seconds):
        with propagated:
            with strategy.evaluating():
                try:
                    checkpoint.restore(path, expect_partial=True)
                except FileNotFoundError:
                    continue
                evaluations.append(Evaluation(path, step, evaluate()))
            if on_result is not None:
                on_result(evaluations[-1])
    return evaluations


def _new_checkpoints(
    strategy: Strategy,
    directory: str,
    run: str | None,
    poll_seconds: float,
    idle_seconds: float | None,
) -> Iterator[tuple[str, int | None]]:
    """The path and step of each new checkpoint, until the end of training. Collective."""
    seen: set[FoundCheckpoint] = set()
    end = EndOfTraining(directory, run)
    last_found = time.monotonic()

    def poll() -> tuple[FoundCheckpoint | None, bool, float | None, float]:
        # The end is read first, so that all checkpoints before it are in the list.
        ended = end.poll()
        new = next((each for each in find_checkpoints(directory) if each not in seen), None)
        idle = time.monotonic() - last_found
        over = idle_seconds is not None and idle >= idle_seconds
        return new, ended, idle if over else None, poll_seconds

    while True:
        new, ended, idle, interval = call_on_first(strategy.communicator, poll)
        if new is not None:
            seen.add(new)
            yield new.path, new.step
            last_found = time.monotonic()
        elif ended:
            if not seen:
                text = f"{directory}: training has ended without any checkpoint in this directory"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return
        elif idle is not None:
            text = f"{directory}: no new checkpoint for {idle:.0f} s, and no end of training"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            return
        else:
            time.sleep(interval)
