"""The reductions: which op works on which dtype, and the fold of two pieces into one.

Folds are element-wise: integers wrap as NumPy's do, NaN propagates through all of them, bool sums
are `or` (MPI's logical sum). float16 and bfloat16 sums are computed in float32 and rounded once per
fold, by numkong (NumPy's and ml_dtypes' own loops are about ten times slower); all other folds are
NumPy ufuncs.
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
    """How the ranks' elements are folded into one. The strings "sum", "Mean", … do as well."""

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
    """The op that `op` names, in any case; ValueError where there is none of that name."""
    found = _OPS.get(op) if isinstance(op, str) else op
    if found is None and isinstance(op, str):
        found = _OPS.get(op.lower())
    if not isinstance(found, ReduceOp):
        allowed = ", ".join(map(repr, _OPS))
        raise ValueError(f"op={op!r}: must be a ReduceOp or one of {allowed}")
    return found


@lru_cache(maxsize=256)
def check_reducible(op: ReduceOp, dtype: np.dtype[Any], on_gpu: bool = False) -> None:
    """TypeError where `op` has no meaning for the dtype. Some GPUs add 8-bit floats."""
    if dtype not in _REDUCIBLE and not (on_gpu and dtype in _FLOAT8S):
        allowed = ", ".join(sorted(each.name for each in _REDUCIBLE))
        raise TypeError(f"array of dtype {dtype}: can't be reduced; the dtypes are {allowed}")
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"op={op.value!r}: complex numbers have no order")


@lru_cache(maxsize=256)
def fold_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which the fold is done, and that of its result: MEAN of integers is float64."""
    if op is ReduceOp.MEAN and dtype.kind in "biu":
        return np.dtype(np.float64)
    return dtype


def fold_function(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], Any]:
    """(first, second, out) → None: as `bind_fold`, done at once."""
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


def _needs_care(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether a fold is anything else than NumPy's ufunc."""
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return dtype in _FLOAT16S
    return op is ReduceOp.PRODUCT and dtype.kind == "c"


def _depends_on_out(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    """Whether NumPy takes another loop for a single number where `out` is an operand.

    It takes that for a reduction along an axis, which rounds a product of complex numbers
    otherwise, and of two NaNs keeps the other one.
    """
    return dtype.kind == "c" or (dtype.kind == "f" and op in (ReduceOp.SUM, ReduceOp.MEAN))


def plain_fold(op: ReduceOp, dtype: np.dtype[Any]) -> Callable[[Array, Array, Array], Any] | None:
    """NumPy's function that does the fold for any arrays, or None where there is none."""
    if _needs_care(op, dtype):
        return None
    ufunc = _UFUNCS[op]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        # These two alone don't take `out` by position any more.
        return lambda first, second, out: ufunc(first, second, out=out)
    return ufunc


def bind_fold(op: ReduceOp, first: Array, second: Array, out: Array) -> Action:
    """An action that folds two contiguous pieces into `out`, which may be one of them.

    The action holds the pieces' addresses: the caller keeps them alive as long as it is used. All
    ranks must give the operands in the same order, since NaN payloads and zeros' signs depend on
    it.
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
    """Fold two or more pieces, of which any may be `out`, the first two first.

    Whoever folds the ranks' pieces in rank order gets the same bits. `scratch` is at least as long
    as a piece.
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

    16-bit floats are divided in float32, since they can't hold every number of ranks; their sum may
    have overflowed before.
    """
    if op is not ReduceOp.MEAN:
        return
    if folded.dtype.kind == "c":
        folded = folded.view(folded.real.dtype)
    if folded.dtype in _FLOAT16S:
        folded[...] = folded.astype(np.float32) / np.float32(size)
    else:
        np.divide(folded, np.asarray(size, folded.dtype), out=folded)
