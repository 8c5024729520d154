"""MPI's own collectives, where they give what this package promises.

They are left aside where they don't: MPI's MIN and MAX may lose a NaN, bool and 16-bit floats have
no reductions in it, and its sums of such are undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.transports.base import Native

Array: TypeAlias = NDArray[Any]
_Lengths: TypeAlias = Sequence[int]

_OPS = {
    "sum": (MPI.SUM, "iufc"),
    "mean": (MPI.SUM, "iufc"),
    "product": (MPI.PROD, "iufc"),
    "min": (MPI.MIN, "iu"),
    "max": (MPI.MAX, "iu"),
}


@lru_cache(maxsize=256)
def _mpi_op(op: str, dtype: np.dtype[Any]) -> MPI.Op | None:
    found, kinds = _OPS[op]
    return found if dtype.kind in kinds and dtype != np.float16 else None


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
        return move(comm) if move else None
    reduction, mpi_op = _REDUCTIONS.get(collective), _mpi_op(op, dtype)
    return reduction(comm, mpi_op, _datatype(dtype)) if reduction and mpi_op is not None else None


def _all_reduce(comm: MPI.Intracomm, op: MPI.Op, datatype: MPI.Datatype) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        given = MPI.IN_PLACE if source is None else [source, datatype]
        comm.Allreduce(given, [target, datatype], op)

    return run


def _reduce(comm: MPI.Intracomm, op: MPI.Op, datatype: MPI.Datatype) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        receiving = comm.rank == root
        given: Any = MPI.IN_PLACE if receiving else [target, datatype]
        if source is not None:
            given = [source, datatype]
        comm.Reduce(given, [target, datatype] if receiving else None, op, root)

    return run


def _reduce_scatter(comm: MPI.Intracomm, op: MPI.Op, datatype: MPI.Datatype) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        start = sum(lengths[: comm.rank])
        own = target[start : start + lengths[comm.rank]]
        given = target.copy() if source is None else source
        comm.Reduce_scatter([given, datatype], [own, datatype], list(lengths), op)

    return run


def _broadcast(comm: MPI.Intracomm) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        comm.Bcast([target.view(np.uint8), MPI.BYTE], root)

    return run


def _counts(target: Array, lengths: _Lengths) -> list[int]:
    return [length * target.itemsize for length in lengths]


def _own(comm: MPI.Intracomm, target: Array, lengths: _Lengths) -> Array:
    start = sum(lengths[: comm.rank])
    return target[start : start + lengths[comm.rank]].view(np.uint8)


def _all_gather(comm: MPI.Intracomm) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        where = [target.view(np.uint8), _counts(target, lengths), MPI.BYTE]
        comm.Allgatherv(MPI.IN_PLACE, where)

    return run


def _gather(comm: MPI.Intracomm) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        where = [target.view(np.uint8), _counts(target, lengths), MPI.BYTE]
        if comm.rank == root:
            comm.Gatherv(MPI.IN_PLACE, where, root)
        else:
            comm.Gatherv([_own(comm, target, lengths), MPI.BYTE], None, root)

    return run


def _scatter(comm: MPI.Intracomm) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        whole = target if source is None else source
        if comm.rank == root:
            given = [whole.view(np.uint8), _counts(target, lengths), MPI.BYTE]
            comm.Scatterv(given, MPI.IN_PLACE, root)
        else:
            comm.Scatterv(None, [_own(comm, target, lengths), MPI.BYTE], root)

    return run


def _all_to_all(comm: MPI.Intracomm) -> Native:
    def run(source: Array | None, target: Array, lengths: _Lengths, root: int) -> None:
        outgoing, incoming = lengths[: comm.size], lengths[comm.size :]
        middle = sum(outgoing)
        comm.Alltoallv(
            [target[:middle].view(np.uint8), _counts(target, outgoing), MPI.BYTE],
            [target[middle:].view(np.uint8), _counts(target, incoming), MPI.BYTE],
        )

    return run


_REDUCTIONS = {"all_reduce": _all_reduce, "reduce": _reduce, "reduce_scatter": _reduce_scatter}
_MOVEMENTS = {
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
