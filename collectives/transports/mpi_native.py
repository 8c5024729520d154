"""MPI's own collectives, where their results satisfy this package's guarantees.

They are not used otherwise: MPI's MIN and MAX may lose a NaN, as may its product of complex
numbers; MPI has no reductions of bool and 16-bit floats; and Open MPI 5 saturates sums of 8- and
16-bit integers in its vector loops, where they must wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import CollectiveError, in_step
from collectives.transports.base import Native

Comm: TypeAlias = MPI.Intracomm
Array: TypeAlias = NDArray[Any]
Given: TypeAlias = Array | None
Lengths: TypeAlias = Sequence[int]

# A library before MPI 4 counts with 31 bits.
_COUNTS_ALL = MPI.Get_version() >= (4, 0)
_LARGEST_COUNT = (1 << 31) - 1
_LARGEST_UNIT = 1 << 20

# The MPI op, and the kinds of dtypes for which it is used.
_OPS = {
    "sum": (MPI.SUM, "iufc"),
    "product": (MPI.PROD, "iuf"),
    "min": (MPI.MIN, "iu"),
    "max": (MPI.MAX, "iu"),
    "bitwise_and": (MPI.BAND, "iu"),
    "bitwise_or": (MPI.BOR, "iu"),
    "bitwise_xor": (MPI.BXOR, "iu"),
}


@lru_cache(maxsize=256)
def _datatype(dtype: np.dtype[Any]) -> MPI.Datatype:
    """The predefined MPI type of a reducible element."""
    return MPI.Datatype.fromcode(dtype.char)


def native(comm: Comm, collective: str, op: str | None, dtype: np.dtype[Any]) -> Native | None:
    """MPI's collective of that name as a function, or None if it is not used.

    The function raises ValueError on every rank for a buffer that MPI can't count, and
    CollectiveError if MPI fails on this rank, while other ranks may still be inside the call.
    """
    given: tuple[Any, ...] = (comm,)
    found = _MOVEMENTS.get(collective)
    if op is not None:
        found, (mpi_op, kinds) = _REDUCTIONS.get(collective), _OPS[op]
        given = comm, mpi_op
        if dtype.kind not in kinds or dtype.itemsize < 4:
            return None
    if found is None:
        return None

    def run(source: Given, target: Array, lengths: Lengths, root: int) -> None:
        if collective != "all_to_all":
            _check_countable(collective, target, lengths)
        try:
            found(*given, source, target, lengths, root)
        except MPI.Exception as error:
            reason = " ".join(error.Get_error_string().split())
            raise CollectiveError(
                f"MPI refused this rank's part of {collective}: {reason}"
            ) from error

    return run


def _check_countable(collective: str, target: Array, lengths: Lengths) -> None:
    """Raise ValueError, on every rank, for more bytes in all than the library can count."""
    nbytes = (sum(lengths) if lengths else len(target)) * target.itemsize
    if nbytes > _LARGEST_COUNT and not _COUNTS_ALL:
        raise in_step(
            ValueError(
                f"algorithm='native': {collective} of {nbytes} bytes: this MPI counts to"
                f" {_LARGEST_COUNT}, other algorithms have no such limit"
            )
        )


def _apart(buffer: Array) -> Array:
    """The buffer, or, if it is empty, another empty one at an address of its own.

    MPI may refuse equal source and target addresses even if one of them is empty, possibly on some
    ranks only; and an empty array's address may have a special meaning.
    """
    return buffer if len(buffer) else np.empty(1, buffer.dtype)[:0]


def _all_reduce(
    comm: Comm, op: MPI.Op, source: Given, target: Array, _: Lengths, root: int
) -> None:
    comm.Allreduce(MPI.IN_PLACE if source is None else _typed(source), _typed(target), op)


def _reduce(comm: Comm, op: MPI.Op, source: Given, target: Array, _: Lengths, root: int) -> None:
    if comm.rank == root:
        given = MPI.IN_PLACE if source is None else _typed(source)
        comm.Reduce(given, _typed(target), op, root)
    else:
        comm.Reduce(_typed(target if source is None else source), None, op, root)


def _reduce_scatter(
    comm: Comm,
    op: MPI.Op,
    source: Given,
    target: Array,
    lengths: Lengths,
    root: int,
) -> None:
    assert source is not None
    comm.Reduce_scatter(_typed(source), _typed(target), list(lengths), op)


def _typed(buffer: Array) -> list[Any]:
    return [_apart(buffer), _datatype(buffer.dtype)]


def _bytes(buffer: Array) -> list[Any]:
    return [_apart(buffer).view(np.uint8), MPI.BYTE]


def _parts(buffer: Array, lengths: Lengths, unit: MPI.Datatype = MPI.BYTE) -> list[Any]:
    counts = [length * buffer.itemsize // unit.size for length in lengths]
    return [_apart(buffer).view(np.uint8), counts, unit]


def _broadcast(comm: Comm, source: Given, target: Array, lengths: Lengths, root: int) -> None:
    comm.Bcast(_bytes(target), root)


def _all_gather(comm: Comm, source: Given, target: Array, lengths: Lengths, root: int) -> None:
    given: Any = MPI.IN_PLACE if source is None else _bytes(source)
    if len(set(lengths)) == 1:
        comm.Allgather(given, _bytes(target))
    else:
        comm.Allgatherv(given, _parts(target, lengths))


def _gather(comm: Comm, source: Given, target: Array, lengths: Lengths, root: int) -> None:
    assert source is not None
    joined = _parts(target, lengths) if comm.rank == root else None
    comm.Gatherv(_bytes(source), joined, root)


def _scatter(comm: Comm, source: Given, target: Array, lengths: Lengths, root: int) -> None:
    comm.Scatterv(None if source is None else _parts(source, lengths), _bytes(target), root)


def _all_to_all(comm: Comm, source: Given, target: Array, lengths: Lengths, root: int) -> None:
    outgoing, incoming = lengths[: comm.size], lengths[comm.size :]
    middle = sum(outgoing)
    halves = (target[:middle], outgoing), (target[middle:], incoming)
    if _COUNTS_ALL or target.nbytes <= _LARGEST_COUNT:
        comm.Alltoallv(*(_parts(*half) for half in halves))
        return
    # Possibly only this rank has so many bytes, so it counts the same bytes in larger units.
    size = math.gcd(_LARGEST_UNIT, *(length * target.itemsize for length in lengths))
    unit = MPI.BYTE.Create_contiguous(size).Commit()
    try:
        comm.Alltoallv(*(_parts(*half, unit) for half in halves))
    finally:
        unit.Free()


def _all_to_all_equal(
    comm: Comm, source: Given, target: Array, lengths: Lengths, root: int
) -> None:
    assert source is not None
    comm.Alltoall(_bytes(source), _bytes(target))


_REDUCTIONS: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
}
_MOVEMENTS: dict[str, Callable[..., None]] = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_equal": _all_to_all_equal,
}
