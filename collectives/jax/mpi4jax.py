"""mpi4jax's functions: `import collectives.jax.mpi4jax as mpi4jax`.

As mpi4jax 0.9: they take arrays, mpi4py's communicators and its operations. Those whose results
only some ranks use run even where none is used.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import jax.numpy as jnp

from collectives.communicator import Communicator
from collectives.jax import functions
from collectives.jax.kinds import Call, rank_of
from collectives.jax.primitive import bind
from collectives.world import given

_OPS = {"SUM": "sum", "PROD": "product", "MIN": "min", "MAX": "max"}
_OPS |= {"BAND": "bitwise_and", "BOR": "bitwise_or", "BXOR": "bitwise_xor"}
_LOGICAL = {"LAND": "bitwise_and", "LOR": "bitwise_or", "LXOR": "bitwise_xor"}


def allreduce(x: Any, op: Any, *, comm: Any = None) -> Any:
    """The reduction of the ranks' arrays, on every rank."""
    return functions.all_reduce(x, _name(op, x), comm=_communicator(comm))


def scan(x: Any, op: Any, *, comm: Any = None) -> Any:
    """The reduction of the arrays of ranks 0 to r, on rank r."""
    return functions.scan(x, _name(op, x), comm=_communicator(comm))


def reduce(x: Any, op: Any, root: int, *, comm: Any = None) -> Any:
    """The reduction on the root; `x` on other ranks."""
    given_comm = _communicator(comm)
    result = functions.reduce(x, _name(op, x), root=root, comm=given_comm)
    return result if given_comm.rank == root else x


def allgather(x: Any, *, comm: Any = None) -> Any:
    """The ranks' arrays, stacked, on every rank."""
    return functions.all_gather(jnp.asarray(x)[None], comm=_communicator(comm))


def gather(x: Any, root: int, *, comm: Any = None) -> Any:
    """The ranks' arrays, stacked, on the root; `x` on other ranks."""
    given_comm = _communicator(comm)
    root = rank_of("root", root, given_comm)
    call = Call("all_gather", given_comm, kept=True, what=f"gather to rank {root}")
    (rows,) = bind([jnp.asarray(x)[None]], call)
    return rows if given_comm.rank == root else x


def alltoall(x: Any, *, comm: Any = None) -> Any:
    """Row i sent to rank i; row i received from it. `x` has a row for each rank."""
    given_comm = _communicator(comm)
    if problem := _problem("Alltoall", x, given_comm):
        raise ValueError(problem)
    return functions.all_to_all(x, comm=given_comm)


def bcast(x: Any, root: int, *, comm: Any = None) -> Any:
    """The root's array, on every rank; the other ranks' have its shape."""
    return _from_root(x, root, _communicator(comm))


def _from_root(x: Any, root: int, comm: Communicator, what: str | None = None) -> Any:
    root = rank_of("root", root, comm)
    call = Call("broadcast", comm, root=root, kept=True, what=what)
    (result,) = bind([jnp.asarray(x)], call)
    return result


def scatter(x: Any, root: int, *, comm: Any = None) -> Any:
    """Row r of the root's array, on rank r; the other ranks pass an array of the row's shape.

    If the root's array has no row for each rank, every rank raises a MismatchError; a world of one
    rank a ValueError.
    """
    given_comm = _communicator(comm)
    array = jnp.asarray(x)
    if given_comm.rank == root:
        if problem := _problem("Scatter", x, given_comm):
            # The other ranks, which compare their call, raise a MismatchError, too.
            given_comm.barrier(problem)
            raise ValueError(problem)
    else:
        array = jnp.broadcast_to(array, (given_comm.size, *array.shape))
    return _from_root(array, root, given_comm, "of a scatter")[given_comm.rank]


def send(x: Any, dest: int, *, tag: int = 0, comm: Any = None) -> None:
    """Send an array to a rank, which receives it with `recv`."""
    functions.send(x, dest, tag=tag, comm=_communicator(comm))


