"""Reductions: which op supports which dtype, and the fold of two pieces into one.

Folds are element-wise: integers wrap as in NumPy, NaN propagates through all ops, and the sum of
bools is `or` (MPI's logical sum). float16 and bfloat16 sums are computed in float32 and rounded
once per fold by numkong, because the loops of NumPy and ml_dtypes are about ten times slower. All
other folds are NumPy ufuncs.
"""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import ml_dtypes
import numkong
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Action: TypeAlias = Callable[[], Any]
Fold: TypeAlias = Callable[[Array, Array, Array], Any]
"""(first, second, out): folds two arrays into `out`, which may be one of them."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8S = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FLOAT16S = (np.dtype(np.float16), BFLOAT16)
_HALF_AND_SINGLE = {np.dtype(np.float16), np.dtype(np.float32)}
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_REDUCIBLE = {*map(np.dtype, (*_INTEGERS, *_FLOATS)), BFLOAT16}


class ReduceOp(enum.Enum):
    """How the ranks' elements are folded. Strings such as "sum" or "Mean" are accepted as well.

    SUM, MEAN, MIN, MAX and PRODUCT take bool, integers and floats, complex numbers too except for
    MIN and MAX, but no `longdouble`. Integers wrap; a NaN of any rank propagates; SUM and MAX of
    bool are `or`, MIN and PRODUCT are `and`. MEAN of bool and integers is float64; that of other
    dtypes is infinite where the sum exceeds them. 16-bit floats are added in float32, and each sum
    of two ranks' elements is rounded.

    BITWISE_AND, BITWISE_OR and BITWISE_XOR, MPI's BAND, BOR and BXOR, take bool and integers. XOR
    of bool is True where an odd number of ranks have True.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_XOR = "bitwise_xor"

    # That of enum.Enum is a Python function, called at every look-up of a call by its op.
    __hash__ = object.__hash__


_OPS = {op.value: op for op in ReduceOp}
_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BITWISE_AND: np.bitwise_and,
    ReduceOp.BITWISE_OR: np.bitwise_or,
    ReduceOp.BITWISE_XOR: np.bitwise_xor,
}
_BITWISE = (ReduceOp.BITWISE_AND, ReduceOp.BITWISE_OR, ReduceOp.BITWISE_XOR)


_BLOCK_BYTES = 256 << 10


def as_op(op: ReduceOp | str) -> ReduceOp:
    """The op named by `op`, case-insensitively; ValueError for an unknown name."""
    found = _OPS.get(op) if isinstance(op, str) else op
    if found is None and isinstance(op, str):
        found = _OPS.get(op.lower())
    if not isinstance(found, ReduceOp):
        allowed = ", ".join(map(repr, _OPS))
        raise ValueError(
            f"op={reprlib.repr(op)}: must be a collectives.ReduceOp or one of {allowed}"
        )
    return found


