"""Values that depend on the rank, and the results of the collectives on them, in plain NumPy."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np

from collectives.analysis.cost import sized_rounds

DTYPES = [
    *(np.dtype(name) for name in ("bool", "int8", "int16", "int32", "int64")),
    *(np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")),
    *(np.dtype(name) for name in ("float16", "float32", "float64", "complex64", "complex128")),
    np.dtype(ml_dtypes.bfloat16),
]
OPS = ["sum", "mean", "min", "max", "product"]
BITWISE = ["bitwise_and", "bitwise_or", "bitwise_xor"]


def defined(op, dtype):
    """Whether elements of the dtype have that reduction."""
    if op in BITWISE:
        return dtype.kind in "biu"
    return not (op in ("min", "max") and dtype.kind == "c")


PAIRS = [(op, dtype) for op in OPS for dtype in DTYPES if defined(op, dtype)]
# `test_bitwise` has the other integers.
PAIRS += [(op, np.dtype(name)) for op in BITWISE for name in ("bool", "int16", "uint32", "int64")]


@contextmanager
def case(*what):
    """Name the turn of a loop in what is raised there."""
    try:
        yield
    except Exception as error:
        text = " ".join(map(str, what))
        raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error


def value(rank, shape, dtype=np.float64, largest=5):
    """Small integers, exact in every dtype, that differ by rank and index."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    numbers = (places * 7 + rank * 3 + places // 5 * rank) % largest
    if np.dtype(dtype).kind == "b":
        return (numbers % 3 == rank % 3).astype(bool)
    return (numbers + 1).astype(dtype)


def values(size, shape, dtype=np.float64, largest=5):
    return [value(rank, shape, dtype, largest) for rank in range(size)]


def reduced(op, arrays):
    """The reduction of the ranks' arrays."""
    stacked = np.stack(arrays)
    size, dtype = len(arrays), stacked.dtype
    if dtype.kind == "b" and op in ("sum", "min", "max", "product"):
        return (np.any if op in ("sum", "max") else np.all)(stacked, axis=0)
    if op == "mean":
        if dtype.kind == "c":
            total = reduced("sum", arrays)
            parts = total.reshape(-1).view(total.real.dtype)
            return (parts / parts.dtype.type(size)).view(dtype).reshape(total.shape)
        mean = stacked.astype(np.float64).sum(axis=0) / size
        return mean if dtype.kind in "biu" else mean.astype(dtype)
    ufuncs = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
    ufunc = ufuncs.get(op) or getattr(np, op)
    folded = stacked[0].copy()
    for each in stacked[1:]:
        ufunc(folded, each, out=folded)
    return folded


def traffic(collective, algorithm, size, nbytes):
    """The numbers of messages and of bytes that each rank sends, as the cost model counts them."""
    count, total = np.zeros(size, int), np.zeros(size, int)
    for each, lengths in sized_rounds(collective, algorithm, size, nbytes):
        np.add.at(count, each.sent.rank, 1)
        np.add.at(total, each.sent.rank, lengths)
    return count, total