def recv(x: Any, source: int, *, tag: int = 0, comm: Any = None, status: Any = None) -> Any:
    """The array that a rank sends, of the shape and dtype of `x`. The source must be a rank.

    status: an `MPI.Status`, which is filled when the call is traced: it is the same in every run.
    """
    received = functions.recv(x, source, tag=tag, comm=_communicator(comm))
    _fill(status, source, tag, received)
    return received


def sendrecv(
    sendbuf: Any,
    recvbuf: Any,
    source: int,
    dest: int,
    *,
    sendtag: int = 0,
    recvtag: int | None = None,
    comm: Any = None,
    status: Any = None,
) -> Any:
    """The array of rank `source`, while `sendbuf` is sent to `dest`; both of one shape and tag.

    status: as of `recv`.
    """
    sent, received = jnp.asarray(sendbuf), jnp.asarray(recvbuf)
    if (sent.shape, sent.dtype) != (received.shape, received.dtype):
        raise ValueError(
            f"sendrecv: sendbuf is {sent.dtype}{list(sent.shape)} and recvbuf"
            f" {received.dtype}{list(received.shape)}: they must be of one kind; use send and recv"
        )
    if recvtag not in (None, sendtag):
        raise ValueError(f"sendrecv: recvtag={recvtag}: must be sendtag, {sendtag}")
    _fill(status, source, sendtag, received)
    given_comm = _communicator(comm)
    return functions.sendrecv(sent, source=source, dest=dest, tag=sendtag, comm=given_comm)


def has_cuda_support() -> bool:
    """Whether arrays stay on CUDA devices: no, they are exchanged through the host."""
    return False


def has_sycl_support() -> bool:
    """Whether arrays stay on SYCL devices: no."""
    return False


def barrier(*, comm: Any = None) -> None:
    """Wait for every rank."""
    functions.barrier(comm=_communicator(comm))


def _problem(call: str, x: Any, comm: Communicator) -> str | None:
    """None where there is a row for each rank."""
    if jnp.shape(x)[:1] == (comm.size,):
        return None
    return (
        f"{call} input must have shape (nproc, ...), where nproc is the number of ranks,"
        f" {comm.size}; it has shape {jnp.shape(x)}"
    )


def _fill(status: Any, source: int, tag: int, array: Any) -> None:
    if status is not None:
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_elements(sys.modules["mpi4py.MPI"].BYTE, array.size * array.dtype.itemsize)


def _communicator(comm: Any) -> Communicator:
    if comm is None or isinstance(comm, Communicator):
        return given(comm)
    return given(None) if comm == sys.modules["mpi4py.MPI"].COMM_WORLD else _over(comm)


def _over(comm: Any) -> Communicator:
    """A communicator over a duplicate of mpi4py's; the ranks make it together.

    It is an attribute of the communicator, by whose `Free` it is closed (MPI 4.1, section 7.7):
    MPI gives the handle of one that was freed to a new one.
    """
    made: Communicator | None = comm.Get_attr(_keyval())
    if made is None:
        made = Communicator(comm)
        comm.Set_attr(_keyval(), made)
    return made


@cache
def _keyval() -> int:
    """The key of the attribute, which `comm.Dup` does not copy."""
    mpi = sys.modules["mpi4py.MPI"]
    key: int = mpi.Comm.Create_keyval(delete_fn=lambda comm, key, made: made.close())
    return key


def _name(op: Any, x: Any) -> str:
    if isinstance(op, str):
        return op
    mpi = sys.modules["mpi4py.MPI"]
    ops = _OPS | _LOGICAL if jnp.asarray(x).dtype == bool else _OPS
    for name, ours in ops.items():
        if op == getattr(mpi, name):
            return ours
    raise ValueError(f"op={op!r} of {jnp.asarray(x).dtype}: must be MPI's {', '.join(ops)}")
