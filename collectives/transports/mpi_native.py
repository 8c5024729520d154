"""MPI's own collectives, where they give what this package promises.

They are left aside where they don't: MPI's MIN and MAX may lose a NaN, its product of complex
numbers too; bool and 16-bit floats have no reductions in it; and Open MPI 5 saturates sums of 8-
and 16-bit integers in its vector loops, where they must wrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.transports.base import Native

Array: TypeAlias = NDArray[Any]
Lengths: TypeAlias = Sequence[int]

# The op and the kinds of dtypes that it is used for.
_OPS = {
    "sum": (MPI.SUM, "iufc"),
    "mean": (MPI.SUM, "iufc"),
    "product": (MPI.PROD, "iuf"),
    "min": (MPI.MIN, "iu"),
    "max": (MPI.MAX, "iu"),
}


@lru_cache(maxsize=256)
def _mpi_op(op: str, dtype: np.dtype[Any]) -> MPI.Op | None:
    found, kinds = _OPS[op]
    return found if dtype.kind in kinds and dtype.itemsize >= 4 else None


@lru_cache(maxsize=256)
def _datatype(dtype: np.dtype[Any]) -> MPI.Datatype:
    """The predefined MPI type of an element that can be reduced."""
    return MPI.Datatype.fromcode(dtype.char)


def native(
    comm: MPI.Intracomm, collective: str, op: str | None, dtype: np.dtype[Any]
) -> Native | None:
    """MPI's collective of that name as a function, or None where MPI can't be asked."""
    if op is None:
        move = _MOVEMENTS.get(collective)
        return partial(move, comm) if move else None
    reduction, mpi_op = _REDUCTIONS.get(collective), _mpi_op(op, dtype)
    return partial(reduction, comm, mpi_op) if reduction and mpi_op is not None else None


def _all_reduce(
    comm: MPI.Intracomm, op: MPI.Op, source: Array | None, target: Array, _: Lengths, root: int
) -> None:
    datatype = _datatype(target.dtype)
    given = MPI.IN_PLACE if source is None else [source, datatype]
    comm.Allreduce(given, [target, datatype], op)


def _reduce(
    comm: MPI.Intracomm, op: MPI.Op, source: Array | None, target: Array, _: Lengths, root: int
) -> None:
    datatype, receiving = _datatype(target.dtype), comm.rank == root
    given: Any = MPI.IN_PLACE if receiving else [target, datatype]
    if source is not None:
        given = [source, datatype]
    comm.Reduce(given, [target, datatype] if receiving else None, op, root)


def _reduce_scatter(
    comm: MPI.Intracomm,
    op: MPI.Op,
    source: Array | None,
    target: Array,
    lengths: Lengths,
    root: int,
) -> None:
    datatype = _datatype(target.dtype)
    comm.Reduce_scatter([source, datatype], [target, datatype], list(lengths), op)


def _own(comm: MPI.Intracomm, buffer: Array, lengths: Lengths) -> Array:
    """This rank's part of a buffer that holds one for each rank."""
    start = sum(lengths[: comm.rank])
    return buffer[start : start + lengths[comm.rank]]


def _bytes(buffer: Array) -> list[Any]:
    return [buffer.view(np.uint8), MPI.BYTE]


def _parts(buffer: Array, lengths: Lengths) -> list[Any]:
    counts = [length * buffer.itemsize for length in lengths]
    return [buffer.view(np.uint8), counts, MPI.BYTE]


def _broadcast(
    comm: MPI.Intracomm, source: Array | None, target: Array, lengths: Lengths, root: int
) -> None:
    comm.Bcast(_bytes(target), root)


def _all_gather(
    comm: MPI.Intracomm, source: Array | None, target: Array, lengths: Lengths, root: int
) -> None:
    given: Any = MPI.IN_PLACE if source is None else _bytes(source)
    if len(set(lengths)) == 1:
        comm.Allgather(given, _bytes(target))
    else:
        comm.Allgatherv(given, _parts(target, lengths))


def _gather(
    comm: MPI.Intracomm, source: Array | None, target: Array, lengths: Lengths, root: int
) -> None:
    if comm.rank == root:
        comm.Gatherv(MPI.IN_PLACE, _parts(target, lengths), root)
    else:
        comm.Gatherv(_bytes(_own(comm, target, lengths)), None, root)


def _scatter(
    comm: MPI.Intracomm, source: Array | None, target: Array, lengths: Lengths, root: int
) -> None:
    if comm.rank == root:
        comm.Scatterv(_parts(target, lengths), MPI.IN_PLACE, root)
    else:
        comm.Scatterv(None, _bytes(_own(comm, target, lengths)), root)


def _all_to_all(
    comm: MPI.Intracomm, source: Array | None, target: Array, lengths: Lengths, root: int
) -> None:
    outgoing, incoming = lengths[: comm.size], lengths[comm.size :]
    middle = sum(outgoing)
    comm.Alltoallv(_parts(target[:middle], outgoing), _parts(target[middle:], incoming))


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
}
