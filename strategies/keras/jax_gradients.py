"""The mean of JAX gradients over the ranks, inside of compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collectives.jax.host_calls import HostFunction
from collectives.jax.kinds import Call
from collectives.jax.primitive import bind
from strategies.keras.training import Positions, Training


def reduce_gradients(
    training: Training, number: int, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[Any]:
    """The mean of an optimizer's gradients, in one call. Collective when it runs.

    It comes in the order of the program, also among its own calls of `collectives.jax`. None stays
    None: it stands for a variable without influence, on all ranks that trace the same program.
    """
    positions = tuple(index for index, each in enumerate(gradients) if each is not None)
    present = [gradients[index] for index in positions]
    if not present:
        return list(gradients)
    by = _mean_function(training, number, positions, training.weight)
    call = Call("all_reduce", training.communicator, "mean", by=by)
    reduced = iter(bind(list(map(jnp.asarray, present)), call))
    return [None if each is None else next(reduced) for each in gradients]


def maxima(training: Training, arrays: Sequence[Any]) -> list[Any]:
    """The maxima over the ranks, element by element. Collective when it runs."""
    call = Call("all_reduce", training.communicator, "max")
    return list(bind(list(map(jnp.asarray, arrays)), call))


def finish(results: Any) -> None:
    """Raise the error of the program that computes them, before a call that others don't make."""
    jax.block_until_ready(results)


def outside_of_programs() -> AbstractContextManager[Any]:
    """A context in which a traced function computes numbers instead of parts of its program."""
    context: AbstractContextManager[Any] = jax.ensure_compile_time_eval()
    return context


def _mean_function(
    training: Training, number: int, positions: Positions, weight: float
) -> HostFunction:
    key = number, positions, weight
    if key not in training.host_functions:

        def mean(given: Sequence[Any], outputs: Sequence[Any]) -> None:
            factor, _ = training.exchange(number, weight)
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
