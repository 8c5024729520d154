"""The mean of JAX gradients over the ranks, inside of compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from collectives.jax.host_calls import HostFunction, host_call
from strategies.keras.training import Training


def reduce_gradients(
    training: Training, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The mean of the gradients, in one call. Collective when it runs.

    None stays None: it stands for a variable without influence, on all ranks that trace the same
    program.
    """
    present = [each for each in gradients if each is not None]
    if not present:
        return list(gradients)
    weight = jnp.asarray(training.weight, jnp.float32)
    reduced = iter(host_call(_mean_function(training), [weight, *present], present))
    return [None if each is None else next(reduced) for each in gradients]


def _mean_function(training: Training) -> HostFunction:
    if training.host_function is None:

        def mean(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            weight, *given = inputs
            factor, _ = training.exchange(float(weight))
            if factor == 1:
                training.mean_into(given, outputs)
                return
            for source, target in zip(given, outputs, strict=True):
                if factor == 0:
                    target[...] = 0  # a product with 0 would keep NaN
                else:
                    np.multiply(source, source.dtype.type(factor), out=target)
            training.mean_into(outputs, outputs)

        training.host_function = mean
    function: HostFunction = training.host_function
    return function
