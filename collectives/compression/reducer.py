"""A reduction of gradients that is exact inside a node and compressed between nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from collectives.arrays.kinds import to_numpy
from collectives.communicator import Communicator
from collectives.compression.compressors import ALLOWED, Compressor, MakeCompressor, parse
from collectives.reductions.reduction import Array, ReduceOp, as_op, reduction_for

_COMPRESSED = ("float32", "float64")
_Kinds: TypeAlias = tuple[ReduceOp, tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]]


class CompressedReducer:
    """Reduces the same list of gradients in every step; between nodes it moves fewer bytes.

    The ranks of a node add their gradients exactly, in shared memory. One rank of each node, the
    leader, exchanges the sums with the other leaders:

    - "float16", "bfloat16": as elements of 2 bytes. Their sums are rounded, too. In float16,
      magnitudes above 65504 become infinite, those below 3e-8 zero.
    - "powersgd(rank)": as two factors of that rank, for arrays of two and more dimensions
      (Vogels et al. 2019, arXiv:1905.13727). Other arrays are added exactly.
    - "topk(fraction)": as the elements of largest magnitude of each array, and their positions
      (Stich et al. 2018, arXiv:1809.07599).

    What the last two leave out of a step is added to the next (error feedback), so that a list
    keeps its shapes, dtypes and op; several lists have names. A step that fails, or whose result is
    not finite, changes nothing of what is added to the next. Where one fails on some nodes alone,
    as when a rank stands still in the middle for longer than the deadline, every later step raises
    a MismatchError, until all ranks `forget` the list. Arrays of other dtypes than float32
    and float64 are reduced exactly, and so are all where there is one node.
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
        self._lists: dict[Hashable, _List] = {}
        self._bytes_sent = 0

    @property
    def bytes_between_nodes(self) -> int:
        """Bytes that this node's leader gave to collectives between nodes in the last call.

        Without arrays that are never compressed. 0 on other ranks, and with one node.
        """
        return self._bytes_sent

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        op: ReduceOp | str = "mean",
        *,
        of: Hashable = None,
        commit: bool = True,
    ) -> list[np.ndarray[Any, Any]]:
        """The approximate sums or means over all ranks, as new arrays. Collective.

        arrays: arrays on the CPU, or lists of numbers. The results are the same on the ranks of a
            node; those of powersgd on all nodes, if their processors, versions of NumPy and numbers
            of BLAS threads are equal; all others on all nodes.
        of: a name of the list, whose `repr` is equal on all ranks. Lists of different names share
        no errors that are fed back.
        commit: whether what is left out is added to the next call, if all results are finite; else
            `commit` does so.

        Raises on every rank: ValueError for an op that is neither "sum" nor "mean", and for shapes,
        dtypes or an op other than in the first call of the name; TypeError for dtypes that can't be
        reduced; a MismatchError where ranks differ.
        """
        try:
            given = [to_numpy(each, f"arrays[{place}]") for place, each in enumerate(arrays)]
            op = as_op(op)
            known = self._list_of(of, given, op)
        except Exception as error:
            # The other ranks raise, too, if this is not so on all.
            self._communicator.barrier(f"CompressedReducer.all_reduce_many: {error}")
            raise
        # Two texts, which recur: no rank is more than one step ahead.
        turn = "odd" if known.steps % 2 else "even"
        self._communicator.barrier(f"{known.text}, {turn} step")
        # After the only barrier, which ranks that know the list and ranks that don't make alike.
        self._lists[of], self._bytes_sent = known, 0
        self._keep_deadline()
        results: list[Any] = [None] * len(given)
        exact = [given[number] for number in known.others]
        reduced = self._communicator.all_reduce_many(exact, op) if exact else []
        for number, array in zip(known.others, reduced, strict=True):
            results[number] = array
        for part in known.parts:
            flat = self._sum(part, given, op)
            self._bytes_sent += part.compressor.bytes_sent
            for number, array in zip(part.numbers, part.cut(flat), strict=True):
                results[number] = array
        known.steps += 1
        # A failed step, and one with infinite gradients, which programs skip, leave no trace.
        if commit and known.keeps and all(bool(np.isfinite(each).all()) for each in results):
            known.commit(())
        return results

    def commit(self, of: Hashable = None, without: Collection[int] = ()) -> None:
        """Add what the last call of that name has left out to the next one. Not collective.

        On every rank alike, once for a call with `commit=False`. `without`: the places of arrays
        whose results are not used: they count as not given. KeyError for a name of no list.
        """
        self._lists[of].commit(without)

    def leaves_out(self, of: Hashable = None) -> bool:
        """Whether calls of that name leave something out. KeyError for a name of no list."""
        return self._lists[of].keeps

    def forget(self, of: Hashable) -> None:
        """Release what was left out of the list of that name, if there is one. Not collective.

        On every rank, before the next call of the name, which begins a new list.
        """
        self._lists.pop(of, None)

    def close(self) -> None:
        """Close the communicators of the nodes and leaders. Collective."""
        for each in (self._leaders, self._node):
            if each is not None:
                each.close()

    def _list_of(self, of: Hashable, given: Sequence[Array], op: ReduceOp) -> _List:
        """The list of that name; raises ValueError where these are not its kinds of arrays."""
        kinds = op, tuple((each.dtype, each.shape) for each in given)
        known = self._lists.get(of)
        if known is not None and known.kinds == kinds:
            return known
        arrays = ", ".join(f"{each.dtype}{list(each.shape)}" for each in given)
        name = "" if of is None else f" of {of!r}"
        text = f"CompressedReducer.all_reduce_many{name}: {op.value} of {arrays}"
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(f"op={op.value!r}: must be 'sum' or 'mean' of compressed gradients")
        if known is not None:
            raise ValueError(
                f"{text}: the first call was {known.text.partition(': ')[2]}; other arrays need"
                " another name"
            )
        for each in given:
            reduction_for(op, each.dtype)  # raises TypeError for a dtype without it
        return _List(kinds, text, given, None if self._node is None else self._make)

    def _keep_deadline(self) -> None:
        """Wait as long on the nodes, and between them, as the communicator does now."""
        for each in (self._node, self._leaders):
            if each is not None and each.deadline != self._communicator.deadline:
                each.deadline = self._communicator.deadline

    def _sum(self, part: _Part, given: Sequence[Array], op: ReduceOp) -> Array:
        assert self._node is not None
        flat = np.concatenate([given[number].reshape(-1) for number in part.numbers])
        # One rank's gradients must not raise there alone, whatever the program has set.
        with np.errstate(all="ignore"):
            if op is ReduceOp.MEAN:
                # Before the sum: a mean of 16 bits can't overflow where its gradients don't.
                flat /= self._communicator.size
            if self._node.size > 1:
                self._node.all_reduce(flat, out=flat)
            if self._leaders is not None:
                flat = part.compressor.sum(self._leaders, flat)
        if self._node.size > 1:
            self._node.broadcast(flat)
        return flat


