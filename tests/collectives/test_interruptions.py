"""An exception at any moment of a call, as the handlers of signals raise them.

A rank that catches it and repeats the call gets the call's own result, or an error, and so do
the other ranks.
"""

import sys
from typing import NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.calls import Operation
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from collectives.transports import local
from collectives.waiting import wait_policy
from tests.collectives.interrupting import Interruption, InterruptionError, share_memory
from tests.slow import slow, slow_but

CALLS, INTERRUPTED_RANK = 3, 1
TIMES = 2
"""How often each place of a call is tried: in loops, the first time and the next."""


class Place(NamedTuple):
    """One rank of a world."""

    comm: Communicator
    rank: int
    size: int

    def given(self, call, length):
        return np.arange(length) + 10.0 * call + self.rank

    def total(self, call, length):
        ranks = self.size * (self.size - 1) / 2
        return self.size * (np.arange(length) + 10.0 * call) + ranks


class PathSelector:
    """A kind of call: the result of `make` must be that of `expect` after `looked_at`."""

    before = 1
    """How often the call is made before."""
    most = 40
    """How many of its places are tried, about."""

    def __init__(self, at):
        self.at = at

    def make(self, call):
        raise NotImplementedError

    def looked_at(self, result, call):
        return result

    def expect(self, call):
        return self.at.total(call, 3)


class Reduced(PathSelector):
    length, algorithm, op = 3, None, "sum"

    def make(self, call):
        array = self.at.given(call, self.length)
        return self.at.comm.all_reduce(array, self.op, algorithm=self.algorithm)

    def expect(self, call):
        return self.at.total(call, self.length)


class Small(Reduced):
    most = 1000


class SmallAndNew(Reduced):
    before = 0


class Mean(Reduced):
    op = "mean"

    def expect(self, call):
        return self.at.total(call, self.length) / self.at.size


class OfAList(PathSelector):
    before = 0

    def make(self, call):
        return self.at.comm.all_reduce(self.at.given(call, 3).tolist())


class IntoStrides(PathSelector):
    def make(self, call):
        return self.at.comm.all_reduce(self.at.given(call, 3), out=np.zeros(6)[::2])


class Large(Reduced):
    length = 20_000


class CopyInCopyOut(Reduced):
    length, algorithm = 3000, "staged"


class Schedule(Reduced):
    algorithm = "ring"


class Asynchronous(PathSelector):
    most = 10

    def make(self, call):
        return self.at.comm.all_reduce_async(self.at.given(call, 3))

    def looked_at(self, result, call):
        return result.wait()


class ToRoot(PathSelector):
    def make(self, call):
        return self.at.comm.reduce(self.at.given(call, 3))

    def expect(self, call):
        return None if self.at.rank else self.at.total(call, 3)


class Broadcast(PathSelector):
    def make(self, call):
        return self.at.comm.broadcast(self.at.given(call, 3))

    def expect(self, call):
        return self.at._replace(rank=0).given(call, 3)


class Gathered(PathSelector):
    def make(self, call):
        return self.at.comm.all_gather(self.at.given(call, 2), out=np.empty(2 * self.at.size))

    def expect(self, call):
        ranks = range(self.at.size)
        return np.concatenate([self.at._replace(rank=rank).given(call, 2) for rank in ranks])


class GatheredAnew(Gathered):
    def make(self, call):
        return self.at.comm.all_gather(self.at.given(call, 2))


class Sent(PathSelector):
    """A message to the other rank, whose arrival a barrier follows."""

    def make(self, call):
        if self.at.rank == INTERRUPTED_RANK:
            return self.at.comm.isend(self.at.given(call, 3), 0)
        return self.at.comm.irecv(np.zeros(3), INTERRUPTED_RANK)

    def looked_at(self, result, call):
        result = result.wait() if isinstance(result, collectives.Handle) else result
        self.at.comm.barrier()
        return result

    def expect(self, call):
        if self.at.rank == INTERRUPTED_RANK:
            return None
        return self.at._replace(rank=INTERRUPTED_RANK).given(call, 3)


class Received(Sent):
    def make(self, call):
        if self.at.rank == INTERRUPTED_RANK:
            return self.at.comm.recv(np.zeros(3), 0)
        return self.at.comm.isend(self.at.given(call, 3), INTERRUPTED_RANK)

    def expect(self, call):
        return self.at._replace(rank=0).given(call, 3) if self.at.rank else None


class Scattered(PathSelector):
    def make(self, call):
        return self.at.comm.reduce_scatter(self.at.given(call, 2 * self.at.size), out=np.empty(2))

    def expect(self, call):
        return self.at.total(call, 2 * self.at.size)[2 * self.at.rank :][:2]


