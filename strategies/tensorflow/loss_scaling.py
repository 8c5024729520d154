"""Loss scaling on several ranks: all ranks skip a step in which one rank's gradients overflow."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from strategies.foreign.methods import Undo, wrap_method
from strategies.tensorflow.variables import callers


def agree_on_overflows(strategy: Any) -> Undo:
    """Have Keras's LossScaleOptimizer regard the gradients of all ranks, in `strategy`'s replicas.

    Returns the function that restores the method. Keras expects gradients that are reduced before
    it checks them, while they are reduced when the inner optimizer applies them.
    """

    def agreed_check_finite(original: Callable[..., Any], optimizer: Any, grads: Any) -> Any:
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not strategy:
            return original(optimizer, grads)
        # Scopes are nested, and each has wrapped the method.
        finite = inspect.unwrap(original)(optimizer, grads)
        # NaN of a batch without rows doesn't count, where others have rows.
        extended = strategy.extended
        empty = not extended.is_alone and extended.empty_batches.is_empty()
        overflows = tf.logical_not(tf.logical_or(finite, empty))
        overflows = context.all_reduce("SUM", tf.cast(overflows, tf.int32))
        return tf.equal(overflows, 0)

    return wrap_method(keras.optimizers.LossScaleOptimizer, "check_finite", agreed_check_finite)


def makes_scale() -> bool:
    """Whether the variable that is being made is state of a LossScaleOptimizer.

    Its steps halve, double or reset that.
    """
    for frame in callers():
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.LossScaleOptimizer):
            return frame.f_code.co_name in ("build", "add_variable")
        if isinstance(owner, keras.optimizers.Optimizer):
            return False
    return False
