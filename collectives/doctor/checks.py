"""A small trial of every collective, with values that depend on the rank.

Results are compared after all messages of a trial, so that a rank with a wrong result stays in step
with its peers. All values are small integers, which every dtype used here represents exactly.
"""

from __future__ import annotations

import json
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from collectives.communicator import Communicator
from collectives.doctor.attempt import WrongResultError

Results: TypeAlias = list[tuple[Any, Any]]
"""Pairs of the actual and the expected result."""

# Short and long, so that algorithms for both are tried.
_LENGTHS = (7, 100_003)
_LONGEST_VALUE = 90


def check(trial: Callable[[Communicator], Results], comm: Communicator) -> None:
    """Run a trial; WrongResultError for the first wrong result."""
    for actual, expected in trial(comm):
        if not _same(actual, expected):
            raise WrongResultError(f"got {_shown(actual)}, expected {_shown(expected)}")


def _same(actual: Any, expected: Any) -> bool:
    same_dtype = np.asarray(actual).dtype == np.asarray(expected).dtype
    return np.array_equal(actual, expected) and same_dtype


def _shown(value: Any) -> str:
    return textwrap.shorten(repr(value), _LONGEST_VALUE)


def _ramp(length: int, factor: float = 1) -> NDArray[np.float64]:
    return np.arange(length, dtype=np.float64) * factor


def _rank_sum(comm: Communicator) -> int:
    """The sum of rank + 1 over all ranks."""
    return comm.size * (comm.size + 1) // 2


def _all_reduce(comm: Communicator) -> Results:
    number, last = comm.rank + 1, comm.rank == comm.size - 1
    results: Results = [
        (comm.all_reduce(_ramp(length, number)), _ramp(length, _rank_sum(comm)))
        for length in _LENGTHS
    ]
    for op, expected in (("min", 1), ("max", comm.size), ("mean", (comm.size + 1) / 2)):
        results.append(
            (comm.all_reduce(np.full(7, float(number)), op), np.full(7, float(expected)))
        )
    for dtype in (np.float16, ml_dtypes.bfloat16):
        results.append((comm.all_reduce(np.full(7, last, dtype)), np.ones(7, dtype)))
    return results


def _reduce(comm: Communicator) -> Results:
    root = comm.size - 1
    expected = _ramp(7, _rank_sum(comm)) if comm.rank == root else None
    return [(comm.reduce(_ramp(7, comm.rank + 1), root=root), expected)]


def _broadcast(comm: Communicator) -> Results:
    root = comm.size - 1
    return [
        (comm.broadcast(_ramp(length, comm.rank + 1), root=root), _ramp(length, comm.size))
        for length in _LENGTHS
    ]


def _all_gather(comm: Communicator) -> Results:
    return [(comm.all_gather(np.full(comm.rank + 1, comm.rank)), _concatenated(comm.size))]


def _gather(comm: Communicator) -> Results:
    root = comm.size - 1
    expected = _concatenated(comm.size) if comm.rank == root else None
    return [(comm.gather(np.full(comm.rank + 1, comm.rank), root=root), expected)]


def _concatenated(size: int) -> NDArray[np.int_]:
    return np.repeat(np.arange(size), np.arange(size) + 1)


def _scatter(comm: Communicator) -> Results:
    root, whole = comm.size - 1, _ramp(3 * comm.size + 1)
    block = comm.scatter(whole if comm.rank == root else None, root=root)
    return [(block, np.array_split(whole, comm.size)[comm.rank])]


def _reduce_scatter(comm: Communicator) -> Results:
    length = 3 * comm.size + 1
    expected = np.array_split(_ramp(length, _rank_sum(comm)), comm.size)[comm.rank]
    return [(comm.reduce_scatter(_ramp(length, comm.rank + 1)), expected)]


def _all_to_all(comm: Communicator) -> Results:
    received = comm.all_to_all([np.full(peer + 1, comm.rank) for peer in range(comm.size)])
    expected = [np.full(comm.rank + 1, peer) for peer in range(comm.size)]
    return [(len(received), comm.size), *zip(received, expected, strict=False)]


def _barrier(comm: Communicator) -> Results:
    comm.barrier()
    return []


def _all_reduce_many(comm: Communicator) -> Results:
    shapes, dtypes = ((3,), (2, 2), ()), ("float32", "int64", "float32")
    pairs = list(zip(shapes, dtypes, strict=True))
    reduced = comm.all_reduce_many([np.full(*pair[:1], comm.rank + 1, pair[1]) for pair in pairs])
    expected = [np.full(shape, _rank_sum(comm), dtype) for shape, dtype in pairs]
    return [(len(reduced), len(pairs)), *zip(reduced, expected, strict=False)]