class Many(PathSelector):
    before, most = 3, 1000

    def __init__(self, at):
        super().__init__(at)
        self.arrays, self.outs = ([np.empty(3), np.empty(2)] for _ in range(2))

    def make(self, call):
        for array in self.arrays:
            array[...] = self.at.given(call, len(array))
        return self.at.comm.all_reduce_many(self.arrays, out=self.outs)

    def looked_at(self, result, call):
        return np.concatenate(result)

    def expect(self, call):
        return np.concatenate([self.at.total(call, 3), self.at.total(call, 2)])


class NewMany(Many):
    before = 0


class Fused(Many):
    before = 1

    def __init__(self, at):
        super().__init__(at)
        like = [(each.shape, each.dtype) for each in self.arrays]
        self.fusion = collectives.Fusion(at.comm, like, bucket_bytes=24)
        self.arrays = self.fusion.views

    def make(self, call):
        for array in self.arrays:
            array[...] = self.at.given(call, len(array))
        return self.fusion.all_reduce()


class MadeFusion(PathSelector):
    def make(self, call):
        like = [((3,), float), ((2 + call,), float)]
        return collectives.Fusion(self.at.comm, like, bucket_bytes=24)

    def looked_at(self, result, call):
        result.views[1][...] = self.at.given(call, 2 + call)
        return result.all_reduce()[1]

    def expect(self, call):
        return self.at.total(call, 2 + call)


class Objects(PathSelector):
    def make(self, call):
        return self.at.comm.all_gather_object((call, self.at.rank))

    def expect(self, call):
        return [(call, rank) for rank in range(self.at.size)]


class AnObject(PathSelector):
    def make(self, call):
        return self.at.comm.broadcast_object((call, self.at.rank))

    def expect(self, call):
        return call, 0


class AllToAll(PathSelector):
    def make(self, call):
        ranks = range(self.at.size)
        return self.at.comm.all_to_all([self.at.given(call, 2) + rank for rank in ranks])

    def expect(self, call):
        ranks = range(self.at.size)
        return [self.at._replace(rank=rank).given(call, 2) + self.at.rank for rank in ranks]


class Differing(PathSelector):
    """The interrupted rank divides one array; the parts of the others differ."""

    def make(self, call):
        ranks, given = range(self.at.size), self.at.given(call, 2)
        parts = [given + rank for rank in ranks]
        if self.at.rank == INTERRUPTED_RANK:
            return self.at.comm.all_to_all(np.concatenate(parts))
        parts[self.at.rank] = np.zeros(5)
        return self.at.comm.all_to_all(parts)[INTERRUPTED_RANK]

    def expect(self, call):
        if self.at.rank != INTERRUPTED_RANK:
            return self.at._replace(rank=INTERRUPTED_RANK).given(call, 2) + self.at.rank
        sent = [self.at._replace(rank=rank).given(call, 2) for rank in range(self.at.size)]
        return np.concatenate(sent) + self.at.rank


class Barrier(PathSelector):
    most = 1000

    def make(self, call):
        return self.at.comm.barrier(f"number {call}")

    def expect(self, call):
        return None


class Zeros(PathSelector):
    def make(self, call):
        return self.at.comm.zeros(10 + call)

    def looked_at(self, result, call):
        result += self.at.given(call, len(result))
        return self.at.comm.all_reduce(result)

    def expect(self, call):
        return self.at.total(call, 10 + call)


class Split(PathSelector):
    most = 10

    def make(self, call):
        return self.at.comm.split(0)

    def looked_at(self, result, call):
        return result.all_reduce(self.at.given(call, 3))


ROUTES = [
    *(Small, SmallAndNew, Mean, OfAList, IntoStrides, Large, CopyInCopyOut, Schedule, Asynchronous),
    *(
        ToRoot,
        Broadcast,
        Gathered,
        GatheredAnew,
        Sent,
        Received,
        Scattered,
        Many,
        NewMany,
        Fused,
        MadeFusion,
    ),
    *(Objects, AnObject, AllToAll, Differing, Barrier, Zeros, Split),
]
BY_DEFAULT = (Small, Large, IntoStrides, Schedule, Broadcast, Many, Objects)
BY_DEFAULT += (GatheredAnew, Sent, Received)


def program(route, interruption, deadline):
    """The outcome of each rank: the number of right results, and the error that ended it."""

    def run(transport):
        comm = Communicator(transport, deadline=30)
        made = route(Place(comm, transport.rank, transport.size))
        comm.deadline, right = deadline, 0
        try:
            for call in range(made.before + CALLS):
                here = transport.rank == INTERRUPTED_RANK and call == made.before
                result = again(interruption, made, call) if here else made.make(call)
                result, due = made.looked_at(result, call), made.expect(call)
                right += 1
                np.testing.assert_equal(result, due, f"call {call}, {interruption}")
        except RuntimeError as error:
            return right, error
        finally:
            if comm._duplicate.progress is not None:
                comm._duplicate.progress.close()
        return right, None

    return run


