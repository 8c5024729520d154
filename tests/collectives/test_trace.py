"""All ranks' calls in one file, on one clock."""

import json
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives.consistency.flight_recorder import clock
from collectives.consistency.signature import Signature
from collectives.diagnostics import trace
from collectives.diagnostics.trace import RankCalls, clock_offsets, content
from collectives.transports.local import run


def entry(sequence, start, end, name="barrier"):
    return (sequence, Signature(name, nbytes=8 * sequence), "ring", start, end)


def complete(traced):
    return [event for event in traced["traceEvents"] if event["ph"] == "X"]


def test_events_are_in_microseconds_of_rank_0s_clock():
    ranks = [
        RankCalls("here", ([entry(1, 5_000, 9_500)], [])),
        RankCalls("there", ([entry(1, 1_005_500, 1_009_000)], [entry(4, 1_008_000, 1_008_001)])),
    ]
    events = complete(content(ranks, [0, 1_000_000]))
    assert [(event["pid"], event["tid"], event["ts"], event["dur"]) for event in events] == [
        (0, 0, 0.0, 4.5),
        (1, 0, 0.5, 3.5),
        (1, 1, 3.0, 0.001),
    ]
    assert events[2]["args"] == {
        "sequence": 4,
        "nbytes": 32,
        "algorithm": "ring",
        "call": "barrier()",
    }


def test_ranks_and_threads_have_names():
    names = [
        (event["name"], event["pid"], event["tid"], event["args"]["name"])
        for event in content([RankCalls("", ([], []))] * 2, [0, 0])["traceEvents"]
    ]
    assert ("process_name", 1, 0, "rank 1") in names
    assert ("thread_name", 0, 0, "blocking calls") in names
    assert ("thread_name", 1, 1, "asynchronous calls") in names
    assert len(names) == 6


SHIFT = 10**12


def test_clocks_of_other_machines_are_set_by_messages():
    """Ranks 1 and 3 are on other machines; only their clocks are requested."""
    machines = ["a", "b", "a", "c"]
    shifts = [0, SHIFT, 7 * SHIFT, -SHIFT]

    def one_rank(transport):
        return clock_offsets(transport, machines, lambda: clock() + shifts[transport.rank])

    offsets = run(4, one_rank)[0]
    assert (offsets[0], offsets[2]) == (0, 0)
    # A message between threads takes far less than this.
    assert offsets[1] == pytest.approx(SHIFT, abs=10**9)
    assert offsets[3] == pytest.approx(-SHIFT, abs=10**9)


def test_the_shortest_round_trip_counts():
    """Of ten readings nine returned late, and were taken at the end of the round trip."""
    times = SlowTrips()
    readings = iter(times.theirs)

    class Peer:
        rank, size = 0, 2

        def exchange(self, sends, receives):
            np.frombuffer(receives[0][1], np.int64)[0] = next(readings)

    assert clock_offsets(Peer(), ["a", "b"], times) == [0, SHIFT]


