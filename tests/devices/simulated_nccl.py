"""NCCL over a simulated GPU: as asynchronous, unforgiving and lossy as the real one.

A call is work on a stream, which waits for the other ranks' counterparts; the last one moves
the data of all. Calls that don't match hang until they are aborted, as NCCL's do.
"""

import itertools
import os
import threading
from collections import defaultdict, deque
from functools import partial, reduce

import ml_dtypes
import numpy as np

from collectives.transports.nccl_driver import NcclDriver, NcclError
from tests.devices.simulated_arrays import memory_at

_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64"
DTYPES = [*map(np.dtype, _NAMES.split())]
DTYPES += map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
_INTERNAL, _INVALID_ARGUMENT, _INVALID_USAGE = 3, 4, 5
_TEXTS = {3: "internal error", 4: "invalid argument", 5: "invalid usage", 6: "remote error"}
_FOLDS = [np.add, np.multiply, np.fmax, np.fmin, np.add]  # fmax and fmin lose NaN
_AVERAGE = 4
_FLOAT8S = (10, 11)
_TO_ONE = ("send", "receive")
_SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
_UNGROUPED = ("init_rank", "abort", "destroy")


def _error(status):
    return NcclError(status, _TEXTS.get(status, "failure"))


def _folded(op, parts):
    dtype = parts[0].dtype
    wide = dtype if dtype.kind in "iu" or dtype.itemsize > 2 else np.dtype(np.float32)

    def fold(first, second):
        return _FOLDS[op](first.astype(wide), second.astype(wide)).astype(dtype)

    total = reduce(fold, parts)
    if op != _AVERAGE:
        return total
    size = np.asarray(len(parts), wide)
    truncates = dtype.kind in "iu"  # towards zero, as in C
    quotient = (total - np.fmod(total, size)) // size if truncates else total.astype(wide) / size
    return quotient.astype(dtype)


def _valid(size, count, dtype, op=0, root=0):
    if op == _AVERAGE and dtype in _FLOAT8S:
        return False
    limits = ((dtype, len(DTYPES)), (op or 0, len(_FOLDS)), (root, size))
    return count >= 0 and all(0 <= given < limit for given, limit in limits)


class _World:
    """The common state of the communicators of one unique id."""

    def __init__(self, size):
        self.size, self.uuids = size, {}
        self.boards = defaultdict(dict)  # by number of the collective: the ranks' calls
        self.lines = defaultdict(lambda: (deque(), deque()))  # by (sender, receiver)

    def post(self, call):
        """Add a rank's call; move the data where it is the last one."""
        comm = call.comm
        if call.name in _TO_ONE:
            sends = call.name == "send"
            line = self.lines[(comm.rank, call.root) if sends else (call.root, comm.rank)]
            line[not sends].append(call)
            if all(line):
                self._meet([line[0].popleft(), line[1].popleft()])
            return
        board = self.boards[comm.number]
        board[comm.rank] = call
        if len(board) == self.size:
            del self.boards[comm.number]
            self._meet([board[rank] for rank in range(self.size)])
        comm.number += 1

    def _meet(self, calls):
        if any(call.comm.ended for call in calls):
            return  # so that the others hang
        if len({call.signature for call in calls}) > 1:
            for call in calls:
                call.comm.error = _error(_INVALID_USAGE)
            return
        parts = [call.read() for call in calls]
        result = np.concatenate(parts) if calls[0].op is None else _folded(calls[0].op, parts)
        for call in calls:
            own = call.comm.rank * call.count if call.name == "reduce_scatter" else 0
            target = memory_at(call.target, call.target_length, call.dtype)
            target[...] = result[own : own + call.target_length]
            call.done = True


class _Comm:
    """One rank's end. `last` is the event after the last use."""

    def __init__(self, world, rank, owner, device):
        self.world, self.rank, self.owner, self.device = world, rank, owner, device
        self.number, self.error, self.last, self.running = 0, None, None, False
        self.launched = self.begun = 0  # launches outside of graphs
        self.ended = ""  # or "aborted", "destroyed"

    def check_alive(self):
        assert not self.ended, f"the communicator was {self.ended}"


