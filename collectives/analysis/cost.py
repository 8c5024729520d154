"""Cost of a schedule: messages and bytes of every rank, and seconds on a given link.

The model: sending or receiving a message of n bytes takes `latency + n / bandwidth` seconds, a rank
sends and receives at the same time but one message each, and folding n bytes takes `n / reduction`.
A rank starts a round as soon as it has finished the one before, so that chains of ranks overlap
(one-ported full duplex; Chan et al. 2007, doi:10.1002/cpe.1206).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.analysis.traffic import Ends, Indices, Messages, messages
from collectives.schedules.schedule import split_lengths


@dataclass(frozen=True)
class Link:
    """A connection between two ranks.

    Seconds per message, bytes per second sent, and bytes per second folded.
    """

    latency: float
    bandwidth: float
    reduction: float


@dataclass(frozen=True)
class Traffic:
    """Number of messages and of bytes that each rank sends in a collective, by rank."""

    messages: Indices
    nbytes: Indices


def _run_nbytes(ends: Ends, chunk_nbytes: Indices) -> Indices:
    """The bytes of each cyclic run of chunks."""
    offsets = np.concatenate([[0], np.cumsum(np.tile(chunk_nbytes, 2))])
    return np.asarray(offsets[ends.chunk + ends.count] - offsets[ends.chunk])


def _rounds(algorithm: Algorithm, size: int) -> Iterator[Messages]:
    chunks = algorithm.chunks(size)
    for number, steps in enumerate(algorithm.schedule(np.arange(size), size)):
        yield messages(steps, size, chunks, number)


def _find(collective: str, algorithm: str, size: int, nbytes: int) -> Algorithm:
    if size < 1:
        raise ValueError(f"size={size}: must be at least 1")
    if nbytes < 0:
        raise ValueError(f"nbytes={nbytes}: must not be negative")
    return algorithms.find(collective, algorithm)


def _chunk_nbytes(algorithm: Algorithm, size: int, nbytes: int) -> Indices:
    """`nbytes` cut into the algorithm's chunks (for all_to_all, once for each direction)."""
    chunks = algorithm.chunks(size)
    if algorithm.collective == "all_to_all":
        return np.tile(split_lengths(nbytes, size), 2)
    return split_lengths(nbytes, chunks)


def traffic(collective: str, algorithm: str, size: int, nbytes: int) -> Traffic:
    """Count the messages and bytes that each of `size` ranks sends.

    `nbytes` is the size of the whole buffer in bytes: the result of all_gather and gather, the
    input of one rank of all_to_all and scatter. Raises ValueError for unknown names, a size below 1
    or negative bytes.
    """
    found = _find(collective, algorithm, size, nbytes)
    chunk_nbytes = _chunk_nbytes(found, size, nbytes)
    count, total = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for each in _rounds(found, size):
        np.add.at(count, each.sent.rank, 1)
        np.add.at(total, each.sent.rank, _run_nbytes(each.sent, chunk_nbytes))
    return Traffic(count, total)


def _advance(clock: NDArray[np.float64], each: Messages, chunk_nbytes: Indices, link: Link) -> None:
    """Advance every rank's clock to the end of the round."""
    nbytes = _run_nbytes(each.sent, chunk_nbytes)
    seconds = link.latency + nbytes / link.bandwidth
    sending, receiving = clock.copy(), clock.copy()
    np.maximum.at(receiving, each.received.rank, clock[each.received.peer])
    np.add.at(sending, each.sent.rank, seconds)
    np.add.at(receiving, each.received.rank, seconds)
    np.maximum(sending, receiving, out=clock)
    np.add.at(clock, each.received.rank, each.reduces * nbytes / link.reduction)


def estimate(collective: str, algorithm: str, size: int, nbytes: int, link: Link) -> float:
    """Seconds that the slowest of `size` ranks needs over `link`.

    Arguments and errors are those of `traffic`.
    """
    found = _find(collective, algorithm, size, nbytes)
    chunk_nbytes = _chunk_nbytes(found, size, nbytes)
    clock = np.zeros(size)
    for each in _rounds(found, size):
        _advance(clock, each, chunk_nbytes, link)
    return float(clock.max())
