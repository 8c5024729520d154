"""Training with an evaluation of each checkpoint."""

from __future__ import annotations

from typing import Any

from strategies.estimator.estimator import Estimator
from strategies.estimator.specs import EvalSpec, TrainSpec
from strategies.tensorflow import ParameterServerStrategy


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any], list[Any]]:
    """Train until `max_steps`; evaluate each checkpoint when it is saved. Collective.

    Returns the metrics of the last evaluation, and an empty list in place of exporters' results.
    The ranks that train also evaluate. With a ParameterServerStrategy the chief alone evaluates,
    while the other workers train on, `max_steps` counts the steps of all workers, and ranks of the
    job ps serve: they return when the workers have ended, without metrics. ValueError for an
    `eval_distribute` of several ranks there, and for a task of job evaluator: start one rank less,
    or use `strategies.train_and_evaluate`.
    """
    strategy = estimator.train_strategy
    resolver = strategy.cluster_resolver
    if resolver is not None and resolver.task_type == "evaluator":
        raise ValueError(
            "TF_CONFIG's task is evaluator: estimators have chief and worker tasks, which evaluate"
            " each checkpoint themselves"
        )
    asynchronous = isinstance(strategy, ParameterServerStrategy)
    if asynchronous and estimator.eval_strategy.communicator.size > 1:
        raise ValueError(
            "eval_distribute has several ranks, and with a ParameterServerStrategy the chief alone"
            " evaluates: must be a OneDeviceStrategy, or None"
        )
    if asynchronous and strategy.is_server:
        strategy.serve()
        return {}, []
    found: dict[str, Any] = {}

    def evaluated() -> dict[str, Any]:
        found.update(estimator.evaluate(eval_spec.input_fn, eval_spec.steps))
        return found

    estimator.train_between(train_spec.input_fn, None, train_spec.max_steps, evaluated)
    if asynchronous:
        # The chief alone has evaluated, unless training was over before.
        return strategy.chief_first(lambda: found or evaluated()), []
    return found or evaluated(), []
