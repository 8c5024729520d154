"""One program for training and evaluation: each rank does what its role requires."""

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
from strategies.synchronous.mirrored import MultiWorkerMirroredStrategy


class TrainedAndEvaluated(NamedTuple):
    """The result of `train_fn` (None on an evaluator), and the evaluations of this rank."""

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
    """Train or evaluate checkpoints on this rank, as its role requires. Collective.

        def train_fn(strategy):
            with strategy.scope():
                model = Model()
            manager = CheckpointManager(Checkpoint(model=model), "checkpoints")
            ...  # train, and manager.save() now and then

        train_and_evaluate(train_fn, eval_fn, "checkpoints")

    As `tf.estimator.train_and_evaluate`: the role comes from `TF_CONFIG`, whose cluster, if there
    is one, must have exactly one chief. `train_fn(strategy)` saves its checkpoints in `directory`.

    In a world without an evaluator the training ranks evaluate all checkpoints in the directory
    together after training, where Estimator alternates. A ps task of `ParameterServerStrategy`
    serves until the workers have trained; each worker then disconnects from the servers and
    evaluates alone, so that every worker has a result of every checkpoint.

    strategy_fn is called as `strategy_fn(communicator=…)`; `evaluate_checkpoints` documents the
    other arguments. Raises ValueError on every rank for an invalid cluster, and training's error.
    """
    strategy, run, roles = _set_up(strategy_fn, communicator)
    limits = {"poll_seconds": poll_seconds, "idle_seconds": idle_seconds}
    options: dict[str, Any] = {"strategy": strategy, "run": run, "on_result": on_result, **limits}
    evaluate = functools.partial(evaluate_checkpoints, eval_fn, directory, **options)
    if _role(strategy) == "evaluator":
        return TrainedAndEvaluated(None, evaluate())
    if isinstance(strategy, ParameterServerStrategy) and _role(strategy) == "ps":
        strategy.serve()
        return TrainedAndEvaluated(None, [])
    with training_ends(directory, run=run, writes=strategy.is_chief):
        try:
            trained = train_fn(strategy)
        finally:
            # Before evaluation: staleness would stop the other workers.
            if isinstance(strategy, ParameterServerStrategy):
                strategy.shutdown()
    return TrainedAndEvaluated(trained, [] if "evaluator" in roles else evaluate())


def _set_up(
    strategy_fn: Callable[..., Strategy], communicator: Communicator | None
) -> tuple[Strategy, str, list[str | None]]:
    """This rank's strategy, a unique name of the run, and the roles of all ranks. Collective."""
    world = world_of(communicator)
    strategy = strategy_fn(communicator=world)
    check_together(world, lambda: _validate(strategy))
    run = world.broadcast_object(uuid.uuid4().hex)
    return strategy, run, world.all_gather_object(_role(strategy))


def _validate(strategy: Strategy) -> None:
    """ValueError where the strategy's cluster comes from a TF_CONFIG that isn't allowed here.

    TypeError for what is no strategy of this package, such as one of `strategies.tensorflow`.
    """
    if not isinstance(strategy, Strategy):
        kind = f"{type(strategy).__module__}.{type(strategy).__name__}"
        raise TypeError(
            f"strategy_fn returned a {kind}: must be a strategy of `strategies`; for TensorFlow's"
            " models there is strategies.estimator.train_and_evaluate"
        )
    resolver = strategy.cluster_resolver
    config = parse_tf_config(os.environ.get("TF_CONFIG"))
    if resolver is not None and config.cluster == resolver.cluster_spec():
        validate_for_train_and_evaluate(config)


def _role(strategy: Strategy) -> str | None:
    resolver = strategy.cluster_resolver
    return None if resolver is None else resolver.task_type