def again(interruption, made, call):
    """Make a call; where an exception is raised before it has returned, repeat it."""
    returned = False
    try:
        with interruption:
            result = made.make(call)
            returned = True
    except InterruptionError:
        assert not returned
        result = made.make(call)
    return result


@pytest.mark.parametrize("route", slow_but(ROUTES, *BY_DEFAULT))
def test_an_exception_at_any_moment_of_a_call(route, monkeypatch, tmp_path, slow):
    memory = share_memory(monkeypatch)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    for module in (wait_policy, local):
        monkeypatch.setattr(module, "CHECK_SECONDS", 0.001)
    # For these the other ranks wait in calls of another engine, which has not ended.
    deadline = 0.5 if route in (Asynchronous, Split) else 20
    size = 3 if issubclass(route, Small) else 2

    def run(place):
        memory.clear()
        interruption = Interruption(place)
        return interruption, local.run(size, program(route, interruption, deadline))

    def ended(place):
        """Whether the communicator ended, which must be the same on all ranks."""
        interruption, ranks = run(place)
        errors = [error for _, error in ranks]
        assert all(errors) or not any(errors), f"{interruption}: {errors}"
        if not any(errors):
            assert [right for right, _ in ranks] == [route.before + CALLS] * size
        return any(errors)

    passed = run(None)[0].places.items()
    places = [(*place, time) for place, times in passed for time in range(1, min(times, TIMES) + 1)]
    # An exception in a split may be raised on the other rank.
    every = slow and route is not Split
    last = places.pop()
    ends = [ended(place) for place in places[:: 1 if every else -(-len(places) // route.most)]]
    ended(last)
    assert not ends[0]
    assert any(ends)


SIGNALS = """
import random, signal, sys, time
import numpy as np
import collectives
from collectives import Communicator

class AlarmError(Exception):
    pass

def ring(*_):
    raise AlarmError

signal.signal(signal.SIGALRM, ring)
collectives.world(deadline=20)
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
chance, ended, alarms = random.Random(5), 0, 0

def call(comm, turn, seconds):
    global alarms
    array, result = np.full(length, turn + rank * 1.0), None
    try:
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        result = comm.all_reduce(array)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except AlarmError:
        alarms += 1
    # What has been returned was made.
    return comm.all_reduce(array) if result is None else result

for length in 1, 2_000, 300_000:
    for trial in range(4):
        comm = Communicator(MPI.COMM_WORLD, deadline=20)
        start = time.perf_counter()
        for turn in range(10):
            call(comm, turn, None)
        taken = (time.perf_counter() - start) / 10
        try:
            for turn in range(40):
                seconds = max(1e-6, chance.random() * taken) if rank == 1 and turn % 3 else None
                result = call(comm, turn, seconds)
                assert (result == size * turn + size * (size - 1) / 2).all(), (length, turn, result)
        except RuntimeError as error:
            assert "can't go on" in str(error), error
            ended += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert len(set(MPI.COMM_WORLD.allgather(ended))) == 1
assert ended
assert alarms or rank != 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, *slow(3)])
def test_an_alarm_at_any_moment(size, launch):
    """At random moments, as by a timer."""
    done = launch(size, [sys.executable, "-c", SIGNALS], timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["small", *slow("large")])
def test_the_others_hear_at_once_of_a_rank_that_was_interrupted(path, launch):
    body = f"""
import signal, time
import numpy as np
import collectives
comm = collectives.world(deadline=30)
def ring(*_):
    raise ValueError("from a handler")
signal.signal(signal.SIGALRM, ring)
array = np.ones({1 if path == "small" else 300_000})
comm.all_reduce(array)
if comm.rank == 1:
    # It has come, and waits for rank 0, which comes later.
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        comm.all_reduce(array)
    except ValueError as error:
        assert str(error) == "from a handler"
    try:
        comm.all_reduce(array)
    except RuntimeError as error:
        assert "ValueError('from a handler') ended a call of this rank" in str(error), error
    else:
        raise AssertionError("went on")
else:
    time.sleep(2)
    start = time.monotonic()
    try:
        for _ in range(2):
            comm.all_reduce(array)
    except collectives.RankFailedError as error:
        assert "rank 1 can't go on, since an exception ended a call there" in str(error), error
    else:
        raise AssertionError("went on")
    assert time.monotonic() - start < 15
"""
    done = launch(2, [sys.executable, "-c", body], timeout=60)
    assert done.returncode == 0, done.stderr


def test_an_interrupt_of_an_asynchronous_call_in_the_callers_thread_is_raised(monkeypatch):
    """Where MPI, or a GPU, lets no other thread make the call; the handle has the call's errors."""

    def interrupted(operation, engine):
        raise KeyboardInterrupt

    transport = local.alone()
    transport.threads = False
    comm = Communicator(transport)
    assert comm.all_reduce_async(np.ones(3)).wait().tolist() == [1, 1, 1]
    monkeypatch.setattr(Operation, "perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce_async(np.ones(3))
