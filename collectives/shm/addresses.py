"""Addresses of the buffers of a call, exchanged between the ranks of a node.

RDMA libraries register memory for it, and UCX sends a remote key: before a rank reads or writes the
buffers of another one, it must have their addresses. Each rank publishes those of its own, together
with two numbers of the collective and the time that its last call took, which all ranks need for
choosing the same data path (`online_tuning`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from itertools import repeat
from operator import eq, itemgetter
from struct import Struct
from typing import Any

from collectives.reductions.reduction import Array
from collectives.shm.online_tuning import OnlineTuning
from collectives.shm.pool import Pool
from collectives.shm.progress import ProgressCounters
from collectives.transports.parts import Lengths

_char_at: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
_address_of_char = ctypes.addressof

_Row = tuple[int, ...]

_LAYOUT = Struct("=7Q")
FIRST_NUMBER = 4
"""The word of a row that holds the first number of the collective."""

# A row as it is published: source and target in the pool, their addresses, two numbers, the time.
_without_time: Callable[[_Row], _Row] = itemgetter(slice(6))
_time: Callable[[_Row], int] = itemgetter(6)


def address_of(array: Array) -> int:
    """Address of a contiguous array."""
    try:
        # Three times as fast as NumPy's own interface.
        return _address_of_char(_char_at(array))
    except (BufferError, TypeError, ValueError):
        # It is read-only or empty, or the buffer protocol does not support its dtype.
        address: int = array.__array_interface__["data"][0]
        return address


class Addresses:
    """Addresses of every rank's input and output, in rank order."""

    def __init__(
        self,
        sources: _Row = (),
        targets: _Row = (),
        source_addresses: _Row = (),
        target_addresses: _Row = (),
    ) -> None:
        """`sources` and `targets` are locations in the pool, 0 of buffers that lie elsewhere.

        The addresses are those in the rank's own memory.
        """
        self.sources, self.targets = sources, targets
        self.source_addresses, self.target_addresses = source_addresses, target_addresses
        self.registered = any(sources) or any(targets)
        """Whether any buffer lies in the pool."""
        self.in_place = any(map(eq, source_addresses, target_addresses))
        """Whether any rank's output overwrites its input, or a rank has published neither."""

    def offset_of_part(self, rank: int, start: int) -> int:
        """Offset in bytes of a rank's part, from byte `start` of the result on, in its source.

        A rank that gives its part in place has published the whole target as its source.
        """
        return start if self.source_addresses[rank] == self.target_addresses[rank] else 0


NOWHERE = Addresses()
"""For copy-in/copy-out, which needs no addresses."""

DataPath = Callable[[Addresses, Array | None, Array, Lengths, int], None]
"""A collective between the ranks of a node: (addresses, source, target, lengths, root)."""

Publish = Callable[[int, Array | None, Array | None], None]

Exchanged = tuple[Addresses, _Row, _Row]
"""The addresses, and every rank's first and second number."""


class AddressExchange:
    """Publishes this rank's addresses and reads those of the others."""

    def __init__(self, steps: ProgressCounters, pool: Pool, *, oversubscribed: bool) -> None:
        """`oversubscribed`: there are more ranks than cores, so that every wait is expensive."""
        self._steps, self._pool, self._oversubscribed = steps, pool, oversubscribed
        self._own, self._words = steps.memory.own, steps.memory.words
        self.tuning = OnlineTuning()
        # Of the last call, which a program often repeats with the same buffers.
        self._rows: list[_Row] = []
        self._found: Exchanged = NOWHERE, (), ()
        self._warm = False

    @property
    def worthwhile(self) -> bool:
        """Whether the gain of a better path than copy-in/copy-out outweighs a wait."""
        return self._pool.in_use or not self._oversubscribed

    def warm_up(self) -> None:
        """Touch the pages of all stages, once, so that no measurement of a path includes it."""
        if not self._warm:
            self._warm = True
            self._steps.memory.touch_stages()

    def publisher(self, first: int, second: int = 0) -> Publish:
        """A function (index, source, target) that publishes a row with two numbers.

        The collective defines what they mean: in a reduction `first` is the number of bytes.

        It stores the row at word `index` of this rank's segment; the call check makes it visible.
        Where source is None the input lies in the target. Where target is None it is allocated
        once the numbers of all ranks are known.
        """
        store, own, row = _LAYOUT.pack_into, self._own, self._row

        def publish(index: int, source: Array | None, target: Array | None) -> None:
            # Not by `self.store`, as every bound call of large arrays publishes.
            store(own, 8 * index, *row(source, target, first, second))

        return publish

    def store(
        self, index: int, source: Array | None, target: Array | None, first: int, second: int
    ) -> None:
        """Store a row, as the function of `publisher` does, with numbers of this call."""
        _LAYOUT.pack_into(self._own, 8 * index, *self._row(source, target, first, second))

    def numbers_publisher(self, first: int, second: int) -> Publish:
        """As `publisher`, of a row without addresses, which are 0."""
        store, own, tuning = _LAYOUT.pack_into, self._own, self.tuning

        def publish(index: int, source: Array | None, target: Array | None) -> None:
            store(own, 8 * index, 0, 0, 0, 0, first, second, tuning.nanoseconds)

        return publish

    def read(self, index: int) -> Exchanged:
        """Every rank's row, once all have published theirs."""
        return self._find(map(_LAYOUT.unpack_from, self._words, repeat(8 * index)))

    def exchange(self, source: Array | None, target: Array, nbytes: int) -> Exchanged:
        """Publish and read, in the middle of a call: a step of the progress counters."""
        row = self._row(source, target, nbytes, 0)
        return self._find(map(tuple, self._steps.exchange_numbers(*row)))

    def _row(
        self, source: Array | None, target: Array | None, first: int, second: int
    ) -> tuple[int, int, int, int, int, int, int]:
        locate = self._pool.locate if self._pool.in_use else None
        written = place = 0
        if target is not None:
            written = address_of(target)
            place = locate(written, target.nbytes) if locate else 0
        read, read_place = written, place
        if source is not None:
            read = address_of(source)
            read_place = locate(read, source.nbytes) if locate else 0
        return read_place, place, read, written, first, second, self.tuning.nanoseconds

    def _find(self, given: Iterable[_Row]) -> Exchanged:
        rows = list(given)
        if self.tuning.last is not None:
            self.tuning.learn(max(map(_time, rows)))
        rows = list(map(_without_time, rows))
        if rows != self._rows:
            self._rows = rows
            *addresses, first, second = zip(*rows, strict=True)
            self._found = Addresses(*addresses), first, second
        return self._found
