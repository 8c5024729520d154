"""The rows of all ranks between nodes: they travel in the messages that compare the call.

Each rank stores its row in its slot. The leader of a node sends those of its ranks, and joins the
rows of all ranks in its own slot, where the others read them. A rank alone on its node stores its
row in the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from collectives.caching import LRU
from collectives.consistency.dissemination import LARGEST_EXCHANGE, Block, padded
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.addresses import NOWHERE, Exchanged
from collectives.shm.layout import ROW_BYTES, SMALL_BYTES

Reader = Callable[[Any, Any, Array], None]
"""A function (index, own rows, target) that joins the rows of all ranks in the contiguous target.

The own rows may overlap with the target.
"""
Head = tuple[int, int, int]
"""Two numbers, and how many bytes of the row travel."""


class _Joining(NamedTuple):
    """How the rows in messages are joined, while they have the same heads."""

    heads: list[tuple[memoryview, int, Head]]
    """Of each rank: the words of its message, the byte where its head begins, and the head."""
    copies: list[tuple[Array, Array]]
    """Targets in the leader's slot, and their sources."""

    def holds(self) -> bool:
        """Whether the messages have these heads now."""
        read = _HEAD.unpack_from
        for words, at, head in self.heads:  # noqa: SIM110 (`all` takes twice the time)
            if read(words, at) != head:
                return False
        return True


_BYTES = np.dtype(np.uint8)
_HEAD = Struct("=3Q")
_NBYTES = 2


def room_of_row(engine: Engine, senders: int) -> int:
    """How many bytes each of so many ranks may send with the check of a call.

    Negative where not even the numbers may travel, or there is one node.
    """
    check = engine.call_check
    if check is None or check.nodes == 1:
        return -1
    fullest = max(map(len, check.members))
    of_node = LARGEST_EXCHANGE // check.nodes - fullest * _HEAD.size
    of_all = ROW_BYTES + SMALL_BYTES - _contents_at(engine.size)
    own = ROW_BYTES + SMALL_BYTES - _HEAD.size
    return min(of_node // min(senders, fullest), of_all // senders, own) // 8 * 8


def _contents_at(size: int) -> int:
    """Where the rows begin behind the heads of all ranks, aligned for every dtype."""
    return -(-size * _HEAD.size // 16) * 16


class ExchangedRows:
    """As `dissemination.Exchange` and `rows.RowsOfAll`."""

    publish = None
    copies = False

    def __init__(
        self,
        engine: Engine,
        most: int,
        first: int = 0,
        second: int = 0,
        nbytes: int = 0,
        row_bytes: int = 1,
    ) -> None:
        """This rank gives two numbers and so many bytes, which don't travel if there are more.

        `row_bytes`: those of one row.
        """
        assert engine.call_check is not None
        self.source: Any = None
        self.target: Any = None
        self._most, self._size, self._check = most, engine.size, engine.call_check
        self._row_bytes = row_bytes
        self._head = first, second, nbytes if nbytes <= most else 0
        self._rank = 0 if engine.node is None else engine.node.steps.rank
        self._lone = len(self._check.slots) == 1
        self._slots = [[slots[parity] for slots in self._check.slots] for parity in range(2)]
        self._words = [[slot.data.cast("Q") for slot in slots] for slots in self._slots]
        self._at = _contents_at(self._size)
        self._joined = [slots[0][self._at :] for slots in self._slots]
        self._joinings: LRU[Any, _Joining] = LRU(64)
        self._parity = 0
        """Of what was stored last."""
        self._heads = b""
        self._found: Exchanged = NOWHERE, (), ()

    @property
    def exchange(self) -> ExchangedRows:
        """Itself."""
        return self

    def row(self) -> tuple[Head, Any]:
        """The head of this rank's row, and its content: the call's source, or else its target."""
        return self._head, self.target if self.source is None else self.source

    def store(self, parity: int) -> None:
        """Into this rank's slot."""
        self._parity = parity
        if not self._lone:
            self._write(self._slots[parity][self._rank], self._words[parity][self._rank], 0)

    def _write(self, content: Array, words: memoryview, at: int) -> int:
        """Store this rank's row from that byte on; how many bytes."""
        head, row = self.row()
        nbytes = head[_NBYTES]
        _HEAD.pack_into(words, at, *head)
        at += _HEAD.size
        if nbytes:
            content[at : at + nbytes] = row.view(_BYTES)
        return _HEAD.size + padded(nbytes)

    def pack(self, block: Block) -> int:
        """The rows of this node's ranks, one behind the other."""
        (buffer, start), parity = block, self._parity
        if self._lone:
            return self._write(buffer.content, buffer.words, start)
        at = start
        for slot, words in zip(self._slots[parity], self._words[parity], strict=True):
            length = _HEAD.size + padded(words[_NBYTES])
            buffer.content[at : at + length] = slot[:length]
            at += length
        return at - start

    def unpack(self, blocks: Sequence[Block]) -> None:
        """Into the leader's slot: the heads of all ranks, and behind them the rows, in rank order.

        The leader's own row has been sent.
        """
        key = self._parity, blocks
        joining = self._joinings.get(key)
        if joining is None or not joining.holds():
            joining = self._joinings.put(key, self._joining_of(blocks))
        for target, source in joining.copies:
            target[...] = source

    def _joining_of(self, blocks: Sequence[Block]) -> _Joining:
        """From the heads that the messages hold now."""
        places: list[Any] = [None] * self._size
        for ranks, (buffer, start) in zip(self._check.members, blocks, strict=True):
            at = start
            for rank in ranks:
                places[rank] = buffer.content, buffer.words, at
                at += _HEAD.size + padded(buffer.words[at // 8 + _NBYTES])
        found = [_HEAD.unpack_from(words, at) for _, words, at in places]
        slot, joined = self._slots[self._parity][0], self._joined[self._parity]
        heads = np.array(found, np.uint64).reshape(-1).view(_BYTES)
        copies, end = [(slot[: heads.size], heads)], 0
        for (content, _, at), (_, _, nbytes) in zip(places, found, strict=True):
            if nbytes:
                at += _HEAD.size
                copies.append((joined[end : end + nbytes], content[at : at + nbytes]))
                end += nbytes
        read_again = [(words, at, head) for (_, words, at), head in zip(places, found, strict=True)]
        return _Joining(read_again, copies)

    def numbers(self, index: Any = None) -> Exchanged:
        """From the slot of the node's leader."""
        heads = self._slots[self._parity][0][: self._size * _HEAD.size].tobytes()
        if heads != self._heads:
            self._heads = heads
            firsts, seconds, _ = zip(*_HEAD.iter_unpack(heads), strict=True)
            self._found = NOWHERE, firsts, seconds
        return self._found

    def joined(self) -> Array:
        """The rows of all ranks that travelled with this call, one behind the other."""
        return self._joined[self._parity]

    def reader(self, counts: Sequence[int]) -> Reader | None:
        """From the slot of the node's leader."""
        if max(counts) * self._row_bytes > self._most:
            return None
        total = sum(counts) * self._row_bytes

        def read(index: Any, own: Any, target: Array) -> None:
            target.reshape(-1).view(_BYTES)[...] = self.joined()[:total]

        return read
