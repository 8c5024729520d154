"""Cost of a schedule: messages and bytes of every rank, and seconds on a given link.

The model: sending or receiving a message of n bytes takes `latency + n / bandwidth` seconds, a rank
sends and receives at the same time but one message each, and folding n bytes takes `n / reduction`.
A rank starts a round as soon as it has finished the one before, so that chains of ranks overlap
(one-ported full duplex; Chan et al. 2007, doi:10.1002/cpe.1206).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from collectives import algorithms
from collectives.analysis.traffic import Indices, Messages, messages
from collectives.errors import check_integer
from collectives.schedules.schedule import Round, split_lengths
from collectives.schedules.spec import spec_of


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Seconds per message, bytes per second sent, and bytes per second folded.
    """

    latency: float
    bandwidth: float
    reduction: float


def sized_rounds(
    collective: str, algorithm: str, size: int, nbytes: int
) -> Iterator[tuple[Messages, Indices]]:
    """The messages of each round between all ranks, and their bytes."""
    size, nbytes = check_integer("size", size, 1), check_integer("nbytes", nbytes, 0)
    found = algorithms.find(collective, algorithm)
    chunks = found.chunks(size)
    buffers = spec_of(collective).buffers
    lengths = np.tile(split_lengths(nbytes, chunks // buffers), buffers)
    # Twice, because a run of chunks is cyclic.
    offsets = np.concatenate([[0], np.cumsum(np.tile(lengths, 2))])

    def sized(number: int, steps: Round) -> tuple[Messages, Indices]:
        each = messages(steps, size, chunks, number)
        first = each.sent.chunk
        return each, offsets[first + each.sent.count] - offsets[first]

    return itertools.starmap(sized, enumerate(found.schedule(np.arange(size), size)))


def estimate(collective: str, algorithm: str, size: int, nbytes: int, link: Link) -> float:
    """Seconds that the slowest of `size` ranks needs over `link`.

    `nbytes` is the size of the whole buffer in bytes: the result of all_gather and gather, the
    input of one rank of all_to_all and scatter. Raises ValueError for unknown names, a size below 1
    or negative bytes, TypeError for numbers that are no integers.
    """
    rounds = sized_rounds(collective, algorithm, size, nbytes)
    clock = np.zeros(size)
    for each, lengths in rounds:
        seconds = link.latency + lengths / link.bandwidth
        sending, receiving = clock.copy(), clock.copy()
        np.maximum.at(receiving, each.received.rank, clock[each.received.peer])
        np.add.at(sending, each.sent.rank, seconds)
        np.add.at(receiving, each.received.rank, seconds)
        np.maximum(sending, receiving, out=clock)
        np.add.at(clock, each.received.rank, each.reduces * lengths / link.reduction)
    return float(clock.max())
