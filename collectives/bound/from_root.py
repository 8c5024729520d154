"""Bound calls in which the root sends what the others don't know, and broadcast_object.

The root's pickle travels with the check of the call, and few bytes of an array behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.bound.bind import Call, bind
from collectives.bound.calls import as_it_is, bound_operation
from collectives.bound.exchanged_rows import ExchangedRows, Head, room_of_row
from collectives.bound.small import node_of_all
from collectives.calls import Operation
from collectives.calls.objects import outcome_of, result_of
from collectives.consistency.signature import Signature
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array
from collectives.shm.addresses import FIRST_NUMBER
from collectives.shm.layout import ARRIVALS, DATA, ROW_BYTES, SMALL_BYTES
from collectives.shm.node import Node

_BYTES = np.dtype(np.uint8)


class Sent(NamedTuple):
    """What the root sends."""

    pickled: bytes
    nbytes: int = 0
    """How many bytes of the array the other ranks get."""
    array: Array | None = None
    """The array, flat, unless it lies on a GPU."""
    pieces: Sequence[Array] = ()
    """What the other ranks get of it, in their order."""

    def within(self, most: int) -> Array:
        """What travels of it: the pieces, and the pickle behind; the pickle alone; or nothing."""
        if len(self.pickled) > most:
            return np.empty(0, _BYTES)
        content = np.frombuffer(self.pickled, _BYTES)
        if self.array is None or len(content) + self.nbytes > most:
            return content
        return np.concatenate([*(piece.view(_BYTES) for piece in self.pieces), content])


_NOTHING = Sent(b"")

Receive = Callable[[Any, Array | None, Any, Any], Any]


def bind_from_root(
    engine: Engine,
    signature: Signature,
    root: int,
    receive: Receive,
    read: Callable[[Engine, Array], Any] = result_of,
) -> Call:
    """The function (sent, source) of a `Sent`, None on other ranks than the root.

    receive(result, data, source, index) ends the call: `result` was pickled on the root, `data` are
    the bytes of its pieces, None where they did not travel with the check. `index` is that of the
    rows of addresses, as for `bound.bind`. `read` returns what was pickled, and raises it if it is
    an exception, as all ranks do.
    """
    node, most = node_of_all(engine), room_of_row(engine, 1)
    row: _NodeRow | _ExchangedRow | _MessageRow
    if node is not None:
        row = _NodeRow(node, root)
    elif most >= 0:
        row = _ExchangedRow(engine, most, root)
    else:
        row = _MessageRow(engine, root)

    def run(sent: Sent | None, source: Any, index: int | None) -> Any:
        length, nbytes, content = row.content(index, sent)
        few = length + nbytes <= row.most
        if length <= row.most:
            start = nbytes if few else 0
            pickled = content[start : start + length]
        else:
            pickled = np.empty(length, _BYTES)
            if sent is not None:
                pickled[...] = np.frombuffer(sent.pickled, _BYTES)
            engine.run("broadcast", None, pickled, root=root)
        return receive(read(engine, pickled), content[:nbytes] if few else None, source, index)

    return bind(engine, signature, run, row.publish, row.exchange)


class _NodeRow:
    """Beside the root's arrival."""

    exchange = None
    most = SMALL_BYTES

    def __init__(self, node: Node, root: int) -> None:
        memory, self._addresses = node.steps.memory, node.addresses
        self._words = memory.words[root]
        self._slots = {
            at + DATA: memory.slots[root][parity][ROW_BYTES:] for parity, at in enumerate(ARRIVALS)
        }
        self._bytes = {index: slot.data for index, slot in self._slots.items()}
        self.publish = (
            self._publish if memory.rank == root else self._addresses.numbers_publisher(0, 0)
        )

    def _publish(self, index: int, sent: Any, target: Any) -> None:
        pickled, nbytes, array, pieces = sent
        length, slot = len(pickled), self._slots[index]
        few = length + nbytes <= self.most
        if few:
            self._words[index + FIRST_NUMBER] = length
            self._words[index + FIRST_NUMBER + 1] = nbytes
            start = 0
            for piece in pieces:
                end = start + piece.nbytes
                slot[start:end] = piece.view(_BYTES)
                start = end
        else:
            self._addresses.store(index, array, None, length, nbytes)
        if length <= self.most:
            start = nbytes if few else 0
            self._bytes[index][start : start + length] = pickled

    def content(self, index: Any, sent: Sent | None) -> tuple[int, int, Array]:
        """The lengths of the pickle and of the pieces, and what travelled."""
        first = index + FIRST_NUMBER
        return self._words[first], self._words[first + 1], self._slots[index]


class _ExchangedRow(ExchangedRows):
    """In the messages that compare the call."""

    def __init__(self, engine: Engine, most: int, root: int) -> None:
        super().__init__(engine, most)
        self.most, self._root = most, root

    def row(self) -> tuple[Head, Any]:
        """What the root sends."""
        sent = _NOTHING if self.source is None else self.source
        content = sent.within(self.most)
        return (len(sent.pickled), sent.nbytes, len(content)), content

    def content(self, index: Any, sent: Sent | None) -> tuple[int, int, Array]:
        """The lengths of the pickle and of the pieces, and what travelled."""
        _, lengths, nbytes = self.numbers()
        return lengths[self._root], nbytes[self._root], self.joined()


class _MessageRow:
    """Nothing travels with the check: the lengths follow it."""

    publish = exchange = None
    most = -1

    def __init__(self, engine: Engine, root: int) -> None:
        self._engine, self._root = engine, root

    def content(self, index: Any, sent: Sent | None) -> tuple[int, int, Array]:
        """The lengths of the pickle and of the pieces; no content."""
        given = _NOTHING if sent is None else sent
        lengths = np.array([len(given.pickled), given.nbytes], np.int64)
        self._engine.run("broadcast", None, lengths, root=self._root)
        return int(lengths[0]), int(lengths[1]), np.empty(0, _BYTES)


def broadcast_object(engine: Engine, obj: Any, root: int) -> Operation:
    """A copy of the root's object on every rank."""
    signature, key = Signature("broadcast_object", root=root), ("broadcast_object", root)

    def receive(result: Any, data: Array | None, source: Any, index: Any) -> Any:
        return result

    bind = partial(bind_from_root, signature=signature, root=root, receive=receive)
    return bound_operation(signature, key, bind, sent_of(engine, obj, root), None, as_it_is)


def sent_of(engine: Engine, obj: Any, root: int) -> Sent | None:
    """What the root sends of an object; None on other ranks."""
    return Sent(outcome_of(lambda: obj)) if engine.rank == root else None