class _Call:
    """One rank's part of a collective, or one side of a send; there `root` is the peer."""

    def __init__(self, name, comm, source, target, count, dtype, op=None, root=None):
        size = comm.world.size
        assert count > 0, "calls without elements are to be left out"
        self.name, self.comm, self.source, self.target = name, comm, source, target
        self.count, self.dtype, self.op, self.root = count, DTYPES[dtype], op, root
        self.done = False
        parts_read = {"reduce_scatter": size, "broadcast": comm.rank == root, "receive": 0}
        parts_written = {"all_gather": size, "reduce": comm.rank == root, "send": 0}
        self.source_length = count * parts_read.get(name, 1)
        self.target_length = count * parts_written.get(name, 1)
        self.signature = (count, dtype) if name in _TO_ONE else (name, count, dtype, op, root)

    def check_memory(self, cuda):
        """It is a GPU's, and source and target are separate or as NCCL's in-place rules require."""
        item, own = self.dtype.itemsize, self.comm.rank * self.count * self.dtype.itemsize
        source_end = self.source + self.source_length * item
        target_end = self.target + self.target_length * item
        for begin, end in ((self.source, source_end), (self.target, target_end)):
            assert begin == end or cuda.owns(begin, end - begin), "not memory of a GPU"
        if self.source_length and self.target_length:
            in_place = {"all_gather": own, "reduce_scatter": -own}.get(self.name, 0)
            apart = source_end <= self.target or target_end <= self.source
            assert apart or self.source == self.target + in_place, "source and target overlap"

    def read(self):
        return memory_at(self.source, self.source_length, self.dtype).copy()


class _Group(threading.local):
    """The calling thread's group: its calls, and the status of one that failed."""

    depth, calls, failed = 0, (), None