class Reduction:
    """An op on elements of a dtype: what is folded, by what, and what remains to be done then.

    `reduction_for` returns the only one for an op and a dtype.
    """

    def __init__(self, op: ReduceOp, dtype: np.dtype[Any]) -> None:
        """The op must be defined for the dtype."""
        self.divides = op is ReduceOp.MEAN
        """Whether `finish` has something to do."""
        self.folds_as = ReduceOp.SUM if self.divides else op
        """The op of the fold, for a library that folds by itself."""
        self.dtype = np.dtype(np.float64) if self.divides and dtype.kind in "biu" else dtype
        """The dtype of the fold, and of the result."""
        self.ufunc = _UFUNCS[self.folds_as]
        """NumPy's function; CuPy has those of the same names."""
        adds, kind = self.folds_as is ReduceOp.SUM, self.dtype.kind
        self._is_float16 = self.dtype in _FLOAT16S
        self._by_numkong = adds and self._is_float16
        # On a single element, NumPy runs the loop of a reduction along an axis if `out` is also an
        # operand. That loop rounds a complex product differently, and of two NaNs it keeps the
        # other one.
        self._depends_on_out = kind == "c" or (kind == "f" and adds)
        self.plain_fold = self._find_plain_fold()
        """The fold of arrays of any length, if it is a single NumPy function."""
        self.fold = self._find_fold()
        """The fold of contiguous arrays, for which the result never depends on where `out` is."""

    def _find_plain_fold(self) -> Fold | None:
        if self._by_numkong or (self.ufunc is np.multiply and self.dtype.kind == "c"):
            return None
        if self.ufunc in (np.minimum, np.maximum):
            # These two ufuncs no longer accept `out` by position.
            return lambda first, second, out: self.ufunc(first, second, out=out)
        return self.ufunc

    def _find_fold(self) -> Fold:
        plain = self.plain_fold
        if plain is None:
            return lambda *pieces: self.bind(*pieces)()
        if not self._depends_on_out:
            return plain

        def fold(first: Array, second: Array, out: Array) -> None:
            if len(out) == 1:
                self.bind(first, second, out)()
            else:
                plain(first, second, out)

        return fold

    def bind(self, first: Array, second: Array, out: Array) -> Action:
        """An action that folds two contiguous pieces into `out`, which may be one of them.

        The action holds the pieces' addresses: the caller keeps them alive as long as it uses the
        action. All ranks must pass the operands in the same order, because NaN payloads and the
        signs of zeros depend on it.
        """
        if self._by_numkong:
            return partial(numkong.add, _tensor(first), _tensor(second), out=_tensor(out))
        if self._depends_on_out and out.size == 1:
            return lambda: np.copyto(out, self.ufunc(first, second))
        return partial(self.ufunc, first, second, out=out)

    def fold_ranks(self, pieces: Sequence[Array], out: Array, scratch: Array) -> None:
        """Fold a piece of every rank, in rank order, and finish; any of them may be `out`.

        `scratch` is at least as long as a piece. In blocks, so that what remains to be done finds
        the folded elements in the core's own cache.
        """
        if self.divides and out.nbytes > _BLOCK_BYTES:
            most = _BLOCK_BYTES // out.itemsize
            for start in range(0, len(out), most):
                block = slice(start, start + most)
                self.fold_ranks([each[block] for each in pieces], out[block], scratch)
            return
        if len(pieces) == 2 and len(out) > 1 and self.plain_fold is not None:
            self.plain_fold(pieces[0], pieces[1], out)
        else:
            fold_in_order(self.fold, pieces, out, scratch)
        if self.divides:
            self.finish(out, len(pieces))

    def finish(self, folded: Array, size: int) -> None:
        """Turn the folded array of `size` ranks into the result, in place: MEAN divides by `size`.

        16-bit floats are divided in float32, because they can't represent every number of ranks.
        Their sum may already have overflowed.
        """
        if not self.divides:
            return
        if self.dtype.kind == "c":
            folded = np.atleast_1d(folded).view(folded.real.dtype)
        if self._is_float16:
            wide = np.empty(folded.shape, np.float32)
            convert(folded, wide)
            wide /= np.float32(size)
            convert(wide, folded)
        elif size & (size - 1):
            np.divide(folded, np.asarray(size, folded.dtype), out=folded)
        else:
            # The product with the reciprocal of a power of two has the same bits, and is faster.
            np.multiply(folded, np.asarray(1 / size, folded.dtype), out=folded)


@lru_cache(maxsize=256)
def reduction_for(op: ReduceOp, dtype: np.dtype[Any], on_gpu: bool = False) -> Reduction:
    """The reduction of elements of the dtype; TypeError if the op is not defined for it.

    NCCL reduces 8-bit floats on some GPUs, and has no mean of them.
    """
    if op is ReduceOp.MEAN and on_gpu and dtype in _FLOAT8S:
        raise TypeError(f"op='mean': array of dtype {dtype}: has no mean; its sum can be reduced")
    if op in _BITWISE and dtype.kind not in "biu":
        allowed = ", ".join(_INTEGERS)
        text = f"array of dtype {dtype}: must be bool or an integer: {allowed}"
        raise TypeError(f"op={op.value!r}: {text}")
    if dtype not in _REDUCIBLE and not (on_gpu and dtype in _FLOAT8S):
        allowed = ", ".join(sorted(each.name for each in _REDUCIBLE))
        raise TypeError(f"array of dtype {dtype}: can't be reduced; the dtypes are {allowed}")
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"op={op.value!r}: complex numbers have no order")
    return Reduction(op, dtype)


def fold_in_order(fold: Fold, pieces: Sequence[Array], out: Array, scratch: Array) -> None:
    """Fold two or more pieces, starting with the first two; any of them may be `out`.

    Folding the ranks' pieces in rank order gives the same bits on every rank. `scratch` is at least
    as long as a piece.
    """
    first = pieces[0]
    if len(pieces) > 2:
        between = scratch[: len(out)]
        for piece in pieces[1:-1]:
            fold(first, piece, between)
            first = between
    fold(first, pieces[-1], out)


def convert(source: Array, target: Array) -> None:
    """Copy contiguous elements into those of another floating dtype, rounded to nearest even."""
    if {source.dtype, target.dtype} == _HALF_AND_SINGLE:
        # 9 to 13 times as fast as NumPy.
        numkong.astype(source, "float32" if target.itemsize == 4 else "float16", out=target)
    else:
        target[...] = source


def _tensor(piece: Array) -> Any:
    name: Any = piece.dtype.name
    return numkong.from_pointer(piece.ctypes.data, piece.shape, name)
