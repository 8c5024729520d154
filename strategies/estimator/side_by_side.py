"""Training with an evaluation of each checkpoint."""

from __future__ import annotations

from typing import Any

from strategies.estimator.estimator import Estimator
from strategies.estimator.specs import EvalSpec, TrainSpec


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any], list[Any]]:
    """Train until `max_steps`; evaluate each checkpoint when it is saved. Collective.

    Returns the metrics of the last evaluation, and an empty list in place of exporters' results.
    The ranks that train also evaluate. A task of job evaluator raises ValueError: start one rank
    less, or use `strategies.train_and_evaluate`.
    """
    resolver = estimator.train_strategy.cluster_resolver
    if resolver is not None and resolver.task_type == "evaluator":
        raise ValueError(
            "TF_CONFIG's task is evaluator: estimators have chief and worker tasks, which evaluate"
            " each checkpoint themselves"
        )
    found: dict[str, Any] = {}

    def evaluate() -> None:
        found.update(estimator.evaluate(eval_spec.input_fn, eval_spec.steps))

    estimator.train_between(train_spec.input_fn, None, train_spec.max_steps, evaluate)
    if not found:
        evaluate()
    return found, []