class SimulatedNccl(NcclDriver):
    """All ranks' NCCL: an `NcclDriver` whose calls belong to the calling thread's rank."""

    def __init__(self, cuda, wait_policy=20):
        self.cuda, self.wait_policy = cuda, wait_policy
        self.missing: dict[int, str] = {}  # by rank: the result of `problem`
        self.version_number = 23007
        self.calls, self.comms = defaultdict(list), []  # calls by rank: (name, arguments)
        self._numbers, self._worlds, self._failures = itertools.count(), {}, {}
        self._changed, self._group = threading.Condition(), _Group()

    def fail_next(self, rank, name, status):
        """Make this rank's next call of that name raise NcclError."""
        self._failures[rank, name] = status

    def alive(self):
        """The communicators that were neither destroyed nor aborted."""
        return [comm for comm in self.comms if not comm.ended]

    def problem(self):
        return self.missing.get(self.cuda.rank)

    def version(self):
        return self.version_number

    def unique_id(self):
        self._enter("unique_id", None)
        return b"%128d" % next(self._numbers)

    def init_rank(self, size, unique_id, rank):
        self._enter("init_rank", None, size, rank)
        with self._changed:
            world = self._worlds.setdefault(bytes(unique_id), _World(size))
            assert world.size == size
            assert rank in set(range(size)).difference(world.uuids)
            world.uuids[rank] = self.cuda.uuid(self.cuda.device)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(world.uuids) == size, self.wait_policy):
                raise _error(_INTERNAL)
            shares = self.version_number >= 23000 and os.environ.get(_SHARING) == "1"
            if len(set(world.uuids.values())) < size and not shares:
                raise _error(_INVALID_USAGE)
            comm = _Comm(world, rank, self.cuda.rank, self.cuda.device)
            self.comms.append(comm)
        return comm

    def enqueue(self, comm, function, *arguments):
        getattr(self, function)(comm, *arguments)

    def all_reduce(self, comm, source, target, count, dtype, op, stream):
        self._begin(stream, "all_reduce", comm, source, target, count, dtype, op)

    def reduce(self, comm, source, target, count, dtype, op, root, stream):
        self._begin(stream, "reduce", comm, source, target, count, dtype, op, root)

    def broadcast(self, comm, source, target, count, dtype, root, stream):
        self._begin(stream, "broadcast", comm, source, target, count, dtype, None, root)

    def all_gather(self, comm, source, target, count, dtype, stream):
        self._begin(stream, "all_gather", comm, source, target, count, dtype)

    def reduce_scatter(self, comm, source, target, count, dtype, op, stream):
        self._begin(stream, "reduce_scatter", comm, source, target, count, dtype, op)

    def send(self, comm, source, count, dtype, peer, stream):
        self._begin(stream, "send", comm, source, 0, count, dtype, None, peer)

    def receive(self, comm, target, count, dtype, peer, stream):
        self._begin(stream, "receive", comm, 0, target, count, dtype, None, peer)

    def group_start(self):
        self._enter("group_start", None)
        self._group.depth += 1

    def group_end(self):
        group = self._group
        assert group.depth > 0, "group_end without group_start"
        group.depth -= 1
        calls, failed = (), None
        if not group.depth:
            calls, failed, group.calls, group.failed = group.calls, group.failed, (), None
        self._enter("group_end", None)
        if failed is not None:
            raise _error(failed)
        if calls:
            assert len({(call.comm, stream) for call, stream in calls}) == 1, "one for a group"
            self._launch([call for call, _ in calls], calls[0][1])

    def async_error(self, comm):
        comm.check_alive()
        return comm.error

    def abort(self, comm):
        self._enter("abort", comm)
        with self._changed:
            comm.ended = "aborted"
            self._changed.notify_all()

    def destroy(self, comm):
        self._enter("destroy", comm)
        pending = comm.running or (comm.last and not comm.last.reached.is_set())
        assert not pending, "destroyed while its work was pending"
        comm.ended = "destroyed"

    def _enter(self, name, comm, *arguments):
        """Record the call, and fail where a test requests it."""
        assert not (self._group.depth and name in _UNGROUPED), "a group was not ended"
        rank = self.cuda.rank if comm is None else comm.owner
        self.calls[rank].append((name, arguments))
        if comm is not None:
            comm.check_alive()
        if (rank, name) in self._failures:
            self._fail(self._failures.pop((rank, name)))

    def _fail(self, status):
        self._group.failed = status if self._group.depth else None
        raise _error(status)

    def _begin(self, handle, name, comm, source, target, *arguments):
        self._enter(name, comm, *(each for each in arguments if each is not None), handle)
        if not _valid(comm.world.size, *arguments):
            self._fail(_INVALID_ARGUMENT)
        call, stream = _Call(name, comm, source, target, *arguments), self.cuda.streams[handle]
        call.check_memory(self.cuda)
        assert stream.device == comm.device, "the stream is another GPU's"
        if self._group.depth:
            self._group.calls += ((call, stream),)
            return
        assert name not in _TO_ONE or call.root != comm.rank, "to oneself, outside a group"
        self._launch([call], stream)

    def _launch(self, calls, stream):
        """Put the calls on the stream, which must follow the communicator's work on any stream."""
        comm, captured = calls[0].comm, stream.capturing()
        stream.put(partial(self._run, comm, calls, None if captured else comm.launched))
        if not captured:
            comm.launched, comm.last = comm.launched + 1, stream.record()

    def _run(self, comm, calls, number):
        """On the stream's thread: wait for the other ranks, or hang."""

        def ended():
            return comm.ended or all(call.done for call in calls)

        with self._changed:
            if comm.ended == "aborted":
                return
            comm.check_alive()
            assert not comm.running, "calls of a communicator overlap"
            assert number in (None, comm.begun), "calls of a communicator change their order"
            comm.running, comm.begun = True, comm.begun + (number is not None)
            for call in calls:
                call.done = False  # a graph runs it again
                comm.world.post(call)
            self._changed.notify_all()
            # The time limit is for `closed`, which has no notification.
            while not (self._changed.wait_for(ended, 0.1) or self.cuda.closed.is_set()):
                pass
            comm.running = False
