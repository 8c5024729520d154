"""Two numbers and rows of each rank; few bytes travel with the check of a call.

Ranks need not know the numbers of the others, nor how many rows they send.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from collectives.bound.exchanged_rows import ExchangedRows, Reader, room_of_row
from collectives.bound.small import node_of_all, room_of_each
from collectives.calls.objects import numbers_of_all
from collectives.consistency.dissemination import Exchange
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm import migratory
from collectives.shm.addresses import FIRST_NUMBER, NOWHERE, Exchanged, Publish
from collectives.shm.layout import ARRIVALS, DATA, ROW_BYTES
from collectives.shm.node import Node
from collectives.transports.parts import others


class RowsOfAll(Protocol):
    """The rows of all ranks in a bound call; `publish` and `exchange` are for `bound.bind`."""

    @property
    def publish(self) -> Publish | None:
        """What stores this rank's row, where all ranks share memory."""

    @property
    def exchange(self) -> Exchange | None:
        """What carries it between nodes."""

    @property
    def copies(self) -> bool:
        """Whether `publish` copies the source, which may have any strides then."""

    def numbers(self, index: Any) -> Exchanged:
        """Every rank's first and second number.

        In the node's memory the same object while they stay the same. And the addresses of their
        buffers, where those are exchanged.
        """

    def reader(self, counts: Sequence[int]) -> Reader | None:
        """What joins so many rows of each rank; None where they did not travel with the check."""


def rows_of_all(
    engine: Engine,
    count: int,
    room: int,
    rest: tuple[int, ...],
    dtype: np.dtype[Any],
    *,
    travel: bool = True,
) -> RowsOfAll:
    """This rank gives these two numbers, and so many rows, each of shape `rest`: the source.

    Unless they may `travel` with the check of the call, the numbers follow it.
    """
    if not travel:
        return _MessageRows(engine, count, room)
    node, row_bytes = node_of_all(engine), math.prod(rest) * dtype.itemsize
    if node is not None:
        return _NodeRows(node, count, room, rest, dtype)
    return rows_between_nodes(engine, count, room, count * row_bytes, row_bytes)


def rows_between_nodes(
    engine: Engine, first: int, second: int, nbytes: int, row_bytes: int = 1
) -> RowsOfAll:
    """As `rows_of_all`, where the ranks don't share one node's memory: any two numbers."""
    most = room_of_row(engine, engine.size)
    if most < 0:
        return _MessageRows(engine, first, second)
    return ExchangedRows(engine, most, first, second, nbytes, row_bytes)


class _NodeRows:
    """All ranks share memory: each stores its rows beside its arrival, if they have few bytes."""

    exchange = None

    def __init__(
        self,
        node: Node,
        count: int,
        room: int,
        rest: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        memory, addresses = node.steps.memory, node.addresses
        row_bytes, self._rank = math.prod(rest) * dtype.itemsize, memory.rank
        self._most = room_of_each(node) // row_bytes if row_bytes else _most_empty(rest, dtype)
        self._words, self._read = memory.words, addresses.read
        self._slots = {
            at + DATA: [
                _rows_in(slots[parity][ROW_BYTES:], rest, dtype, self._most)
                for slots in memory.slots
            ]
            for parity, at in enumerate(ARRIVALS)
        }
        self._heads: list[tuple[int, int]] = []
        self._found: Exchanged | None = None
        store_numbers = addresses.numbers_publisher(count, room)
        self.copies = count <= self._most
        places = {index: slots[memory.rank][:count] for index, slots in self._slots.items()}

        def store_rows(index: int, source: Array | None, target: Array | None) -> None:
            store_numbers(index, source, target)
            places[index][...] = source

        self.publish: Publish = store_rows if count * row_bytes > 0 else store_numbers
        self.numbers = self._few_or_read
        if not self.copies:
            self.numbers = addresses.read
            self.publish = addresses.publisher(count, room)

    def _few_or_read(self, index: Any) -> Exchanged:
        """From the words beside the arrivals; the addresses too where any rank has many bytes."""
        first, second = index + FIRST_NUMBER, index + FIRST_NUMBER + 1
        heads = [(words[first], words[second]) for words in self._words]
        if heads != self._heads:
            self._heads = heads
            counts, rooms = zip(*heads, strict=True)
            self._found = (NOWHERE, counts, rooms) if max(counts) <= self._most else None
        return self._read(index) if self._found is None else self._found

    def reader(self, counts: Sequence[int]) -> Reader | None:
        """From the slots."""
        if max(counts) > self._most:
            return None
        ends = list(accumulate(counts))
        places = list(map(slice, [0, *ends], ends))
        own_place, peers = places[self._rank], list(others(self._rank, len(places)))
        reads = {
            index: [(places[peer], slots[peer][: counts[peer]]) for peer in peers]
            for index, slots in self._slots.items()
        }
        take = migratory.taker(
            len(places), {index: content for index, read in reads.items() for _, content in read}
        )

        def read(index: Any, own: Any, target: Array) -> None:
            # Not from the own slot, whose lines others take; first, since it may overlap.
            target[own_place] = own
            for place, content in reads[index]:
                target[place] = content
            if take is not None:
                take(index)

        return read


def _most_empty(rest: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """The most rows of no bytes that an array may have: NumPy counts its other lengths."""
    return sys.maxsize // max(1, math.prod(filter(None, rest)) * dtype.itemsize)


def _rows_in(memory: Array, rest: tuple[int, ...], dtype: np.dtype[Any], most: int) -> Array:
    """So many rows at the beginning of the memory."""
    rows: Array = memory[: most * math.prod(rest) * dtype.itemsize].view(dtype)
    return rows.reshape(most, *rest)


class _MessageRows:
    """The numbers are gathered once all ranks have made the call."""

    publish = exchange = None
    copies = False

    def __init__(self, engine: Engine, first: int, second: int) -> None:
        self._engine, self._own = engine, (first, second)

    def numbers(self, index: Any) -> Exchanged:
        """By an all-gather."""
        firsts, seconds = zip(*numbers_of_all(self._engine, *self._own), strict=True)
        return NOWHERE, firsts, seconds

    def reader(self, counts: Sequence[int]) -> None:
        """No row travels with the check."""
