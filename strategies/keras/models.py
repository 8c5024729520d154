"""Preparation of a compiled model: methods of the instance that keep the ranks in step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from strategies.foreign.distributed import permit
from strategies.keras.loops import LoopMethods
from strategies.keras.losses import check_losses, checked_loss
from strategies.keras.optimizers import (
    optimizers_of,
    outer_optimizers_of,
    reduce_first,
)
from strategies.keras.saving import saving_of
from strategies.keras.state import (
    average_logs,
    divide_sums,
    finish_step,
    metric_results,
    refuse_different_weights,
    sum_metrics,
)
from strategies.keras.steps import steps_of
from strategies.keras.training import Training


def prepare(model: Any, training: Training) -> None:
    """Replace the methods by which Keras trains the model. Its class stays as it is.

    Where `tf.distribute` creates variables and splits data, only steps, gradients, callbacks and
    output are the ranks'.

    ValueError for a loss whose mean over the ranks isn't the whole batch's, and for a model of the
    TensorFlow backend that was made outside of the strategy's scope; TypeError for one of another
    backend that the strategy doesn't train.
    """
    check_losses(model, training)
    if not training.reduces and keras.backend.backend() != "tensorflow":
        raise TypeError(
            f"model {model.name!r} is of Keras's backend {keras.backend.backend()!r}: must be of"
            f" 'tensorflow' in the scope of {type(training.owner).__name__} of"
            " strategies.tensorflow; the strategies of `strategies` train those of torch and jax"
        )
    if not training.reduces and model._distribute_strategy is not training.owner:
        raise ValueError(
            f"model {model.name!r} was made outside of the scope of"
            f" {type(training.owner).__name__}: it must be made there, and compiled"
        )
    kind = type(model)

    def compile(*args: Any, **kwargs: Any) -> Any:
        result = kind.compile(model, *args, **kwargs)
        if vars(model)["compile"] is compile:
            # Else a scope has prepared it, for its own strategy.
            prepare(model, training)
        return result

    loops = LoopMethods.of(model, training)
    replaced = loops.methods() | _training_methods(model, training)
    if training.reduces:
        replaced |= _results(model, training) | steps_of(model, training)
        replaced |= checked_loss(model, training) | saving_of(model)
    else:
        from strategies.keras.tensorflow_predictions import PREDICTIONS, Predictions
        from strategies.keras.tensorflow_steps import StepMethods, refuse_metrics_of_others

        refuse_metrics_of_others(model, training)
        replaced |= StepMethods(model, training).methods()
        object.__setattr__(model, PREDICTIONS, Predictions(model, loops))
    reduce_gradients_of(model, training)
    for name, method in {**replaced, "compile": compile}.items():
        object.__setattr__(model, name, method)


def _training_methods(model: Any, training: Training) -> dict[str, Callable[..., Any]]:
    def make_train_function(*args: Any, **kwargs: Any) -> Any:
        # A model may get further optimizers after `compile`.
        reduce_gradients_of(model, training)
        existing = model.train_function
        result = type(model).make_train_function(model, *args, **kwargs)
        if training.reduces and model.train_function is not existing:
            model.train_function = _compared_once(model, training, model.train_function)
        return result

    return {"make_train_function": make_train_function}


def _results(model: Any, training: Training) -> dict[str, Callable[..., Any]]:
    def results(logs: Any) -> Any:
        if training.in_epoch:
            finish_step(logs)
            training.end_epoch()
        sum_metrics(training, model)
        found = type(model)._get_metrics_result_or_logs(model, logs)
        if found is not logs or not logs:
            return found
        # A step of the program's own returns some of the metrics, or numbers beside them.
        metrics = metric_results(model)
        others = {name: number for name, number in logs.items() if name not in metrics}
        means = average_logs(training, others) if others else {}
        return {name: means.get(name, metrics.get(name)) for name in logs}

    def reset_metrics() -> None:
        type(model).reset_metrics(model)
        divide_sums(training, model)

    return {"_get_metrics_result_or_logs": results, "reset_metrics": reset_metrics}


_STATE_OF_JAX = tuple(
    f"{kind}_variables" for kind in ("trainable", "non_trainable", "optimizer", "metrics")
)


def _compared_once(model: Any, training: Training, function: Callable[..., Any]) -> Any:
    """The function of a training step; the first call also compares the ranks' weights."""

    def compared(*arguments: Any) -> Any:
        result = function(*arguments)
        weights = None
        if keras.config.backend() == "jax":
            # What Keras notes after a step: the variables have values after an error, too.
            model._jax_state = dict(zip(_STATE_OF_JAX, result[1], strict=True))
            if not training.in_epoch:
                model.jax_state_sync()  # `fit` does so at its end
            weights = model._jax_state["trainable_variables"]
        refuse_different_weights(training, model, "after the first training step", weights)
        model.train_function = function
        return result

    return compared


def reduce_gradients_of(model: Any, training: Training) -> None:
    """Have the model's optimizers reduce gradients."""
    for optimizer in outer_optimizers_of(model):
        reduce_first(optimizer, training)
    permit(optimizers_of(model), training.owner)


def permit_training(model: Any, training: Training) -> None:
    """Have the guards of the scope pass what the model consists of."""
    layers, optimizers = model._flatten_layers(), optimizers_of(model)
    # Nadam has one that counts as trainable.
    variables = [*model.variables, *(each for one in optimizers for each in one.variables)]
    permit([*layers, *variables, *optimizers], training.owner)
    if keras.config.backend() == "torch":
        permit([each.value for each in variables], training.owner)