class SlowTrips:
    """Round trips of 1000 ns, except the fourth, of 10; the peer reads at their end or middle."""

    def __init__(self):
        trips = [10 if turn == 3 else 1000 for turn in range(10)]
        starts = [turn * 10_000 for turn in range(10)]
        self.times = [
            time
            for start, trip in zip(starts, trips, strict=True)
            for time in (start, start + trip)
        ]
        self.theirs = [
            SHIFT + start + (trip // 2 if trip == 10 else trip)
            for start, trip in zip(starts, trips, strict=True)
        ]
        self._next = iter(self.times)

    def __call__(self):
        return next(self._next)


def test_a_machine_without_such_files_goes_by_its_name(monkeypatch):
    known = trace.machine()
    assert trace.machine() == known
    monkeypatch.setattr(trace, "_CLOCK_FILES", ("/nonexistent",))
    monkeypatch.setattr(trace.platform, "node", lambda: "by name")
    assert trace.machine() == "by name" != known


@pytest.fixture
def path(comm, tmp_path):
    """The same on all ranks."""
    return comm.broadcast_object(str(tmp_path / "trace.json"))


def traced_by(comm, path):
    """The trace, on every rank."""
    comm.trace(path)
    traced = json.loads(Path(path).read_text(encoding="utf-8")) if comm.rank == 0 else None
    return comm.broadcast_object(traced)


@pytest.fixture
def fresh(comm):
    from mpi4py import MPI

    with collectives.Communicator(MPI.COMM_WORLD) as fresh:
        yield fresh


def spans(events, **wanted):
    """Start and end of each rank's part of a call, by rank."""
    found = [event for event in events if all(event[name] == wanted[name] for name in wanted)]
    return {event["pid"]: (event["ts"], event["ts"] + event["dur"]) for event in found}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_the_events_of_a_collective_overlap_on_all_ranks(comm, fresh, path):
    for _ in range(5):
        fresh.all_reduce(np.ones(300_000))
    events = complete(traced_by(fresh, path))
    numbers = {event["args"]["sequence"] for event in events if event["name"] == "all_reduce"}
    assert len(numbers) == 5
    for number in numbers:
        ranks = spans([event for event in events if event["args"]["sequence"] == number], tid=0)
        assert sorted(ranks) == list(range(comm.size))
        # No rank ends before the last one has begun.
        assert max(start for start, _ in ranks.values()) <= min(end for _, end in ranks.values())


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_calls_of_every_kind_and_rank_are_there(comm, fresh, path):
    fresh.all_reduce(np.ones(2, np.float32))
    fresh.broadcast(np.ones(100_000))
    fresh.all_reduce_async(np.ones(5)).wait()
    for _ in range(4):
        fresh.all_reduce_many([np.ones(50_000), np.ones(9)])
    # A call's entry is written after its result: that of the call before the last must exist.
    fresh.broadcast_async(np.ones(5)).wait()
    events = complete(traced_by(fresh, path))
    for thread, name in ((0, "all_reduce"), (0, "broadcast"), (1, "all_reduce")):
        assert sorted(spans(events, tid=thread, name=name)) == list(range(comm.size)), (
            thread,
            name,
        )
    event = next(event for event in events if event["name"] == "all_reduce")
    assert event["args"]["nbytes"] == 8
    assert event["args"]["algorithm"] == "slots"
    assert event["args"]["call"] == "all_reduce(sum, float32[2])"
    many = [event["args"]["algorithm"] for event in events if event["name"] == "all_reduce_many"]
    assert many == ["packed"] * 4 * comm.size


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_the_last_256_calls_of_every_rank(comm, fresh, path):
    for _ in range(300):
        fresh.barrier()
    events = complete(traced_by(fresh, path))
    for rank in range(comm.size):
        own = [event for event in events if event["pid"] == rank]
        assert len(own) == 256
        assert [event["ts"] for event in own] == sorted(event["ts"] for event in own)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_other_machines_take_part(comm, fresh, path, monkeypatch):
    """Each rank simulates another machine: its clock is the same one, so that little may change."""
    monkeypatch.setattr(trace, "machine", lambda: f"machine {comm.rank}")
    fresh.barrier()
    events = complete(traced_by(fresh, path))
    ends = [end for _, end in spans(events, name="barrier").values()]
    assert len(ends) == comm.size
    # Seconds, where clocks that were not compared could differ by days.
    assert max(ends) - min(ends) < 5e6


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_file_that_cant_be_written_is_everybodys_error(comm, fresh, path):
    with pytest.raises(OSError, match="trace"):
        fresh.trace(path + "/no/trace.json")
    fresh.trace(path)
    fresh.barrier()


def test_one_rank_alone(tmp_path):
    comm = collectives.Communicator(run(1, lambda transport: transport)[0])
    comm.barrier()
    comm.trace(tmp_path / "trace.json")
    traced = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert [event["name"] for event in complete(traced)] == ["barrier"]
