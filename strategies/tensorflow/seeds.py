"""Random seeds: equal on all ranks outside of `run`, so that datasets are shuffled alike.

Inside of `run` the operations of each replica have seeds of their own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tensorflow as tf
from tensorflow.python.eager import context

from collectives import Communicator

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
