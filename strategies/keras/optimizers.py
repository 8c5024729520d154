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
            if not optimizer.built:
                return kind.apply(optimizer, grads)  # which says so
            variables = optimizer._trainable_variables
        reduced = _reduced(training, number, grads, variables)
        if not training.reduces:
            _reduce_once(optimizer, variables)
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


def _reduce_once(optimizer: Any, variables: Sequence[Any]) -> None:
    """Have an optimizer of the TensorFlow backend apply gradients that are reduced already."""
    # A MultiOptimizer of a function finds those within it when it is built.
    if hasattr(optimizer, "optimizers") and not optimizer.built:
        optimizer.build(variables)
    vars(optimizer)["_all_reduce_sum_gradients"] = list
    for each in _inner_optimizers(optimizer):
        _reduce_once(each, variables)


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
    inner = (each for outer in found.values() for each in _inner_optimizers(outer))
    return list((found | {id(each): each for each in inner}).values())


def _inner_optimizers(optimizer: Any) -> Iterator[Any]:
    """That of a LossScaleOptimizer, those of a MultiOptimizer, and those within them."""
    own = getattr(optimizer, "inner_optimizer", None)
    for each in getattr(optimizer, "optimizers", ()) if own is None else (own,):
        yield each
        yield from _inner_optimizers(each)


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
    inner = {id(each) for outer in found for each in _inner_optimizers(outer)}
    return [each for each in found if id(each) not in inner]


def _reduced(
    training: Training, number: int, grads: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    backend = keras.config.backend()
    if backend == "torch":
        from strategies.keras.torch_gradients import maxima, reduce_gradients
    elif backend == "tensorflow":
        from strategies.keras.tensorflow_gradients import maxima, reduce_gradients
    else:
        from strategies.keras.jax_gradients import maxima, reduce_gradients
    # Such as float8's scales, whose gradients are their new values: Keras accumulates maxima.
    replaced = [
        index
        for index, (gradient, variable) in enumerate(zip(grads, variables, strict=True))
        if gradient is not None and getattr(variable, "overwrite_with_gradient", False)
    ]
    others = [index for index in range(len(grads)) if index not in replaced]
    reduced = list(grads)
    means = reduce_gradients(
        training, number, [grads[each] for each in others], [variables[each] for each in others]
    )
    largest = maxima(training, [grads[each] for each in replaced]) if replaced else []
    for index, result in zip([*others, *replaced], [*means, *largest], strict=True):
        reduced[index] = result
    return reduced
