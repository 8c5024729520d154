"""One program in which some ranks train and another evaluates, each by its role."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from collectives import Communicator
from strategies.base.strategy import Strategy
from strategies.cluster.tf_config import parse_tf_config, validate_for_train_and_evaluate
from strategies.core.world import world_of
from strategies.evaluation.end_marker import training_ends
from strategies.evaluation.evaluate import Evaluation, ModelFunction, evaluate_checkpoints
from strategies.input.failures import check_together
from strategies.parameter_server.strategy import ParameterServerStrategy
from strategies.synchronous.multi_worker import MultiWorkerMirroredStrategy


class TrainedAndEvaluated(NamedTuple):
    """What `train_fn` returned (None on an evaluator), and the evaluations made by this rank."""

    trained: Any
    evaluations: list[Evaluation]


def train_and_evaluate(
    train_fn: Callable[[Strategy], Any],
    eval_fn: ModelFunction,
    directory: str | os.PathLike[str],
    *,
    strategy_fn: Callable[..., Strategy] = MultiWorkerMirroredStrategy,
    communicator: Communicator | None = None,
    poll_seconds: float = 1.0,
    idle_seconds: float | None = None,
    on_result: Callable[[Evaluation], None] | None = None,
) -> TrainedAndEvaluated:
    """Call `train_fn(strategy)` where this rank trains, evaluate checkpoints where it evaluates.

        def train_fn(strategy):
            with strategy.scope():
                model = Model()
            manager = CheckpointManager(Checkpoint(model=model), "checkpoints")
            ...  # train, and manager.save() now and then

        train_and_evaluate(train_fn, eval_fn, "checkpoints")

    As `tf.estimator.train_and_evaluate`: the role comes from `TF_CONFIG`, whose cluster, if there
    is one, must have exactly one chief. `train_fn` saves its checkpoints in `directory`; `eval_fn`
    is the `model_fn` of `evaluate_checkpoints`, which explains it and the other arguments. In a
    world without an evaluator the training ranks evaluate all that lies in the directory together,
    after training. (Estimator alternates there.) A ps task serves until they have trained: only
    `ParameterServerStrategy` has such. Its workers leave the servers as soon as they have trained,
    and evaluate each by itself, so that every worker has a result of every checkpoint.

    strategy_fn: called as `strategy_fn(communicator=…)` with all ranks. All ranks make this call.
    Raises ValueError for a cluster that won't do, on every rank; where training fails, its error,
    after the evaluator was told to end.
    """
    strategy, run, roles = _joined(strategy_fn, communicator)
    evaluate = functools.partial(
        evaluate_checkpoints,
        eval_fn,
        directory,
        strategy=strategy,
        run=run,
        poll_seconds=poll_seconds,
        idle_seconds=idle_seconds,
        on_result=on_result,
    )
    if _role(strategy) == "evaluator":
        return TrainedAndEvaluated(None, evaluate())
    if isinstance(strategy, ParameterServerStrategy) and _role(strategy) == "ps":
        strategy.serve()
        return TrainedAndEvaluated(None, [])
    with training_ends(directory, run=run, writes=strategy.is_chief):
        try:
            trained = train_fn(strategy)
        finally:
            # Now, since others may not run further ahead of a worker that evaluates.
            if isinstance(strategy, ParameterServerStrategy):
                strategy.shutdown()
    return TrainedAndEvaluated(trained, [] if "evaluator" in roles else evaluate())


def _joined(
    strategy_fn: Callable[..., Strategy], communicator: Communicator | None
) -> tuple[Strategy, str, list[str | None]]:
    """This rank's strategy, the run's name, and the roles of all ranks. Collective."""
    world = world_of(communicator)
    strategy = strategy_fn(communicator=world)
    check_together(world, lambda: _validate(strategy))
    run = world.broadcast_object(uuid.uuid4().hex)
    return strategy, run, world.all_gather_object(_role(strategy))


def _validate(strategy: Strategy) -> None:
    """Raise ValueError where the strategy took its cluster from a TF_CONFIG that won't do."""
    resolver = strategy.cluster_resolver
    config = parse_tf_config(os.environ.get("TF_CONFIG"))
    if resolver is not None and config.cluster == resolver.cluster_spec():
        validate_for_train_and_evaluate(config)


def _role(strategy: Strategy) -> str | None:
    resolver = strategy.cluster_resolver
    return None if resolver is None else resolver.task_type
