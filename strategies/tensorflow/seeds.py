"""Random seeds: equal on all ranks outside of `run`, so that datasets are shuffled alike.

Inside of `run` the operations of each replica have seeds of their own.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from collectives import Communicator
from strategies.tensorflow.files import chain

log = logging.getLogger("strategies")

_STRIDE = 1_000_003


def agree_on_seed(communicator: Communicator) -> None:
    """Set TensorFlow's global seed to the first rank's, random where a program set none.

    Collective. A seed that the program has set on every rank stays.
    """
    if communicator.size == 1:
        return
    own = context.global_seed()
    seeds = communicator.all_gather_object(own)
    if None in seeds:
        seed = own if own is not None else random.SystemRandom().randrange(1 << 31)
        tf.random.set_seed(communicator.broadcast_object(seed))


def orders_of(datasets: Sequence[Any]) -> list[tuple[int, int]]:
    """The seeds of what determines the order of their elements."""
    steps = [step for dataset in datasets for step in chain(dataset)]
    # It draws from which of several datasets an element comes; else random numbers are data.
    draws = any("DirectedInterleave" in type(step).__name__ for step in steps)
    kinds = ("Shuffle", "Random") if draws else ("Shuffle",)
    seeded = [
        step
        for step in steps
        if hasattr(step, "_seed2") and any(kind in type(step).__name__ for kind in kinds)
    ]
    return [(int(step._seed), int(step._seed2)) for step in seeded]


def warn_of_orders(orders: Sequence[list[tuple[int, int]]]) -> None:
    """Log a warning where the ranks' datasets have different seeds, or none."""
    if any(each != orders[0] for each in orders):
        reason = (
            "the ranks' datasets shuffle by different seeds: give shuffle a seed, or set equal"
            " seeds by tf.random.set_seed, and let no rank draw random numbers of TensorFlow alone"
            " before the dataset is made"
        )
    elif (0, 0) in orders[0]:
        reason = "the dataset shuffles without a seed: make it after the strategy, or give a seed"
    else:
        return
    log.warning("%s. Some rows are lost and others repeated: each rank keeps its part", reason)


@contextmanager
def replica_seeds(rank: int) -> Iterator[None]:
    """A context in which the random operations of this rank differ from those of rank 0.

    TensorFlow's and Keras's.
    """
    with _operation_seeds(rank), ExitStack() as restored:
        if "keras" in sys.modules:
            from strategies.keras import seeds

            restored.enter_context(seeds.replica_seeds(rank))
        yield


@contextmanager
def _operation_seeds(rank: int) -> Iterator[None]:
    eager = tf.executing_eagerly()
    owner = context.context() if eager else tf.compat.v1.get_default_graph()
    name = "_seed" if eager else "seed"
    seed = getattr(owner, name)
    if seed is None or rank == 0:
        yield
        return
    setattr(owner, name, seed + rank * _STRIDE)
    try:
        yield
    finally:
        setattr(owner, name, seed)
