"""Random numbers of Keras's layers: each replica's own in steps of training, as dropout's masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from strategies.foreign.methods import wrap_method

_STRIDE = 1_000_003
"""Between the seeds of two replicas: more than the numbers that Keras's global generator draws."""


@contextmanager
def replica_seeds(rank: int) -> Iterator[None]:
    """A context in which this thread's draws from a SeedGenerator differ from those of rank 0.

    The generators' states don't depend on it.
    """
    if rank == 0:
        yield
        return
    thread = threading.get_ident()

    def next(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
        drawn = original(generator, *args, **kwargs)
        if threading.get_ident() != thread:
            return drawn
        shift = [rank * _STRIDE, 0]
        return drawn + generator.backend.convert_to_tensor(shift, generator.state.dtype)

    undo = wrap_method(keras.random.SeedGenerator, "next", next)
    try:
        yield
    finally:
        undo()
