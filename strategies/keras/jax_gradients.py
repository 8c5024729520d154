"""The mean of JAX gradients over the ranks, inside of compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.jax.host_calls import HostFunction, host_call
from collectives.jax.program_order import keep_order
from strategies.keras.training import Positions, Training


def reduce_gradients(
    training: Training, number: int, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The mean of an optimizer's gradients, in one call. Collective when it runs.

    Calls of one program run in the order of the trace: each depends on the one before. None stays
    None: it stands for a variable without influence, on all ranks that trace the same program.
    """
    positions = tuple(index for index, each in enumerate(gradients) if each is not None)
    present = [gradients[index] for index in positions]
    if not present:
        return list(gradients)
    keep_order(training.communicator)
    weight = jnp.asarray(training.weight, jnp.float32)
    inputs = [weight, *present, *_order(training)]
    results = host_call(_mean_function(training, number, positions), inputs, present)
    training.last_reduction = results[0]
    reduced = iter(results)
    return [None if each is None else next(reduced) for each in gradients]


def finish(results: Any) -> None:
    """Raise the error of the program that computes them, before a call that others don't make."""
    jax.block_until_ready(results)


def outside_of_programs() -> AbstractContextManager[Any]:
    """A context in which a traced function computes numbers instead of parts of its program."""
    context: AbstractContextManager[Any] = jax.ensure_compile_time_eval()
    return context


def _order(training: Training) -> list[Any]:
    """An array of the program's last reduction, if this one is in the same program."""
    last = training.last_reduction
    # In a program, this is an array of it; arrays outside of programs have no trace.
    current = jnp.zeros(())
    if last is None or getattr(last, "_trace", None) is not getattr(current, "_trace", None):
        return []
    return [jnp.ravel(last)[:1]]


def _mean_function(training: Training, number: int, positions: Positions) -> HostFunction:
    key = number, positions
    if key not in training.host_functions:

        def mean(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            # A further input only determines the order.
            weight, given = inputs[0], inputs[1 : 1 + len(outputs)]
            factor, _ = training.exchange(number, float(weight))
            if factor == 1:
                training.mean_into(given, outputs, number, positions)
                return
            for source, target in zip(given, outputs, strict=True):
                if factor == 0:
                    target[...] = 0  # a product with 0 would keep NaN
                else:
                    np.multiply(source, source.dtype.type(factor), out=target)
            training.mean_into(outputs, outputs, number, positions)

        training.host_functions[key] = mean
    function: HostFunction = training.host_functions[key]
    return function
