"""The collectives of a node's ranks on registered arrays, which need no staging.

A rank reads its peers' arrays where they lie and stores what they are to get straight into theirs.
The ranks tell each other first where their arrays lie, so that each may pass another one, and an
ordinary one too: then nothing is done, and all ranks take another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.reduction import Array, ReduceOp, fold_function
from collectives.shared.arena import Arena
from collectives.shared.staged import Lengths, blocks_of, bounds, others, part_starts
from collectives.shared.steps import Steps

# Below this many bytes telling the places costs more than the stages do.
LEAST_BYTES = 16 << 10
# A block of the result stays in the core's own cache until it is stored everywhere.
_BLOCK_BYTES = 128 << 10
# With more ranks, reading all inputs whole costs more than staging slices.
_MOST_READ_WHOLE = 3

# Views of so many (places, length) are kept for the next calls.
_FOLDS_KEPT = 64

_Block = tuple[Array, list[Array], Array, list[Array]]
"""A rank's own input, its peers', and where the result goes: its own output, and its peers'."""

Attempt = Callable[[Array | None, Array, Lengths, int], bool]


class Direct:
    """One rank's collectives on registered arrays, if all that count are: each tells whether."""

    def __init__(
        self, steps: Steps, arena: Arena, op: ReduceOp | None, dtype: np.dtype[Any]
    ) -> None:
        self._steps, self._arena, self._dtype = steps, arena, dtype
        self._rank, self._size = steps.rank, steps.size
        if op is not None:
            self._fold = fold_function(op, dtype)
        self._block = max(1, _BLOCK_BYTES // dtype.itemsize)
        self._folds: dict[tuple[Any, ...], list[_Block]] = {}

    def find(self, collective: str) -> Attempt | None:
        """The collective of that name, if there is a direct way."""
        found: Attempt | None = getattr(self, collective, None)
        return found

    def _places(self, source: Array, target: Array) -> tuple[list[int], list[int]] | None:
        """Where all ranks' inputs and outputs lie; None where that isn't worth asking."""
        if not self._arena.in_use or max(source.nbytes, target.nbytes) < LEAST_BYTES:
            return None
        locate = self._arena.locate
        place = locate(target)
        told = self._steps.tell(place if source is target else locate(source), place)
        return [first for first, _ in told], [second for _, second in told]

    def _views(self, places: Sequence[int], length: int) -> list[Array]:
        view, dtype = self._arena.view, self._dtype
        return [view(place, peer, length, dtype) for peer, place in enumerate(places)]

    def all_reduce(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> bool:
        """Each folds a slice of everybody's array and stores it into everybody's."""
        given = target if source is None else source
        places = self._places(given, target)
        if places is None or not all(places[0]):
            return False
        if all(places[1]):
            self._fold_slice(places, len(target))
        elif self._size <= _MOST_READ_WHOLE and not any(places[1]):
            # No rank may write its result over an input that another still reads.
            self._fold_all(self._views(places[0], len(target)), target)
        else:
            return False
        self._steps.together()
        return True

    def _fold_slice(self, places: tuple[list[int], list[int]], length: int) -> None:
        """2 bytes touched for each byte of the vector."""
        key = (*places[0], *places[1], length)
        blocks = self._folds.get(key)
        if blocks is None:
            if len(self._folds) >= _FOLDS_KEPT:
                self._folds.clear()
            blocks = self._folds[key] = self._make_blocks(places, length)
        fold = self._fold
        for first, peers, folded, stores in blocks:
            for theirs in peers:
                fold(first, theirs, folded)
                first = folded
            for store in stores:
                store[...] = folded

    def _make_blocks(self, places: tuple[list[int], list[int]], length: int) -> list[_Block]:
        """This rank's slice, cut into blocks of everybody's inputs and outputs."""
        inputs, outputs = (self._views(each, length) for each in places)
        edges = bounds(length, self._size, self._dtype.itemsize)
        rank, peers = self._rank, list(others(self._rank, self._size))
        return [
            (
                inputs[rank][block],
                [inputs[peer][block] for peer in peers],
                outputs[rank][block],
                [outputs[peer][block] for peer in peers],
            )
            for block in blocks_of(edges[rank + 1], self._block, edges[rank])
        ]

    def _fold_all(self, inputs: list[Array], target: Array) -> None:
        """Size + 1 bytes touched for each byte; all ranks fold in the same order."""
        for block in blocks_of(len(target), self._block):
            first = inputs[0][block]
            for each in inputs[1:]:
                self._fold(first, each[block], target[block])
                first = target[block]

    def reduce(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> bool:
        """Each folds a slice of everybody's array and stores it into the root's."""
        given = target if source is None else source
        places = self._places(given, target)
        if places is None or not all(places[0]) or not places[1][root]:
            return False
        inputs = self._views(places[0], len(target))
        output = self._arena.view(places[1][root], root, len(target), self._dtype)
        edges = bounds(len(target), self._size, self._dtype.itemsize)
        for block in blocks_of(edges[self._rank + 1], self._block, edges[self._rank]):
            self._fold_into(output[block], [each[block] for each in inputs])
        self._steps.together()
        return True

    def _fold_into(self, folded: Array, inputs: list[Array]) -> None:
        """Fold all inputs, of which any may be the output, in an order that all ranks share."""
        if len(inputs) == 2:
            self._fold(inputs[0], inputs[1], folded)
            return
        total = inputs[0].copy()
        for each in inputs[1:]:
            self._fold(total, each, total)
        folded[:] = total

    def reduce_scatter(
        self, source: Array | None, target: Array, lengths: Lengths, root: int = 0
    ) -> bool:
        """Each folds its part of everybody's array; the target is that part alone."""
        assert source is not None
        given = source
        places = self._places(given, target)
        if places is None or not all(places[0]):
            return False
        inputs = self._views(places[0], len(given))
        starts = part_starts(lengths)
        parts = [each[starts[self._rank] : starts[self._rank + 1]] for each in inputs]
        for block in blocks_of(len(target), self._block):
            first = parts[self._rank][block]
            for peer in others(self._rank, self._size):
                self._fold(first, parts[peer][block], target[block])
                first = target[block]
        self._steps.together()
        return True

    def broadcast(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> bool:
        """The others read the root's array; of those that are registered it writes a share."""
        places = self._places(target, target)
        if places is None or not places[0][root]:
            return False
        length = len(target)
        # A share of the work for the root, if it can reach what the others are to get.
        edges = bounds(length, self._size, self._dtype.itemsize)
        middle = edges[-2] if all(places[1]) else length
        if self._rank != root:
            content = self._arena.view(places[0][root], root, length, self._dtype)
            target[:middle] = content[:middle]
        elif middle < length:
            for peer in others(root, self._size):
                view = self._arena.view(places[1][peer], peer, length, self._dtype)
                view[middle:] = target[middle:]
        self._steps.together()
        return True

    def all_gather(
        self, source: Array | None, target: Array, lengths: Lengths, root: int = 0
    ) -> bool:
        """Each writes its part into everybody's array, or reads the others' parts."""
        starts, rank = part_starts(lengths), self._rank
        own = target[starts[rank] : starts[rank + 1]]
        given = own if source is None else source
        places = self._places(given, target)
        if places is not None and all(places[1]):
            outputs = [
                self._arena.view(place, peer, len(target), self._dtype)
                for peer, place in enumerate(places[1])
                if peer != rank
            ]
            parts = [each[starts[rank] : starts[rank + 1]] for each in outputs]
            self._store(given, parts if source is None else [own, *parts])
        elif places is not None and all(places[0]):
            if source is not None:
                own[:] = source
            for peer in others(rank, self._size):
                theirs = self._arena.view(places[0][peer], peer, lengths[peer], self._dtype)
                target[starts[peer] : starts[peer + 1]] = theirs
        else:
            return False
        self._steps.together()
        return True

    def _store(self, content: Array, places: list[Array]) -> None:
        """Copy into several places, block by block: the content is read from memory once."""
        for block in blocks_of(len(content), self._block):
            for place in places:
                place[block] = content[block]
