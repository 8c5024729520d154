"""A small trial of every collective, with values that depend on the rank.

Results are compared after all messages of a trial, so that a rank with a wrong result stays in step
with its peers. All values are small integers, which every dtype used here represents exactly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from collectives.communicator import Communicator
from collectives.doctor.attempt import Results

# Short and long, so that algorithms for both are tried.
_LENGTHS = (7, 100_003)


def _ramp(length: int, factor: float = 1) -> NDArray[np.float64]:
    return np.arange(length, dtype=np.float64) * factor


def _rank_sum(comm: Communicator) -> int:
    """The sum of rank + 1 over all ranks."""
    return comm.size * (comm.size + 1) // 2


def _ranks(comm: Communicator) -> NDArray[np.int_]:
    """What this rank gathers: its number, rank + 1 times."""
    return np.full(comm.rank + 1, comm.rank)


def _all_ranks(comm: Communicator) -> NDArray[np.int_]:
    """The concatenation of every rank's `_ranks`."""
    return np.repeat(np.arange(comm.size), np.arange(comm.size) + 1)


def _root(comm: Communicator) -> int:
    return comm.size - 1


def _on_root(comm: Communicator, value: Any) -> Any:
    return value if comm.rank == _root(comm) else None


def _each(actual: Sequence[Any], expected: Sequence[Any]) -> Results:
    """The number of results, and each of them."""
    yield len(actual), len(expected)
    yield from zip(actual, expected, strict=False)


def _all_reduce(comm: Communicator) -> Results:
    number, last = comm.rank + 1, comm.rank == comm.size - 1
    for length in _LENGTHS:
        yield comm.all_reduce(_ramp(length, number)), _ramp(length, _rank_sum(comm))
    for op, expected in (("min", 1), ("max", comm.size), ("mean", (comm.size + 1) / 2)):
        yield comm.all_reduce(np.full(7, float(number)), op), np.full(7, float(expected))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        yield comm.all_reduce(np.full(7, last, dtype)), np.ones(7, dtype)


def _reduce(comm: Communicator) -> Results:
    total = comm.reduce(_ramp(7, comm.rank + 1), root=_root(comm))
    yield total, _on_root(comm, _ramp(7, _rank_sum(comm)))


def _broadcast(comm: Communicator) -> Results:
    for length in _LENGTHS:
        given = _ramp(length, comm.rank + 1)
        yield comm.broadcast(given, root=_root(comm)), _ramp(length, comm.size)


def _scatter(comm: Communicator) -> Results:
    whole = _ramp(3 * comm.size + 1)
    block = comm.scatter(_on_root(comm, whole), root=_root(comm))
    yield block, np.array_split(whole, comm.size)[comm.rank]


def _reduce_scatter(comm: Communicator) -> Results:
    length = 3 * comm.size + 1
    expected = np.array_split(_ramp(length, _rank_sum(comm)), comm.size)[comm.rank]
    yield comm.reduce_scatter(_ramp(length, comm.rank + 1)), expected


def _scan(comm: Communicator) -> Results:
    below = comm.rank * (comm.rank + 1) // 2
    return [(comm.scan(_ramp(7, comm.rank + 1)), _ramp(7, below + comm.rank + 1))]


def _exscan(comm: Communicator) -> Results:
    below = comm.rank * (comm.rank + 1) // 2
    return [(comm.exscan(_ramp(7, comm.rank + 1)), _ramp(7, below))]


def _all_to_all(comm: Communicator) -> Results:
    received = comm.all_to_all([np.full(peer + 1, comm.rank) for peer in range(comm.size)])
    yield from _each(received, [np.full(comm.rank + 1, peer) for peer in range(comm.size)])


def _barrier(comm: Communicator) -> Results:
    comm.barrier()
    return ()


def _all_reduce_many(comm: Communicator) -> Results:
    kinds = ((3,), "float32"), ((2, 2), "int64"), ((), "float32")
    reduced = comm.all_reduce_many([np.full(shape, comm.rank + 1, kind) for shape, kind in kinds])
    yield from _each(reduced, [np.full(shape, _rank_sum(comm), kind) for shape, kind in kinds])


def _persistent_all_reduce_many(comm: Communicator) -> Results:
    """Other values at each call; the call is bound from the third on."""
    array, out = np.empty(7), np.empty(7)
    call = comm.persistent_all_reduce_many([array], out=[out])
    for factor in range(1, 5):
        array[:] = _ramp(7, factor * (comm.rank + 1))
        yield from _each([each.copy() for each in call()], [_ramp(7, factor * _rank_sum(comm))])


def _all_reduce_async(comm: Communicator) -> Results:
    """Each one alone; two at a time, and a blocking call between them."""
    yield from _asynchronously(_all_reduce, comm)
    handles = [comm.all_reduce_async(_ramp(7, comm.rank + extra)) for extra in (1, 2)]
    total = _rank_sum(comm)
    yield comm.all_reduce(comm.rank + 1), np.asarray(total)
    for handle, factor in zip(handles, (total, total + comm.size), strict=True):
        yield handle.wait(), _ramp(7, factor)


