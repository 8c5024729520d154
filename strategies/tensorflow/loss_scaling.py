"""Loss scaling on several ranks: all ranks skip a step in which one rank's gradients overflow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import keras
import tensorflow as tf

from strategies.foreign.methods import Undo, replace_method


def agree_on_overflows(strategy: Any) -> Undo:
    """Have Keras's LossScaleOptimizer regard the gradients of all ranks, in `strategy`'s replicas.

    Returns the function that restores the method. Keras expects gradients that are reduced before
    it checks them, while they are reduced when the inner optimizer applies them.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def check_finite(optimizer: Any, grads: Any) -> Any:
            finite = original(optimizer, grads)
            context = tf.distribute.get_replica_context()
            if context is None or context.strategy is not strategy:
                return finite
            overflows = context.all_reduce("SUM", tf.cast(tf.logical_not(finite), tf.int32))
            return tf.equal(overflows, 0)

        return check_finite

    return replace_method(keras.optimizers.LossScaleOptimizer, "check_finite", make)


def makes_scale() -> bool:
    """Whether the variable that is being made is state of a LossScaleOptimizer.

    Its steps halve, double or reset that.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.optimizers.LossScaleOptimizer):
            return frame.f_code.co_name in ("build", "add_variable")
        if isinstance(owner, keras.optimizers.Optimizer):
            return False
        frame = frame.f_back
    return False
