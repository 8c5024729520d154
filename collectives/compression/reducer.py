"""A reduction of gradients that is exact inside a node and compressed between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.communicator import Communicator
from collectives.compression.compressors import ALLOWED, Compressor, parse
from collectives.reductions.reduction import Array, ReduceOp, as_op

_COMPRESSED = ("float32", "float64")


class CompressedReducer:
    """Reduces one list of gradients in every step; between nodes it moves fewer bytes.

    The ranks of a node add their gradients exactly, in shared memory. One rank of each node, the
    leader, exchanges the sums with the other leaders:

    - "float16", "bfloat16": as elements of 2 bytes. Their sums are rounded, too.
    - "powersgd(rank)": as two factors of that rank, for arrays of two and more dimensions
      (Vogels et al. 2019, arXiv:1905.13727). Other arrays are added exactly.
    - "topk(fraction)": as the elements of largest magnitude of each array, and their positions
      (Stich et al. 2018, arXiv:1809.07599).

    What the last two leave out of a step is added to the next (error feedback), so a reducer serves
    one list of shapes and dtypes, and one op. Arrays of other dtypes than float32 and float64 are
    reduced exactly, and so are all where there is one node.
    """

    def __init__(self, communicator: Communicator, compression: str) -> None:
        """Collective: it splits the communicator, which must stay open.

        Raises ValueError on every rank for another text than those above, or differing ones.
        """
        text = compression if isinstance(compression, str) else repr(compression)
        texts = communicator.all_gather_object(text)
        makers = [parse(each) for each in texts]
        for rank, other in enumerate(texts):
            if other != texts[0]:
                raise ValueError(
                    f"compression is {texts[0]!r} on rank 0, {other!r} on rank {rank}: must be the"
                    f" same on every rank, one of {ALLOWED}"
                )
        self.compression = text
        self._communicator, self._make = communicator, makers[0]
        self._node = self._leaders = None
        if communicator.nodes > 1:
            self._node = communicator.split(communicator.node)
            leads = communicator.local_rank == 0
            self._leaders = communicator.split(0 if leads else None)
        self._kinds: tuple[Any, ...] | None = None
        self._text = ""
        self._parts: list[_Part] = []
        self._others: list[int] = []

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that this node's leader gave to collectives between nodes in the last call.

        Without arrays that are never compressed. 0 on other ranks, and with one node.
        """
        return sum(each.compressor.bytes_sent for each in self._parts)

    def all_reduce_many(
        self, arrays: Sequence[Any], op: ReduceOp | str = "mean"
    ) -> list[np.ndarray[Any, Any]]:
        """The approximate sums or means over all ranks, as new arrays. Collective.

        arrays: arrays of NumPy, or what `numpy.asarray` makes such of. The results are the same on
        the ranks of a node; on all nodes, if their processors and versions of NumPy are equal.

        Raises on every rank: ValueError for an op that is neither "sum" nor "mean", and for shapes,
        dtypes or an op other than in the first call; a MismatchError where ranks differ.
        """
        try:
            given, op = [np.asarray(each) for each in arrays], as_op(op)
        except Exception as error:
            # The other ranks raise, too, if this is not so on all.
            self._communicator.barrier(f"CompressedReducer.all_reduce_many: {error}")
            raise
        kinds = (op, *((each.dtype, each.shape) for each in given))
        if kinds != self._kinds:
            self._begin(kinds, given)
        self._communicator.barrier(self._text)
        results: list[Any] = [None] * len(given)
        exact = [given[number] for number in self._others]
        reduced = self._communicator.all_reduce_many(exact, op) if exact else []
        for number, array in zip(self._others, reduced, strict=True):
            results[number] = array
        for part in self._parts:
            for number, array in zip(part.numbers, self._reduced(part, given), strict=True):
                results[number] = array
        return results

    def _begin(self, kinds: tuple[Any, ...], given: Sequence[Array]) -> None:
        op, *described = kinds
        arrays = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in described)
        text = f"CompressedReducer.all_reduce_many {op.value} of {arrays}"
        # Ranks that differ must all raise, also where only some begin.
        self._communicator.barrier(text)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"op={op.value!r}: must be 'sum' or 'mean' of compressed gradients")
        if self._kinds is not None:
            raise ValueError(
                f"{text}: the first call was {self._text.partition(' ')[2]}; other arrays need a"
                " reducer of their own"
            )
        several = self._node is not None
        dtypes = dict.fromkeys(each.dtype for each in given if several and _compressed(each))
        for dtype in dtypes:
            numbers = [number for number, each in enumerate(given) if each.dtype == dtype]
            shapes = [given[number].shape for number in numbers]
            self._parts.append(_Part(numbers, shapes, dtype, self._make(shapes, dtype)))
        compressed = {number for part in self._parts for number in part.numbers}
        self._others = [number for number in range(len(given)) if number not in compressed]
        self._mean = op is ReduceOp.MEAN
        self._kinds, self._text = kinds, text

    def _reduced(self, part: _Part, given: Sequence[Array]) -> list[Array]:
        assert self._node is not None
        flat = np.concatenate([given[number].reshape(-1) for number in part.numbers])
        if self._mean:
            # Before the sum: a mean of 16 bits can't overflow where its gradients don't.
            flat /= self._communicator.size
        if self._node.size > 1:
            self._node.all_reduce(flat, out=flat)
        if self._leaders is not None:
            # Gradients that have diverged must not raise on the leaders alone.
            with np.errstate(all="ignore"):
                flat = part.compressor.sum(self._leaders, flat)
        if self._node.size > 1:
            self._node.broadcast(flat)
        return part.cut(flat)


class _Part:
    """The compressed arrays of one dtype."""

    def __init__(
        self,
        numbers: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        compressor: Compressor,
    ) -> None:
        self.numbers, self.compressor = numbers, compressor
        self._shapes, self._dtype = shapes, dtype

    def cut(self, flat: Array) -> list[Array]:
        """The arrays, which lie one after the other in `flat`."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])[:-1]
        pieces = np.split(flat, ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def _compressed(array: Array) -> bool:
    return array.size > 0 and array.dtype.isnative and array.dtype.name in _COMPRESSED
