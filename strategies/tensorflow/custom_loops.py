"""Gradients of custom loops, which Keras's optimizers reduce themselves, are compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from strategies.foreign.methods import Undo, wrap_method
from strategies.keras.tensorflow_gradients import reduce_gradients
from strategies.keras.training import Training


def compress_gradients(strategy: Any, training: Training) -> Undo:
    """Have Keras's optimizers compress what they reduce in `strategy`'s replicas.

    Returns the function that restores the method.
    """

    def reduce(
        original: Callable[..., Any], optimizer: Any, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not strategy:
            return original(optimizer, grads_and_vars)
        # Their positions among all variables name the gradients that are compressed together.
        pairs = {optimizer._get_variable_index(each[1]): each for each in grads_and_vars}
        variables = optimizer._trainable_variables
        gradients = [pairs.get(index, (None,))[0] for index in range(len(variables))]
        number = training.number_of(optimizer)
        reduced = reduce_gradients(training, number, gradients, variables)
        return [(reduced[index], variable) for index, (_, variable) in pairs.items()]

    return wrap_method(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", reduce)
