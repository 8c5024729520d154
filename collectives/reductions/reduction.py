"""Reductions: which op supports which dtype, and the fold of two pieces into one.

Folds are element-wise: integers wrap as in NumPy, NaN propagates through all ops, and the sum of
bools is `or` (MPI's logical sum). float16 and bfloat16 sums are computed in float32 and rounded
once per fold by numkong, because the loops of NumPy and ml_dtypes are about ten times slower. All
other folds are NumPy ufuncs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import ml_dtypes
import numkong
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Action: TypeAlias = Callable[[], Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT8S = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_FLOAT16S = (np.dtype(np.float16), BFLOAT16)
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
_REDUCIBLE = {*map(np.dtype, (*_INTEGERS, *_FLOATS)), BFLOAT16}


class ReduceOp(enum.Enum):
    """How the ranks' elements are folded. Strings such as "sum" or "Mean" are accepted as well."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


_OPS = {op.value: op for op in ReduceOp}
_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def as_op(op: ReduceOp | str) -> ReduceOp:
    """The op named by `op`, case-insensitively; ValueError for an unknown name."""
    found = _OPS.get(op) if isinstance(op, str) else op
    if found is None and isinstance(op, str):
        found = _OPS.get(op.lower())
    if not isinstance(found, ReduceOp):
        allowed = ", ".join(map(repr, _OPS))
        raise ValueError(f"op={op!r}: must be a ReduceOp or one of {allowed}")
    return found


@lru_cache(maxsize=256)
def check_reducible(op: ReduceOp, dtype: np.dtype[Any], on_gpu: bool = False) -> None:
    """Raise TypeError if `op` is not defined for the dtype. Some GPUs sum 8-bit floats."""
    if dtype not in _REDUCIBLE and not (on_gpu and dtype in _FLOAT8S):
        allowed = ", ".join(sorted(each.name for each in _REDUCIBLE))
        raise TypeError(f"array of dtype {dtype}: can't be reduced; the dtypes are {allowed}")
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"op={op.value!r}: complex numbers have no order")


@lru_cache(maxsize=256)
def fold_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Dtype of the fold and of its result: MEAN of integers is float64."""
    if op is ReduceOp.MEAN and dtype.kind in "biu":
        return np.dtype(np.float64)
    return dtype


def fold_function(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], Any]:
    """(first, second, out) → None: like `bind_fold`, executed at once."""
    plain = plain_fold(op, dtype)
    if plain is None:
        return lambda *pieces: bind_fold(op, *pieces)()
    if not _depends_on_out(op, dtype):
        return plain

    def fold(first: Array, second: Array, out: Array) -> None:
        if len(out) == 1:
            bind_fold(op, first, second, out)()
        else:
            plain(first, second, out)

    return fold


def _needs_special_fold(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether the fold is not a plain NumPy ufunc."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return dtype in _FLOAT16S
    return op is ReduceOp.PRODUCT and dtype.kind == "c"


def _depends_on_out(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether NumPy runs another loop on a single element if `out` is also an operand.

    NumPy then takes the loop of a reduction along an axis. That loop rounds a complex product
    differently, and of two NaNs it keeps the other one.
    """
    return dtype.kind == "c" or (dtype.kind == "f" and op in (ReduceOp.SUM, ReduceOp.MEAN))


def plain_fold(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], Any] | None:
    """The NumPy function that folds arrays of any length, or None if there is none."""
    if _needs_special_fold(op, dtype):
        return None
    ufunc = _UFUNCS[op]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        # These two ufuncs no longer accept `out` by position.
        return lambda first, second, out: ufunc(first, second, out=out)
    return ufunc


def bind_fold(op: ReduceOp, first: Array, second: Array, out: Array) -> Action:
    """An action that folds two contiguous pieces into `out`, which may be one of them.

    The action holds the pieces' addresses: the caller keeps them alive as long as it uses the
    action. All ranks must pass the operands in the same order, because NaN payloads and the signs
    of zeros depend on it.
    """
    if op in (ReduceOp.SUM, ReduceOp.MEAN) and out.dtype in _FLOAT16S:
        pieces = (_tensor(first), _tensor(second))
        return partial(numkong.add, *pieces, out=_tensor(out))
    ufunc = _UFUNCS[op]
    if out.size == 1 and _depends_on_out(op, out.dtype):
        return lambda: np.copyto(out, ufunc(first, second))
    return partial(ufunc, first, second, out=out)


def fold_in_order(
    fold: Callable[[Array, Array, Array], Any],
    pieces: Sequence[Array],
    out: Array,
    scratch: Array,
) -> None:
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


def _tensor(piece: Array) -> Any:
    name: Any = piece.dtype.name
    return numkong.from_pointer(piece.ctypes.data, piece.shape, name)


def finish(op: ReduceOp, folded: Array, size: int) -> None:
    """Turn the folded array into the result, in place: MEAN divides by the number of ranks.

    16-bit floats are divided in float32, because they can't represent every number of ranks. Their
    sum may already have overflowed.
    """
    if op is not ReduceOp.MEAN:
        return
    if folded.dtype.kind == "c":
        folded = folded.view(folded.real.dtype)
    if folded.dtype in _FLOAT16S:
        folded[...] = folded.astype(np.float32) / np.float32(size)
    else:
        np.divide(folded, np.asarray(size, folded.dtype), out=folded)
