"""Two numbers and a row of bytes of each rank; few bytes travel with the check of a call.

Ranks need not know the numbers of the others, nor how many bytes they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from collectives.calls.bound_small import DATA, SMALL_BYTES_OF_ALL, node_of_all
from collectives.calls.exchanged_rows import ExchangedRows, Reader, room_of_row
from collectives.calls.objects import numbers_of_all
from collectives.consistency.dissemination import Exchange
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm import migratory
from collectives.shm.addresses import NOWHERE, Exchanged, Publish
from collectives.shm.copy_in_copy_out import others
from collectives.shm.layout import ARRIVALS, ROW_BYTES, SMALL_BYTES
from collectives.shm.node import Node
from collectives.shm.selector import LEAST_BYTES

_BYTES = np.dtype(np.uint8)


class RowsOfAll(Protocol):
    """The rows of all ranks in a bound call; `publish` and `exchange` are for `bound.bind`."""

    @property
    def publish(self) -> Publish | None:
        """What stores this rank's row, where all ranks share memory."""

    @property
    def exchange(self) -> Exchange | None:
        """What carries it between nodes."""

    def numbers(self, index: Any) -> Exchanged:
        """Every rank's first and second number, the same object while they stay the same.

        And the addresses of their buffers, where those are exchanged.
        """

    def reader(self, lengths: Sequence[int]) -> Reader | None:
        """What joins rows of so many bytes; None where they did not travel with the check."""


def rows_of_all(
    engine: Engine, first: int, second: int, nbytes: int, *, addressed: bool = False
) -> RowsOfAll:
    """This rank gives these numbers, and the `nbytes` bytes of the call's source.

    `addressed`: of more bytes than few the ranks of a node need the addresses.
    """
    node = node_of_all(engine)
    if node is not None:
        return _NodeRows(node, first, second, nbytes, addressed=addressed)
    most = room_of_row(engine, engine.size)
    if most < 0:
        return _MessageRows(engine, first, second)
    return ExchangedRows(engine, most, first, second, nbytes)


def room_on_node(node: Node) -> int:
    """How many bytes each rank of a node may store beside its arrival."""
    # Registered arrays of more bytes are read where they are.
    most = LEAST_BYTES - 1 if node.pool.in_use else SMALL_BYTES
    return min(most, SMALL_BYTES_OF_ALL // node.steps.memory.size)


class _NodeRows:
    """All ranks share memory: each stores its row beside its arrival, if it has few bytes."""

    exchange = None

    def __init__(
        self, node: Node, first: int, second: int, nbytes: int, *, addressed: bool
    ) -> None:
        memory, addresses = node.steps.memory, node.addresses
        self._most, self._rank = room_on_node(node), memory.rank
        self._slots = {
            at + DATA: [slots[parity][ROW_BYTES:] for slots in memory.slots]
            for parity, at in enumerate(ARRIVALS)
        }
        self.numbers = addresses.read
        store_numbers = addresses.numbers_publisher(first, second)
        places = {index: slots[memory.rank][:nbytes] for index, slots in self._slots.items()}

        def store_row(index: int, source: Array | None, target: Array | None) -> None:
            assert source is not None
            store_numbers(index, source, target)
            places[index][...] = source.view(_BYTES)

        self.publish: Publish = store_row if 0 < nbytes <= self._most else store_numbers
        if nbytes > self._most and addressed:
            self.publish = addresses.publisher(first, second)

    def reader(self, lengths: Sequence[int]) -> Reader | None:
        """From the slots."""
        if max(lengths) > self._most:
            return None
        ends = list(accumulate(lengths))
        places = list(map(slice, [0, *ends], ends))
        own_place, peers = places[self._rank], list(others(self._rank, len(places)))
        reads = {
            index: [(places[peer], slots[peer][: lengths[peer]]) for peer in peers]
            for index, slots in self._slots.items()
        }
        take = migratory.taker(
            len(places), {index: content for index, read in reads.items() for _, content in read}
        )

        def read(index: Any, own: Array, target: Array) -> None:
            target[own_place] = own
            for place, content in reads[index]:
                target[place] = content
            if take is not None:
                take(index)

        return read


class _MessageRows:
    """The numbers are gathered once all ranks have made the call."""

    publish = exchange = None

    def __init__(self, engine: Engine, first: int, second: int) -> None:
        self._engine, self._own = engine, (first, second)

    def numbers(self, index: Any) -> Exchanged:
        """By an all-gather."""
        firsts, seconds = zip(*numbers_of_all(self._engine, *self._own), strict=True)
        return NOWHERE, firsts, seconds

    def reader(self, lengths: Sequence[int]) -> None:
        """No row travels with the check."""
