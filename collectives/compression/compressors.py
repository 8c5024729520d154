"""Sums between nodes that move fewer bytes than the arrays have.

A compressor serves arrays of one dtype, which lie one after the other in a flat array. It is
created and called alike on the leader of every node.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from collectives.communicator import Communicator
from collectives.reductions.reduction import Array, convert

Shapes: TypeAlias = Sequence[tuple[int, ...]]

_CASTS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_PARAMETERIZED = re.compile(r"(powersgd|topk)\((.*)\)")
_SEED = 20190530
ALLOWED = "'float16', 'bfloat16', 'powersgd(rank)' or 'topk(fraction)'"


class Compressor(ABC):
    """The sum over the leaders, of flat arrays."""

    feeds_back = False
    """Whether sums leave out something that is added to the next one."""

    bytes_sent = 0
    """Bytes of the arrays that this leader gave to collectives in the last call."""

    @abstractmethod
    def sum(self, leaders: Communicator, flat: Array) -> Array:
        """The approximate sum, which may be `flat`."""

    @abstractmethod
    def commit(self, without: Collection[int]) -> None:
        """Keep what the last sum has left out, except of the arrays of these numbers.

        For those, and without this call, the sum counts as not made.
        """

    def _sent(self, *arrays: Array) -> None:
        self.bytes_sent += sum(each.nbytes for each in arrays)


class Cast(Compressor):
    """Elements of a narrower type; sums are rounded to it."""

    def __init__(self, wire: np.dtype[Any], shapes: Shapes) -> None:
        self._narrow = np.empty(sum(map(math.prod, shapes)), wire)

    def sum(self, leaders: Communicator, flat: Array) -> Array:
        """`flat`, overwritten. Values beyond the range of the type become infinite."""
        self.bytes_sent, narrow = 0, self._narrow
        convert(flat, narrow)
        self._sent(narrow)
        leaders.all_reduce(narrow, out=narrow)
        convert(narrow, flat)
        return flat

    def commit(self, without: Collection[int]) -> None:
        """Nothing is kept: what rounding leaves out is lost."""


class PowerSGD(Compressor):
    """Matrices of low rank, by one step of power iteration, with error feedback.

    Vogels, Karimireddy and Jaggi 2019, arXiv:1905.13727, algorithms 1 and 2. An array of two or
    more dimensions is a matrix with the rows of its first axis. Vectors, and matrices that have no
    more elements than their factors, are summed exactly.
    """

    feeds_back = True

    def __init__(self, rank: int, shapes: Shapes, dtype: np.dtype[Any]) -> None:
        generator = np.random.default_rng(_SEED)
        self._matrices: list[tuple[slice, tuple[int, int]]] = []
        self._whole: list[slice] = []
        self._factors: list[Array] = []
        self._numbers: list[int] = []
        begin = 0
        for number, shape in enumerate(shapes):
            place = slice(begin, begin := begin + math.prod(shape))
            rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
            if (rows + columns) * rank < rows * columns:
                self._numbers.append(number)
                self._matrices.append((place, (rows, columns)))
                self._factors.append(generator.standard_normal((columns, rank)).astype(dtype))
            else:
                self._whole.append(place)
        self._errors = [np.zeros(shape, dtype) for _, shape in self._matrices]
        self._next = self._factors, self._errors

    def sum(self, leaders: Communicator, flat: Array) -> Array:
        """`flat`, overwritten."""
        self.bytes_sent = 0
        matrices = [
            flat[place].reshape(shape) + error
            for (place, shape), error in zip(self._matrices, self._errors, strict=True)
        ]
        first = [each @ right for each, right in zip(matrices, self._factors, strict=True)]
        whole = [flat[place] for place in self._whole]
        self._sent(*first, *whole)
        leaders.all_reduce_many([*first, *whole], out=[*first, *whole])
        lefts = [np.linalg.qr(each).Q for each in first]
        own = [each.T @ left for each, left in zip(matrices, lefts, strict=True)]
        self._sent(*own)
        rights = leaders.all_reduce_many(own)
        errors = []
        for number, (place, shape) in enumerate(self._matrices):
            left = lefts[number]
            np.matmul(left, rights[number].T, out=flat[place].reshape(shape))
            errors.append(matrices[number] - left @ own[number].T)
        # From a column of zeros, the next power iteration would begin nowhere. Columns of the
        # gradients' magnitude would square it there, beyond the range of the dtype.
        factors = [
            np.where(largest > 0, new / largest, old)
            for new, old in zip(rights, self._factors, strict=True)
            for largest in [np.abs(new).max(axis=0)]
        ]
        self._next = factors, errors
        return flat

    def commit(self, without: Collection[int]) -> None:
        """The new factors are those of the next sum."""
        for place, number in enumerate(self._numbers):
            if number not in without:
                for kept, new in zip((self._factors, self._errors), self._next, strict=True):
                    kept[place] = new[place]


class TopK(Compressor):
    """The elements of largest magnitude of each array, with error feedback.

    Stich, Cordonnier and Jaggi 2018, arXiv:1809.07599; chosen for each array as in Lin et al. 2018,
    arXiv:1712.01887. An array keeps at least one element. The bytes that a leader receives grow
    with the number of nodes.
    """

    feeds_back = True

    def __init__(self, fraction: float, shapes: Shapes, dtype: np.dtype[Any]) -> None:
        self._places: list[tuple[int, int, int]] = []
        begin = 0
        for size in map(math.prod, shapes):
            count = max(min(size, 1), math.ceil(round(fraction * size, 9)))
            self._places.append((begin, begin + size, count))
            begin += size
        self._errors = self._next = np.zeros(begin, dtype)
        self._index = np.dtype(np.uint32 if begin < 1 << 32 else np.uint64)

    def sum(self, leaders: Communicator, flat: Array) -> Array:
        """`flat`, overwritten."""
        self.bytes_sent = 0
        carried = self._errors + flat
        magnitudes = np.abs(carried)
        chosen = np.concatenate(
            [
                begin + np.argpartition(magnitudes[begin:end], end - begin - count)[-count:]
                for begin, end, count in self._places
            ]
        )
        indices, values = chosen.astype(self._index), carried[chosen]
        self._sent(indices, values)
        places, parts = leaders.all_gather(indices), leaders.all_gather(values)
        carried[chosen] = 0
        self._next = carried
        flat[...] = 0
        np.add.at(flat, places, parts)
        return flat

    def commit(self, without: Collection[int]) -> None:
        """What was not sent is added to the next sum."""
        for number in without:
            begin, end, _ = self._places[number]
            self._next[begin:end] = self._errors[begin:end]
        self._errors = self._next


MakeCompressor: TypeAlias = Callable[[Shapes, np.dtype[Any]], Compressor]


def parse(text: str) -> MakeCompressor:
    """What makes the compressor of that name; ValueError for any other text."""
    if text in _CASTS:
        return lambda shapes, dtype: Cast(_CASTS[text], shapes)
    match = _PARAMETERIZED.fullmatch(text)
    if match is None:
        raise ValueError(f"compression={text!r}: must be {ALLOWED}")
    name, given = match.groups()
    if name == "powersgd":
        if not (given.isdecimal() and given.isascii() and int(given)):
            raise ValueError(f"compression={text!r}: the rank must be an integer of at least 1")
        return lambda shapes, dtype: PowerSGD(int(given), shapes, dtype)
    try:
        fraction = float(given)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise ValueError(f"compression={text!r}: the fraction must be above 0 and at most 1")
    return lambda shapes, dtype: TopK(fraction, shapes, dtype)