class _Asynchronous:
    """A communicator whose collectives are started, and then waited for."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        start = getattr(self._comm, f"{name}_async", None)
        if start is None:
            return getattr(self._comm, name)
        return lambda *arguments, **named: start(*arguments, **named).wait()


def _send_and_recv(comm: Communicator) -> Results:
    """Send round a ring: rank 0 sends first, the others forward."""
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.zeros(7)
    if comm.rank == 0:
        comm.send(_ramp(7), following)
    received = comm.recv(out, preceding)
    if comm.rank != 0:
        comm.send(_ramp(7, comm.rank + 1), following)
    expected = _ramp(7, comm.rank or comm.size)
    return [(received, expected), (out, expected)]


def _isend_and_irecv(comm: Communicator) -> Results:
    """All ranks at once round a ring, a short and a long array."""
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = [comm.irecv(np.zeros(length), preceding) for length in _LENGTHS]
    sent = [comm.isend(_ramp(length, comm.rank + 1), following) for length in _LENGTHS]
    expected = [_ramp(length, preceding + 1) for length in _LENGTHS]
    waited = [handle.wait() for handle in (*received, *sent)]
    return list(zip(waited, [*expected, None, None], strict=True))


def _mailbox(comm: Communicator) -> Results:
    """Send a short and a long array to the next rank."""
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    box = comm.mailbox()
    arrays = [_ramp(length, comm.rank + 1) for length in _LENGTHS]
    sent = box.send(following, {"rank": comm.rank}, arrays)
    received = box.receive(timeout=comm.deadline)
    sent.wait()
    box.close()
    if received is None:
        yield received, f"a message of rank {preceding}"
        return
    yield received.source, preceding
    yield received.header, {"rank": preceding}
    yield from _each(received.arrays, [_ramp(length, preceding + 1) for length in _LENGTHS])


def _all_gather_object(comm: Communicator) -> Results:
    objects = comm.all_gather_object({"rank": comm.rank})
    yield objects, [{"rank": rank} for rank in range(comm.size)]


def _empty_and_zeros(comm: Communicator) -> Results:
    empty = comm.empty((2, 3), "int32")
    empty[...] = comm.rank + 1
    yield comm.zeros((2, 3)), np.zeros((2, 3), "float32")
    yield comm.all_reduce(empty), np.full((2, 3), _rank_sum(comm), "int32")


def _empty_shared(comm: Communicator) -> Results:
    """The lowest rank of each node writes, all read; a node may have no such memory."""
    shared = comm.empty_shared(7, "float64")
    first = comm.all_gather_object(comm.node).index(comm.node)
    if shared is None:
        return
    if comm.local_rank == 0:
        shared[:] = _ramp(7, comm.rank + 1)
    comm.barrier()
    yield shared, _ramp(7, first + 1)


def _split(comm: Communicator) -> Results:
    """Split by parity, in reverse order; then all ranks but 0."""
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    part = comm.split(comm.rank % 2, key=comm.size - comm.rank)
    others = comm.split(None if comm.rank == 0 else 0)
    yield part is not None, True
    yield others is None, comm.rank == 0
    if part is not None:
        yield (part.rank, part.size), (members.index(comm.rank), len(members))
        yield part.all_gather(np.array([comm.rank])), np.array(members)
        part.close()
    if others is not None:
        others.close()


def _tune(comm: Communicator) -> Results:
    """Nothing is saved, because a trial must not change the choices of later runs."""
    texts = comm.all_gather_object(comm.tune(save=False))
    yield texts, [texts[0]] * comm.size


def _trace(comm: Communicator) -> Results:
    """Every rank's barrier must be in the trace."""
    comm.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        comm.trace(path)
        if comm.rank == 0:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            barriers = {each["pid"] for each in events if each["name"] == "barrier"}
            yield sorted(barriers), list(range(comm.size))


_BLOCKING: dict[str, Callable[[Any], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": lambda comm: [(comm.all_gather(_ranks(comm)), _all_ranks(comm))],
    "gather": lambda comm: [
        (comm.gather(_ranks(comm), root=_root(comm)), _on_root(comm, _all_ranks(comm)))
    ],
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "exscan": _exscan,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "all_reduce_many": _all_reduce_many,
}


def _asynchronously(trial: Callable[[Any], Results], comm: Communicator) -> Results:
    return trial(_Asynchronous(comm))


TRIALS: dict[str, Callable[[Communicator], Results]] = {
    **_BLOCKING,
    **{f"{name}_async": partial(_asynchronously, trial) for name, trial in _BLOCKING.items()},
    "persistent_all_reduce_many": _persistent_all_reduce_many,
    "all_reduce_async": _all_reduce_async,
    "send, recv": _send_and_recv,
    "isend, irecv": _isend_and_irecv,
    "mailbox": _mailbox,
    "broadcast_object": lambda comm: [
        (comm.broadcast_object({"rank": comm.rank}, _root(comm)), {"rank": _root(comm)})
    ],
    "all_gather_object": _all_gather_object,
    "empty, zeros": _empty_and_zeros,
    "empty_shared": _empty_shared,
    "split": _split,
    "tune": _tune,
    "trace": _trace,
}
NEEDS_PEERS = ("send, recv", "isend, irecv")
