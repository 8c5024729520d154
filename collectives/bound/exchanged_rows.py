"""The rows of all ranks between nodes: they travel in the messages that compare the call.

Each rank stores its row in its slot. The leader of a node sends those of its ranks, and joins the
rows of all ranks in its own slot, where the others read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np

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

_BYTES = np.dtype(np.uint8)
_HEAD = Struct("=3Q")
_HEAD_WORDS = 3
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
        self._slots = [[slots[parity] for slots in self._check.slots] for parity in range(2)]
        self._words = [[slot.data.cast("Q") for slot in slots] for slots in self._slots]
        self._at = _contents_at(self._size)
        self._joined = [slots[0][self._at :] for slots in self._slots]
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
        head, content = self.row()
        nbytes = head[_NBYTES]
        _HEAD.pack_into(self._words[parity][self._rank], 0, *head)
        if nbytes:
            slot = self._slots[parity][self._rank]
            slot[_HEAD.size : _HEAD.size + nbytes] = content.view(_BYTES)

    def pack(self, block: Block) -> int:
        """The rows of this node's ranks, one behind the other."""
        (buffer, start), parity = block, self._parity
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
        places: list[tuple[Array, memoryview, int]] = [None] * self._size  # type: ignore[list-item]
        for ranks, (buffer, start) in zip(self._check.members, blocks, strict=True):
            at = start
            for rank in ranks:
                places[rank] = buffer.content, buffer.words, at
                at += _HEAD.size + padded(buffer.words[at // 8 + _NBYTES])
        heads, joined, end = self._words[self._parity][0], self._joined[self._parity], 0
        for rank, (content, words, at) in enumerate(places):
            word, first = at // 8, rank * _HEAD_WORDS
            heads[first : first + _HEAD_WORDS] = words[word : word + _HEAD_WORDS]
            nbytes = words[word + _NBYTES]
            if nbytes:
                at += _HEAD.size
                joined[end : end + nbytes] = content[at : at + nbytes]
                end += nbytes

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
