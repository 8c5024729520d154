"""The data paths through shared memory, each forced, and the measurement of the fastest."""

import mmap
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Communicator
from collectives.bound.all_to_all import room_of_parts
from collectives.errors import RankFailedError
from collectives.shm import layout, migratory, online_tuning, peer_memory
from collectives.shm.addresses import address_of
from collectives.shm.layout import SEGMENT_BYTES, NodeMemory
from collectives.shm.node_barrier import NodeBarrier
from collectives.shm.online_tuning import OnlineTuning, PathTimes
from collectives.shm.peer_memory import PeerMemory
from collectives.shm.progress import ProgressCounters
from collectives.waiting.wait_policy import WaitPolicy
from tests.collectives.oracle import PAIRS, case, reduced, value, values

KINDS = {
    "all_reduce": lambda comm, array: comm.all_reduce(array),
    "reduce": lambda comm, array: comm.reduce(array),
    "scan": lambda comm, array: comm.scan(array),
    "reduce_scatter": lambda comm, array: comm.reduce_scatter(array),
    "broadcast": lambda comm, array: comm.broadcast(array),
    "all_gather": lambda comm, array: comm.all_gather(array[: len(array) // comm.size]),
    "gather": lambda comm, array: comm.gather(array[: len(array) // comm.size]),
    "all_to_all": lambda comm, array: comm.all_to_all(array),
    "scatter": lambda comm, array: comm.scatter(array, root=1),
}

WAYS = ["staged", "single_copy", "shared", "native"]
# Nothing, less than a line, more than a block of every path.
LENGTHS = [0, 1, 5, 40_000, 300_001]

on_ranks = pytest.mark.mpi
way = pytest.mark.parametrize("way", WAYS)


def normal(rank, length, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(length).astype(dtype)


@on_ranks
@way
def test_reductions(comm, way):
    for length in LENGTHS:
        with case("length", length):
            check_reductions(comm, way, length)


def check_reductions(comm, way, length):
    given = value(comm.rank, length, np.int64)
    expected = reduced("sum", values(comm.size, length, np.int64))
    array, out = given.copy(), np.full_like(given, -1)
    comm.all_reduce(array, out=out, algorithm=way)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(array, given)
    comm.all_reduce(array, out=array, algorithm=way)
    np.testing.assert_array_equal(array, expected)
    mine = np.array_split(expected, comm.size)[comm.rank]
    np.testing.assert_array_equal(comm.reduce_scatter(given, algorithm=way), mine)
    numbers = given.astype(np.float64)
    mean = comm.all_reduce(numbers, "mean", algorithm=way)
    np.testing.assert_array_equal(mean, expected / comm.size)
    part = comm.reduce_scatter(numbers, "mean", algorithm=way)
    np.testing.assert_array_equal(part, mine / comm.size)
    for root in range(comm.size):
        mean = comm.reduce(numbers, "mean", root=root, algorithm=way)
        assert (mean is None) == (comm.rank != root)
        assert mean is None or np.array_equal(mean, expected / comm.size)
        result = comm.reduce(given, root=root, algorithm=way)
        array = given.copy()
        in_place = comm.reduce(array, root=root, out=array, algorithm=way)
        if comm.rank == root:
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(in_place, expected)
        else:
            np.testing.assert_array_equal(array, given)


@on_ranks
@pytest.mark.parametrize("way", ["staged", "single_copy"])
def test_every_dtype(comm, way):
    for op, dtype in PAIRS:
        largest = 2 if op == "product" else 5
        array = value(comm.rank, 20_011, dtype, largest)
        expected = reduced(op, values(comm.size, 20_011, dtype, largest))
        with case(op, dtype):
            np.testing.assert_array_equal(comm.all_reduce(array, op, algorithm=way), expected)


@on_ranks
@way
def test_movements(comm, way):
    for length in LENGTHS:
        with case("length", length):
            check_movements(comm, way, length)


def check_movements(comm, way, length):
    size, rank = comm.size, comm.rank
    parts = [value(each, length + each % 2, np.int16) for each in range(size)]
    joined = np.concatenate(parts)
    np.testing.assert_array_equal(comm.all_gather(parts[rank], algorithm=way), joined)
    for root in range(size):
        block = value(rank, length, np.int16)
        comm.broadcast(block, root=root, algorithm=way)
        np.testing.assert_array_equal(block, value(root, length, np.int16))
        gathered = comm.gather(parts[rank], root=root, algorithm=way)
        if rank == root:
            np.testing.assert_array_equal(gathered, joined)
        mine = comm.scatter(joined if rank == root else None, root=root, algorithm=way)
        np.testing.assert_array_equal(mine, np.array_split(joined, size)[rank])


@on_ranks
@pytest.mark.ranks(2, 3, 5)
@way
def test_all_to_all(comm, way):
    if way == "single_copy":
        with pytest.raises(ValueError, match="single_copy"):
            comm.all_to_all([np.ones(3)] * comm.size, algorithm=way)
        return
    check_all_to_all(comm, way)


def check_all_to_all(comm, way):
    for length in LENGTHS:
        blocks = [value(comm.rank, length // (peer + 1), np.int32) for peer in range(comm.size)]
        for peer, block in enumerate(comm.all_to_all(blocks, algorithm=way)):
            expected = value(peer, length // (comm.rank + 1), np.int32)
            np.testing.assert_array_equal(block, expected)
        equal = np.concatenate([value(comm.rank + 2 * peer, length) for peer in range(comm.size)])
        every = [value(peer + 2 * comm.rank, length) for peer in range(comm.size)]
        result = comm.all_to_all(equal, algorithm=way)
        np.testing.assert_array_equal(result, np.concatenate(every))


@on_ranks
@pytest.mark.ranks(2, 3)
def test_a_reader_may_store_into_what_it_has_read(comm):
    way = "migratory"
    if comm.size > 2:
        with pytest.raises(ValueError, match="there is no such all_reduce"):
            comm.all_reduce(np.ones(3), algorithm=way)
        return
    for length in LENGTHS:
        with case("length", length):
            check_reductions(comm, way, length)
            check_movements(comm, way, length)
    check_all_to_all(comm, way)


@on_ranks
@pytest.mark.ranks(2, 3)
def test_the_only_reader_of_cache_lines_takes_them(comm, monkeypatch):
    taken, store = [], migratory._store
    monkeypatch.setattr(migratory, "_store", lambda lines: (taken.append(lines), store(lines)))
    with comm.split(0) as own:  # without registered arrays
        check_taken_lines(own, taken)


def check_taken_lines(comm, taken):
    lines, few = 400, 100  # of 64 bytes
    rank, size = comm.rank, comm.size
    theirs = np.frombuffer(comm._engine.node.steps.memory.words[rank - 1], np.uint8).ctypes.data

    def of_lines(number, dtype=np.float32):
        return value(rank, 64 * number // np.dtype(dtype).itemsize, dtype)

    forced = "migratory" if size == 2 else None
    calls = {
        "all_reduce": lambda: comm.all_reduce(of_lines(lines)),
        "all_reduce, converted": lambda: comm.all_reduce(of_lines(lines // 2, np.int32), "mean"),
        "all_reduce, few": lambda: comm.all_reduce(of_lines(few)),
        "staged": lambda: comm.all_reduce(of_lines(lines), algorithm="staged"),
        "migratory": lambda: comm.all_reduce(of_lines(lines), algorithm=forced),
        "its slices": lambda: comm.reduce(of_lines(lines), algorithm=forced),
        "its parts": lambda: comm.reduce_scatter(of_lines(size * lines), algorithm=forced),
        "reduce": lambda: comm.reduce(of_lines(lines)),
        "reduce_scatter": lambda: comm.reduce_scatter(of_lines(size * lines)),
        "broadcast": lambda: comm.broadcast(of_lines(lines), root=1),
        "all_gather": lambda: comm.all_gather(of_lines(lines)),
        "gather": lambda: comm.gather(of_lines(lines)),
        "all_to_all": lambda: comm.all_to_all(of_lines(size * lines)),
        "all_to_all, few": lambda: comm.all_to_all(of_lines(size * few)),
    }
    found = {}
    for name, call in calls.items():
        call()
        taken.clear()
        call()
        found[name] = sum(each.size for each in taken)
        assert all(theirs <= each.ctypes.data < theirs + SEGMENT_BYTES for each in taken), name
    on_root = lines * (rank == 0)
    expected = dict.fromkeys(calls, lines) | {"all_reduce, few": 0, "all_to_all, few": 0}
    expected |= {"its slices": lines if rank == 0 else lines // 2}
    expected |= {"staged": 0, "reduce": on_root, "gather": on_root, "broadcast": on_root}
    assert found == (expected if size == 2 else dict.fromkeys(calls, 0))


def test_taking_lines_stores_into_them():
    """A private mapping of a file has pages of its own where something was stored."""
    file = os.memfd_create("lines")
    os.write(file, bytes(range(256)) * 256)
    with mmap.mmap(file, 1 << 16, flags=mmap.MAP_PRIVATE) as pages:
        content = np.frombuffer(pages, np.float32)
        before, start = content.tobytes(), f"{content.ctypes.data:x}-"
        migratory.take_lines(content)
        assert content.tobytes() == before
        _, _, rest = Path("/proc/self/smaps").read_text().partition(f"\n{start}")
        assert re.search(r"Anonymous: +(\d+) kB", rest)[1] == "64"
        del content
    os.close(file)


@on_ranks
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dtype", "length"), [("float32", 8199), ("complex64", 1027), ("complex128", 1025)]
)
def test_which_nan_remains_does_not_depend_on_where_the_arrays_are(comm, dtype, length):
    """NumPy copies operands that overlap the result or are unaligned, and folds the copies."""
    words = np.dtype(dtype).itemsize // 4 * length
    payloads = np.arange(words, dtype=np.uint32) + 100_000 * comm.rank
    given = (0x7FC00000 + payloads).view(dtype)
    comm.all_reduce(given)
    overlapping, unaligned = np.zeros(len(given) + 3, dtype), bytearray(given.nbytes + 1)
    places = {
        "overlapping": (overlapping[3:], overlapping[:-3]),
        "unaligned": (np.frombuffer(unaligned, dtype, offset=1), None),
        "in place": (given, given),
    }
    for name, (array, out) in places.items():
        with case(name):
            array, out = (array, out) if comm.rank == 0 else (given.copy(), None)
            array[...] = given
            every = comm.all_gather_object(comm.all_reduce(array, out=out).tobytes())
            assert every[0] == every[1]


@on_ranks
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("in_place", [0, 1, 2], ids=["nobody", "rank 0", "everybody"])
@pytest.mark.parametrize("way", ["staged", "single_copy"])
def test_some_ranks_in_place(comm, way, in_place):
    """A rank that overwrites its input must wait for those that read it, in any call."""
    for _ in range(3):
        array = value(comm.rank, 400_001, np.int64)
        out = array if in_place == 2 or (in_place == 1 and comm.rank == 0) else None
        result = comm.all_reduce(array, out=out, algorithm=way)
        np.testing.assert_array_equal(result, reduced("sum", values(comm.size, 400_001, np.int64)))


@on_ranks
@pytest.mark.ranks(2, 3, 4, 5)
@pytest.mark.parametrize("length", [100, 9_001, 500_001])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.complex64])
def test_all_ways_give_the_bits_of_a_fold_in_rank_order(comm, length, dtype):
    arrays = [normal(rank, length, dtype) for rank in range(comm.size)]
    expected = arrays[0]
    for each in arrays[1:]:
        if dtype is np.float16:
            expected = (expected.astype(np.float32) + each.astype(np.float32)).astype(dtype)
        else:
            expected = expected + each
    own = arrays[comm.rank]
    registered = comm.empty(length, dtype)
    registered[:] = own
    results = [
        comm.all_reduce(own),
        comm.all_reduce(own, algorithm="staged"),
        comm.all_reduce(own, algorithm="single_copy"),
        comm.all_reduce(registered),
        comm.all_reduce(registered, out=comm.empty(length, dtype)),
        *comm.all_reduce_many([own, own[:1]])[:1],
        comm.all_reduce(own.copy(), out=registered),
        comm.all_reduce(own.copy(), out=own.copy(), algorithm="single_copy"),
    ]
    for result in results:
        assert result.tobytes() == expected.tobytes()
    mine = np.array_split(expected, comm.size)[comm.rank]
    for way in ("staged", "single_copy"):
        assert comm.reduce_scatter(own, algorithm=way).tobytes() == mine.tobytes()
        result = comm.reduce(own, root=comm.size - 1, algorithm=way)
        assert (result is None) == (comm.rank != comm.size - 1)
        assert result is None or result.tobytes() == expected.tobytes()


# The fastest


@on_ranks
@pytest.mark.ranks(2, 3, 5)
def test_all_ranks_go_the_same_ways(comm):
    """Although the time of a call differs by rank, and whether a rank has few or many bytes."""
    array, parts = normal(comm.rank, 30_000), normal(comm.rank, 10_000)
    # With ranks that share cores, there are no measurements before there are registered arrays.
    comm.empty(1)
    for turn in range(40):
        if turn % 5 == comm.rank:
            sum(range(20_000))
        comm.all_reduce(array, out=array if turn % 3 else None)
        comm.broadcast(array, root=turn % comm.size)
        comm.all_gather(parts)
        counts = [10_000 if (turn + rank) % 4 == 0 else 10 for rank in range(comm.size)]
        joined = comm.all_gather(parts[: counts[comm.rank]])
        assert joined.tolist() == [
            value
            for rank, count in enumerate(counts)
            for value in normal(rank, 10_000)[:count].tolist()
        ]
    ways = [entry[2] for entry in comm._engine.recorder.entries() if entry[1].nbytes]
    assert len(ways) > 150
    every = comm.all_gather_object(ways)
    assert every == [ways] * comm.size
    tried = {"staged", "single_copy"} | ({"migratory", "native"} if comm.size == 2 else set())
    all_reduces = {
        entry[2]
        for entry in comm._engine.recorder.entries()
        if entry[1].collective == "all_reduce" and entry[1].nbytes > 1 << 16
    }
    assert all_reduces >= tried
    assert "measured" in comm.explain("all_reduce", array.nbytes)


def run(entry, seconds, calls):
    """The choices of so many calls, with paths that take so long."""
    chosen = []
    for _ in range(calls):
        chosen.append(entry.choose())
        entry.learn(seconds[chosen[-1]])
    return chosen


@settings(max_examples=30)
@given(
    st.permutations(["a", "b", "c"]),
    st.floats(1e-6, 1e-2),
    st.floats(1.1, 10),
    st.floats(1.1, 10),
)
def test_the_quickest_way_is_taken_and_the_others_rarely(names, least, second, third):
    entry = PathTimes(["a", "b", "c"])
    seconds = dict(zip(names, (least, least * second, least * second * third), strict=True))
    assert set(run(entry, seconds, 6)) == set(names)
    # When it was first planned to try a path again, the fastest might not have been tried yet.
    run(entry, seconds, 2000)
    chosen = run(entry, seconds, 6000)
    assert chosen.count(names[0]) > 0.9 * len(chosen)
    lost = sum(seconds[way] for way in chosen) / (len(chosen) * least) - 1
    assert lost < 3 * online_tuning._TRIAL_SHARE


def test_the_first_calls_of_a_trial_do_not_count():
    entry, taken = PathTimes(["a", "b", "c"], tries=6), []
    seconds, first_seconds = {"a": 3, "b": 2, "c": 4}, {"a": 3, "b": 8, "c": 1.2}
    for _ in range(600):
        taken.append(entry.choose())
        early = taken[-3:] != [taken[-1]] * 3
        entry.learn((first_seconds if early else seconds)[taken[-1]])
    assert taken[18:60] == ["b"] * 42
    assert taken[100:].count("b") > 450


def test_a_delay_at_the_end_of_a_trial_does_not_count():
    entry = PathTimes(["a", "b"], tries=6)
    for call in range(30):
        path = entry.choose()
        entry.learn(100.0 if call == 5 else {"a": 2.0, "b": 1.0}[path])
    assert entry.choose() == "b"
    assert entry.seconds == {"a": 2.0, "b": 1.0}


@pytest.mark.parametrize("cold", [[], [4, 4], [4, 3, 2, 2], [0.3, 0.3]])
def test_trials_take_their_share_however_long_their_first_calls_take(cold):
    entry, seconds = PathTimes(["a", "b", "c"], tries=6), {"a": 1.0, "b": 1.1, "c": 2.0}
    last, row, lost = "", 0, 0.0
    for call in range(6000):
        path = entry.choose()
        row = row + 1 if path == last else 0
        last = path
        taken = seconds[path] * (cold[row] if row < len(cold) else 1)
        lost += (taken - 1) * (call >= 100)
        entry.learn(taken)
    assert lost < 6000 * 1.5 * online_tuning._TRIAL_SHARE


def test_a_path_of_which_little_is_expected_is_tried_later():
    entry = PathTimes(["a", "b"], {"b": 30})
    seconds = {"a": 1e-3, "b": 1e-4}
    assert set(run(entry, seconds, 30)) == {"a"}
    assert run(entry, seconds, 30)[-20:] == ["b"] * 20


def test_the_choice_follows_the_machine():
    entry = PathTimes(["a", "b"])
    run(entry, {"a": 1e-4, "b": 2e-4}, 100)
    # The chosen path gets slower: at once.
    assert run(entry, {"a": 5e-4, "b": 2e-4}, 30)[-20:].count("b") > 15
    # Another one gets faster: when it is tried the next time.
    assert run(entry, {"a": 1e-4, "b": 2e-4}, 400)[-50:].count("a") > 45


def test_one_call_that_was_held_up_changes_nothing():
    entry = PathTimes(["a", "b"])
    run(entry, {"a": 1e-4, "b": 2e-4}, 20)
    run(entry, {"a": 1.0, "b": 1.0}, 1)
    assert run(entry, {"a": 1e-4, "b": 2e-4}, 10) == ["a"] * 10


def test_the_choice_follows_the_machine_where_times_cost_a_message(monkeypatch):
    now = [0]
    monkeypatch.setattr(online_tuning.time, "perf_counter_ns", lambda: now[0])
    entry, seconds = PathTimes(["a", "b"]), {"a": 1e-4, "b": 8e-4}
    agreed = []

    def make(path):
        now[0] += int(seconds[path] * 1e9)

    def longest(nanoseconds):
        agreed.append(nanoseconds)
        return nanoseconds

    assert [entry.run(make, longest) for _ in range(200)][100:] == ["a"] * 100
    assert len(agreed) < 25
    seconds["a"] = 1e-1
    assert [entry.run(make, longest) for _ in range(350)][-20:].count("b") >= 18


def test_an_entry_learns_the_longest_time_of_any_rank():
    learnt, entry = OnlineTuning(), PathTimes(["a"])
    learnt.learn(2)
    for times in ([5000, 7000], [6000, 3000]):
        learnt.last = entry
        assert entry.choose() == "a"
        learnt.learn(max(times))
        # Not told twice, where a call of another kind came in between.
        learnt.learn(1)
    assert entry.seconds == {"a": 6e-6}


# The peers' memory


@on_ranks
@pytest.mark.ranks(2, 3)
def test_without_single_copies_on_one_rank_nobody_makes_them(comm, monkeypatch):
    from mpi4py import MPI

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(peer_memory, "_system_calls", tuple)
    with Communicator(MPI.COMM_WORLD) as other:
        array = value(comm.rank, 40_000)
        with pytest.raises(ValueError, match="single_copy"):
            other.all_reduce(array, algorithm="single_copy")
        expected = reduced("sum", values(comm.size, 40_000))
        for _ in range(8):
            np.testing.assert_array_equal(other.all_reduce(array), expected)
        ways = {entry[2] for entry in other._engine.recorder.entries()[-8:]}
        assert "single_copy" not in ways


def alone():
    """The progress counters of a single rank."""
    memory = NodeMemory([memoryview(bytearray(SEGMENT_BYTES))], 0, None)
    memory.publish_process()
    return ProgressCounters(memory, WaitPolicy(), [7])


def test_a_process_reads_and_writes_memory_by_address():
    memory = peer_memory.open_peer_memory(alone())
    assert memory is not None
    theirs, own = np.arange(1000), np.zeros(10, int)
    memory.read(0, address_of(theirs[500:]), own.nbytes, address_of(own))
    np.testing.assert_array_equal(own, np.arange(500, 510))
    own += 1
    memory.write(0, address_of(theirs), own.nbytes, address_of(own))
    np.testing.assert_array_equal(theirs[:11], [*range(501, 511), 10])


def test_an_array_that_can_not_be_written_has_an_address_too():
    array = np.arange(5)
    address = address_of(array)
    array.flags.writeable = False
    assert address_of(array) == address == array.ctypes.data
    assert address_of(np.empty(0)) > 0


def test_memory_that_is_not_there_and_a_process_that_died_are_told():
    steps = alone()
    steps._wait_policy.world_ranks = lambda: range(10, 20)
    memory = PeerMemory(steps, *peer_memory._system_calls())
    own = np.zeros(1)
    with pytest.raises(RankFailedError, match=r"memory of rank 7 \(world rank 17\).*Bad address"):
        memory.read(0, 64, 8, address_of(own))
    child = subprocess.Popen(["sleep", "60"])
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    steps.memory.own[peer_memory.PROCESS] = child.pid
    with pytest.raises(RankFailedError, match=r"rank 7 \(world rank 17\) has died"):
        PeerMemory(steps, *peer_memory._system_calls()).read(0, address_of(own), 8, address_of(own))


def test_only_a_rank_of_the_same_process_namespace_is_seen_to_have_died():
    memory = NodeMemory([memoryview(bytearray(SEGMENT_BYTES)) for _ in range(2)], 0, None)
    wait_policy = WaitPolicy()
    wait_policy.world_ranks = lambda: range(10, 20)
    barrier, theirs = NodeBarrier(memory, wait_policy, [7, 8]), memory.words[1]
    memory.publish_process()
    child = subprocess.Popen(["true"])
    child.wait()
    theirs[layout.PROCESS], theirs[layout.NAMESPACE] = child.pid, memory.own[layout.NAMESPACE]
    with pytest.raises(RankFailedError, match=r"rank 8 \(world rank 18\) has died"):
        barrier._check_alive()
    theirs[layout.NAMESPACE] += 1
    barrier._check_alive()


def test_more_numbers_than_there_is_room_for_overwrite_nothing():
    steps = alone()
    numbers = list(range(1, layout.MOST_NUMBERS + 2))
    assert steps.exchange_numbers(*numbers[:-1]) == [numbers[:-1]]
    steps.barrier()
    before = steps.memory.own.tolist()
    with pytest.raises(ValueError, match="17 numbers: at most 16"):
        steps.exchange_numbers(*numbers)
    assert steps.memory.own.tolist() == before


def test_another_process_of_that_number_is_no_rank(monkeypatch):
    """As in another process namespace: reading there gives other data than the rank published."""
    monkeypatch.setattr(
        ProgressCounters, "exchange_numbers", lambda self, *numbers: [tuple(n + 1 for n in numbers)]
    )
    steps = alone()
    assert not peer_memory._try(steps, PeerMemory(steps, *peer_memory._system_calls()))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("collective", KINDS)
def test_what_is_explained_runs(comm, collective):
    with comm.split(0) as own:
        # No rank stores its own part of these.
        most = (90 << 10,) * (collective in ("all_to_all", "scatter"))
        if collective == "scatter":
            # The root's kind travels, too.
            assert "in one step" not in own.explain(collective, room_of_parts(own.size), np.int64)
        for nbytes in (48, 6 << 10, 24 << 10, *most):
            array = np.full(nbytes // 8, own.rank + 1.0)
            for _ in range(3):
                KINDS[collective](own, array)
            explained = own.explain(collective, nbytes, np.float64)
            assert "in one step" in explained
            *_, last = own._engine.recorder.entries()
            assert last[2] == explained.split()[0], (nbytes, explained)
        array = np.full((1 << 20) // 8 // own.size * own.size, own.rank + 1.0)
        before = own.explain(collective, array.nbytes, np.float64)
        for _ in range(5):
            KINDS[collective](own, array)
        if "not yet measured" in before:
            assert "µs measured" in own.explain(collective, array.nbytes, np.float64)