def _all_reduce_async(comm: Communicator) -> Results:
    handles = [comm.all_reduce_async(_ramp(7, comm.rank + extra)) for extra in (1, 2)]
    between = comm.all_reduce(comm.rank + 1)
    total = _rank_sum(comm)
    expected = (_ramp(7, total), _ramp(7, total + comm.size))
    waited = [handle.wait() for handle in handles]
    return [(between, np.asarray(total)), *zip(waited, expected, strict=True)]


def _broadcast_async(comm: Communicator) -> Results:
    root = comm.size - 1
    handle = comm.broadcast_async(_ramp(7, comm.rank + 1), root=root)
    return [(handle.wait(), _ramp(7, comm.size))]


def _all_gather_async(comm: Communicator) -> Results:
    handle = comm.all_gather_async(np.full(comm.rank + 1, comm.rank))
    return [(handle.wait(), _concatenated(comm.size))]


def _send_and_recv(comm: Communicator) -> Results:
    """Send round a ring: rank 0 sends first, the others forward."""
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = np.zeros(7)
    if comm.rank == 0:
        comm.send(_ramp(7), following)
        received = comm.recv(out, preceding)
        return [(received, _ramp(7, comm.size)), (out, _ramp(7, comm.size))]
    received = comm.recv(out, preceding)
    comm.send(_ramp(7, comm.rank + 1), following)
    return [(received, _ramp(7, comm.rank)), (out, _ramp(7, comm.rank))]


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
        return [(received, f"a message of rank {preceding}")]
    expected = [_ramp(length, preceding + 1) for length in _LENGTHS]
    results: Results = [(received.source, preceding), (received.header, {"rank": preceding})]
    return [*results, (len(received.arrays), 2), *zip(received.arrays, expected, strict=False)]


def _broadcast_object(comm: Communicator) -> Results:
    root = comm.size - 1
    return [(comm.broadcast_object({"rank": comm.rank}, root), {"rank": root})]


def _all_gather_object(comm: Communicator) -> Results:
    expected = [{"rank": rank} for rank in range(comm.size)]
    return [(comm.all_gather_object({"rank": comm.rank}), expected)]


def _empty_and_zeros(comm: Communicator) -> Results:
    empty = comm.empty((2, 3), "int32")
    empty[...] = comm.rank + 1
    total = np.full((2, 3), _rank_sum(comm), "int32")
    return [(comm.zeros((2, 3)), np.zeros((2, 3), "float32")), (comm.all_reduce(empty), total)]


def _empty_shared(comm: Communicator) -> Results:
    """The lowest rank of each node writes, all read; a node may have no such memory."""
    shared = comm.empty_shared(7, "float64")
    first = comm.all_gather_object(comm.node).index(comm.node)
    if shared is None:
        return []
    if comm.local_rank == 0:
        shared[:] = _ramp(7, comm.rank + 1)
    comm.barrier()
    return [(shared, _ramp(7, first + 1))]


def _split(comm: Communicator) -> Results:
    """Split by parity, in reverse order; then all ranks but 0."""
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    part = comm.split(comm.rank % 2, key=comm.size - comm.rank)
    others = comm.split(None if comm.rank == 0 else 0)
    results: Results = [(others is None, comm.rank == 0)]
    if part is not None:
        results += [(part.rank, members.index(comm.rank)), (part.size, len(members))]
        results.append((part.all_gather(np.array([comm.rank])), np.array(members)))
        part.close()
    if others is not None:
        others.close()
    return [(part is not None, True), *results]


def _tune(comm: Communicator) -> Results:
    """Nothing is saved, because a trial must not change the choices of later runs."""
    texts = comm.all_gather_object(comm.tune(save=False))
    return [(texts, [texts[0]] * comm.size)]


def _trace(comm: Communicator) -> Results:
    """Every rank's barrier must be in the trace."""
    comm.barrier()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        comm.trace(path)
        traced = json.loads(path.read_text(encoding="utf-8")) if comm.rank == 0 else None
    if traced is None:
        return []
    barriers = {each["pid"] for each in traced["traceEvents"] if each["name"] == "barrier"}
    return [(sorted(barriers), list(range(comm.size)))]


TRIALS: dict[str, Callable[[Communicator], Results]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "all_reduce_many": _all_reduce_many,
    "all_reduce_async": _all_reduce_async,
    "broadcast_async": _broadcast_async,
    "all_gather_async": _all_gather_async,
    "send, recv": _send_and_recv,
    "mailbox": _mailbox,
    "broadcast_object": _broadcast_object,
    "all_gather_object": _all_gather_object,
    "empty, zeros": _empty_and_zeros,
    "empty_shared": _empty_shared,
    "split": _split,
    "tune": _tune,
    "trace": _trace,
}
NEEDS_PEERS = "send, recv"
