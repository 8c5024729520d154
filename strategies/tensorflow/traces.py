"""A `tf.function` is traced for each strategy that calls it.

Its trace contains the collectives of the strategy in which it was called first. TensorFlow looks
traces up by a context that does not name the strategy, so another one would execute them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import function_context


def _by_strategy(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def make_function_context(scope_type: Any = None) -> Any:
        context = plain(scope_type)
        # Weak references are equal while what they refer to lives and is the same.
        current = weakref.ref(tf.distribute.get_strategy())
        return context._replace(scope_type=(context.scope_type, current))

    return make_function_context


@cache
def install() -> None:
    """Wrap TensorFlow's function that makes such contexts, once."""
    function_context.make_function_context = _by_strategy(function_context.make_function_context)