class ListName:
    """A name that no other list has, although the ranks compare its text alone."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class _List:
    """A list of arrays that is reduced again and again."""

    def __init__(
        self, kinds: _Kinds, text: str, given: Sequence[Array], make: MakeCompressor | None
    ) -> None:
        """`make` None: nothing is compressed."""
        self.kinds, self.text = kinds, text
        self.steps = 0
        """How many this rank has completed: one that fails on a node may be completed on others."""
        self.parts: list[_Part] = []
        dtypes = dict.fromkeys(each.dtype for each in given if make and _compressed(each))
        for dtype in dtypes:
            assert make is not None
            numbers = [number for number, each in enumerate(given) if each.dtype == dtype]
            shapes = [given[number].shape for number in numbers]
            self.parts.append(_Part(numbers, shapes, make(shapes, dtype)))
        compressed = {number for part in self.parts for number in part.numbers}
        self.others = [number for number in range(len(given)) if number not in compressed]

        self.keeps = any(part.compressor.feeds_back for part in self.parts)
        """Whether something is left out."""

    def commit(self, without: Collection[int]) -> None:
        """Keep what the last call has left out, but of the arrays at these places."""
        for part in self.parts:
            part.compressor.commit({n for n, each in enumerate(part.numbers) if each in without})


class _Part:
    """The compressed arrays of one dtype."""

    def __init__(
        self, numbers: Sequence[int], shapes: Sequence[tuple[int, ...]], compressor: Compressor
    ) -> None:
        self.numbers, self.compressor = numbers, compressor
        self._shapes = shapes

    def cut(self, flat: Array) -> list[Array]:
        """The arrays, which lie one after the other in `flat`."""
        ends = np.cumsum([math.prod(shape) for shape in self._shapes])[:-1]
        pieces = np.split(flat, ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def _compressed(array: Array) -> bool:
    return array.size > 0 and array.dtype.isnative and array.dtype.name in _COMPRESSED
