"""Evaluating checkpoints while others train, as `tf.estimator.train_and_evaluate` does.

Who trains and who evaluates share nothing but a directory: checkpoints appear in it, and in the end
a small file that says that training is over.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from strategies.base.strategy import Strategy, get_strategy
from strategies.checkpoint import Checkpoint
from strategies.checkpoint.directory import FoundCheckpoint, find_checkpoints
from strategies.core.same_error import call_on_first
from strategies.evaluation.end_marker import EndOfTraining

ModelFunction: TypeAlias = Callable[[Strategy], tuple[Checkpoint, Callable[[], Any]]]
"""`model_fn(strategy)`, called once in the strategy's scope, makes what is to be evaluated: the
checkpoint of what it needs, and a function without arguments that evaluates what was restored."""


class Evaluation(NamedTuple):
    """What one checkpoint gave: its path, its number (None: its name has none), the result."""

    path: str
    step: int | None
    result: Any


@dataclass(frozen=True)
class Patience:
    """How often to look for a checkpoint, and how long at most without finding one, in seconds."""

    poll_seconds: float = 1.0
    idle_seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.poll_seconds > 0:
            raise ValueError(f"poll_seconds={self.poll_seconds}: must be more than 0")


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

    Returns what `evaluate` gave for each; `on_result` is called with each as soon as it is there.
    Checkpoints that lie there already count as new; one that is deleted before its turn is left
    out; one that is replaced is a new one. What a checkpoint holds beyond the model's is ignored.

    strategy: that of the evaluating ranks, all of which make this call (default: the one in force).
    On an evaluator of `MultiWorkerMirroredStrategy` that is the evaluator alone. A worker of
    `ParameterServerStrategy` evaluates by itself, as an evaluator does: what `model_fn` makes is
    its own and holds what the file holds, whatever the others push; the variables on the servers
    can be neither read nor changed meanwhile (RuntimeError). Rank 0 looks at the directory, every
    `poll_seconds`. It ends after the last checkpoint, once `training_ends`
    has told of the end: in the run named `run`, else in any that ended since this process began.
    After `idle_seconds` (None: never) without a new checkpoint it warns (RuntimeWarning) and ends;
    it warns as well where there never was one.

    Raises ValueError for `poll_seconds` that aren't positive, and what `Checkpoint.restore` and
    the functions raise.
    """
    patience = Patience(poll_seconds, idle_seconds)
    strategy = get_strategy() if strategy is None else strategy
    with strategy.evaluating(), strategy.scope():
        checkpoint, evaluate = model_fn(strategy)
    evaluations = []
    for path, step in _new_checkpoints(strategy, os.fspath(directory), run, patience):
        with strategy.evaluating():
            if not _restored(checkpoint, path):
                continue
            evaluations.append(Evaluation(path, step, evaluate()))
        if on_result is not None:
            on_result(evaluations[-1])
    return evaluations


def _restored(checkpoint: Checkpoint, path: str) -> bool:
    """Whether the checkpoint was still there. Collective."""
    try:
        checkpoint.restore(path, expect_partial=True)
    except FileNotFoundError:
        return False
    return True


def _new_checkpoints(
    strategy: Strategy, directory: str, run: str | None, patience: Patience
) -> Iterator[tuple[str, int | None]]:
    """The path and step of each checkpoint, until there will be no more. Collective."""
    seen: set[FoundCheckpoint] = set()
    end = EndOfTraining(directory, run)
    last_news = time.monotonic()

    def look() -> tuple[FoundCheckpoint | None, bool, float]:
        # The end first: what was saved before it is then in the list.
        ended = end.has_come()
        new = next((each for each in find_checkpoints(directory) if each not in seen), None)
        return new, ended, time.monotonic() - last_news

    while True:
        new, ended, idle = call_on_first(strategy.communicator, look)
        if new is not None:
            seen.add(new)
            yield new.path, new.step
            last_news = time.monotonic()
        elif ended:
            if not seen:
                text = f"{directory}: training has ended, and no checkpoint was ever seen here"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return
        elif patience.idle_seconds is not None and idle >= patience.idle_seconds:
            text = f"{directory}: no new checkpoint for {idle:.0f} s, and no end of training"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
            return
        else:
            time.sleep(patience.poll_seconds)
