"""Optimizers of Keras that reduce the ranks' gradients first.

Methods are replaced in the instance, so that its class, and what is saved, stay Keras's. Clipping,
accumulation and moving averages follow the reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras

from strategies.keras.training import Training


def reduce_first(optimizer: Any, training: Training) -> None:
    """Have the optimizer reduce gradients from now on, instead of any earlier `training`."""
    kind, number = type(optimizer), training.number_of(optimizer)

    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        variables = trainable_variables
        if variables is None:
            variables = optimizer._trainable_variables
        reduced = _reduced(training, number, grads, variables)
        return kind.apply(optimizer, reduced, trainable_variables)

    vars(optimizer)["apply"] = apply
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        # It chooses the step by whether gradients are finite, before it applies them.
        def stateless_apply(
            optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
        ) -> Any:
            reduced = _reduced(training, number, grads, optimizer._trainable_variables)
            return kind.stateless_apply(
                optimizer, optimizer_variables, reduced, trainable_variables
            )

        vars(optimizer)["stateless_apply"] = stateless_apply


def reduce_no_more(optimizer: Any) -> None:
    """Have an optimizer of the TensorFlow backend apply gradients that are reduced already."""
    vars(optimizer)["_all_reduce_sum_gradients"] = list


def optimizers_of(model: Any) -> list[Any]:
    """The optimizers in attributes of the model and its layers, and the optimizers within them.

    An attribute may also be a list, tuple, set or dictionary with optimizers, such as a GAN's.
    """
    found = {
        id(each): each
        for layer in model._flatten_layers()
        for attribute in vars(layer).values()
        for each in _within(attribute)
    }
    inner = [getattr(each, "inner_optimizer", None) for each in found.values()]
    return [*found.values(), *(each for each in inner if each is not None)]


def _within(value: Any) -> Iterator[Any]:
    if isinstance(value, keras.optimizers.Optimizer):
        yield value
    elif isinstance(value, dict | list | tuple | set):
        if isinstance(value, set):
            # Its order is each rank's own.
            value = sorted(value, key=lambda each: str(getattr(each, "name", "")))
        for each in value.values() if isinstance(value, dict) else value:
            yield from _within(each)


def outer_optimizers_of(model: Any) -> list[Any]:
    """The same without those within others, which get gradients that are reduced already."""
    found = optimizers_of(model)
    inner = {id(getattr(each, "inner_optimizer", None)) for each in found}
    return [each for each in found if id(each) not in inner]


def _reduced(
    training: Training, number: int, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    backend = keras.config.backend()
    if backend == "torch":
        from strategies.keras.torch_gradients import reduce_gradients
    elif backend == "tensorflow":
        from strategies.keras.tensorflow_gradients import reduce_gradients
    else:
        from strategies.keras.jax_gradients import reduce_gradients
    reduced: list[Any] = reduce_gradients(training, number, list(grads), list(variables))
    return reduced
