"""Every collective on device arrays, over a simulated NCCL, against plain NumPy."""

import ml_dtypes
import numpy as np
import pytest

from collectives import algorithms
from tests.collectives import oracle
from tests.devices.gpu_worlds import run, same, simulated
from tests.slow import slow

SIZES = [1, 3, *slow(2, 5)]


# An id that is "mpi" would be a mark to pytest-mpi.
@pytest.mark.parametrize("backend", ["nccl", "auto", "mpi"], ids="over {}".format)
def test_all_reduce(backend):
    def program(comm, cuda):
        for op, dtype in oracle.PAIRS:
            inputs = oracle.values(3, (4, 5), dtype)
            with oracle.case(op, dtype):
                array = cuda.from_host(inputs[comm.rank])
                same(comm.all_reduce(array, op), oracle.reduced(op, inputs))
                if oracle.reduced(op, inputs).dtype == dtype:
                    assert comm.all_reduce(array, op, out=array) is array
                    same(array, oracle.reduced(op, inputs))

    run(3, program, backend=backend)


@pytest.mark.parametrize("backend", ["nccl", "auto", "mpi"])
@pytest.mark.parametrize("size", SIZES)
def test_every_other_collective(size, backend):
    inputs = oracle.values(size, (7, 3), np.float32)
    lengths = [(rank * 2) % 5 for rank in range(size)]
    ragged = [oracle.value(rank, (2, lengths[rank]), np.int16) for rank in range(size)]
    total = oracle.reduced("sum", inputs)

    def program(comm, cuda):
        rank, root = comm.rank, comm.size - 1
        array = cuda.from_host(inputs[rank])
        same(comm.all_gather(array), np.concatenate(inputs))
        same(comm.all_gather(cuda.from_host(ragged[rank]), axis=1), np.concatenate(ragged, axis=1))
        same(
            comm.all_gather(array, out=cuda.empty((7 * size, 3), np.dtype("f4"))),
            np.concatenate(inputs),
        )
        reduced = comm.reduce(array, root=root)
        assert (reduced is None) == (rank != root)
        if rank == root:
            same(reduced, total)
        for axis in (0, 1):
            block = comm.reduce_scatter(array, "mean", axis=axis)
            same(block, np.array_split((total / size).astype("f4"), size, axis=axis)[rank])
        gathered = comm.gather(cuda.from_host(ragged[rank]), root=root, axis=1)
        assert (gathered is None) == (rank != root)
        if rank == root:
            same(gathered, np.concatenate(ragged, axis=1))
        out = cuda.empty((7 * size, 3), np.dtype("f4")) if rank == root else None
        assert comm.gather(array, root=root, out=out) is out
        if rank == root:
            same(out, np.concatenate(inputs))
        whole = cuda.from_host(total) if rank == root else None
        for axis in (0, 1):
            part = comm.scatter(whole, root=root, axis=axis)
            expected = np.array_split(total, size, axis=axis)[rank]
            if backend == "mpi" and rank != root:
                np.testing.assert_array_equal(part, expected)
            else:
                same(part, expected)
            out = cuda.empty(expected.shape, np.dtype("f4"))
            assert comm.scatter(whole, root=root, axis=axis, out=out) is out
            same(out, expected)
        given = cuda.from_host(inputs[rank])
        assert comm.broadcast(given, root=root) is given
        same(given, inputs[root])
        blocks = [
            cuda.from_host(oracle.value(rank, (peer, 2), np.complex64)) for peer in range(size)
        ]
        came = comm.all_to_all(blocks)
        for peer, block in enumerate(came):
            same(block, oracle.value(peer, (rank, 2), np.complex64))

    run(size, program, backend=backend)


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
# Prefix reductions are staged through the host.
PAIRS = [pair for pair in algorithms.pairs() if "scan" not in pair[0]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("collective", "algorithm"), PAIRS)
def test_schedules_run_over_messages_of_nccl(collective, algorithm, size):
    inputs = oracle.values(size, (9,), np.float32)

    def program(comm, cuda):
        rank, array = comm.rank, cuda.from_host(inputs[comm.rank])
        call = getattr(comm, collective)
        if collective == "all_to_all":
            came = call([array[peer:] for peer in range(size)], algorithm=algorithm)
            for peer, block in enumerate(came):
                same(block, inputs[peer][rank:])
            return
        given = None if collective == "scatter" and rank else array
        op = ("mean",) if collective in REDUCING else ()
        result = call(given, *op, algorithm=algorithm)
        mean = (oracle.reduced("sum", inputs) / np.float32(size)).astype("f4")
        whole = np.concatenate(inputs)
        expected = {
            "all_reduce": mean,
            "reduce": mean if rank == 0 else None,
            "reduce_scatter": np.array_split(mean, size)[rank],
            "broadcast": inputs[0],
            "all_gather": whole,
            "gather": whole if rank == 0 else None,
            "scatter": np.array_split(inputs[0], size)[rank],
        }[collective]
        if expected is None:
            assert result is None
        else:
            same(result, expected)

    with simulated() as gpus:
        run(size, program, gpus=gpus[0], backend="nccl")
        names = {name for calls in gpus[1].calls.values() for name, *_ in calls}
        assert names & {"send", "receive"}
        assert not names & {"all_reduce", "broadcast", "all_gather"}


FLOATS = [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max", "sum"])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_on_any_rank_reaches_all(dtype, op, where):
    def program(comm, cuda):
        values = np.array([comm.rank, -comm.rank, -0.5], dtype)
        if comm.rank == where:
            values[1] = np.nan
        result = comm.all_reduce(cuda.from_host(values), op).get().astype(np.float64)
        assert np.isnan(result[1])
        expected = {"min": [0, -0.5], "max": [2, -0.5], "sum": [3, -1.5]}[op]
        assert result[[0, 2]].tolist() == expected

    run(3, program, backend="nccl")


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int8, np.int64])
def test_integers_wrap(dtype):
    largest = np.iinfo(dtype).max

    def program(comm, cuda):
        array = cuda.from_host(np.array([largest, 3], dtype))
        same(comm.all_reduce(array), np.array([largest, 3], dtype) + np.array([largest, 3], dtype))
        same(comm.all_reduce(array, "product"), np.array([largest, 3], dtype) ** 2)

    run(2, program, backend="nccl")


def test_nccl_is_asked_once_for_each_and_for_nothing_that_is_empty():
    def program(comm, cuda):
        array = cuda.from_host(np.full(3, comm.rank, np.float32))
        comm.all_reduce(array)
        comm.all_reduce(cuda.from_host(np.zeros((0, 4), np.float32)))
        comm.all_gather(array[:0])
        comm.reduce_scatter(array[:0])
        comm.broadcast(array, root=1)
        comm.all_gather(array)

    with simulated() as (gpus, nccl):
        run(2, program, gpus=gpus, backend="nccl")
        names = ["init_rank", "all_reduce", "broadcast", "all_gather", "destroy"]
        for rank in range(2):
            own = [name for name, *_ in nccl.calls[rank] if name != "unique_id"]
            assert [name for name in own if name in names] == own == names


def test_the_short_way_of_repeated_calls_reduces_what_is_there_now():
    """One rank's arrays need copies and use the general path: NCCL is called equally."""

    def program(comm, cuda):
        rows = cuda.from_host(np.zeros((3, 2), np.float32))
        for number in range(5):
            rows[...] = cuda.from_host(np.full((3, 2), number + comm.rank, np.float32))
            given = rows[:, 0] if comm.rank == 1 else cuda.from_host(rows[:, 0].get())
            same(comm.all_reduce(given), np.full(3, 3 * number + 3, np.float32))
            assert comm.all_reduce(given, "mean", out=given) is given
            same(given, np.full(3, number + 1, np.float32))
            other = cuda.from_host(np.zeros(3, np.float32))
            assert comm.all_reduce(given, out=other) is other
            same(other, np.full(3, 3 * number + 3, np.float32))
        assert len(comm._bound_calls) == 2
        overlapping = cuda.from_host(np.arange(4, dtype=np.float32))
        assert comm.all_reduce(overlapping[:3], out=overlapping[1:]).get().tolist() == [0, 3, 6]
        with pytest.raises(TypeError, match="out has dtype"):
            comm.all_reduce(given, out=cuda.from_host(np.zeros(3)))
        with pytest.raises(ValueError, match="op=\\[\\]"):
            comm.all_reduce(given, [])

    with simulated() as (gpus, nccl):
        run(3, program, gpus=gpus, backend="auto")
        kinds = [
            [name for name, *_ in nccl.calls[rank] if name != "unique_id"] for rank in range(3)
        ]
        assert kinds[0] == kinds[1] == kinds[2] == ["init_rank", *["all_reduce"] * 16, "destroy"]


def test_the_short_ways_of_movements_and_of_reduce_scatter():
    """As above: rank 1's arrays have gaps. Counts differ by rank, and from call to call."""
    size = 3

    def program(comm, cuda):
        rank = comm.rank
        wide = cuda.from_host(np.full((6, 4), -1, np.float32))
        for number in range(4):
            given = wide[:, :2] if rank == 1 else cuda.empty((6, 2), np.dtype("f4"))
            given[...] = cuda.from_host(np.full((6, 2), 10 * number + rank, np.float32))
            assert comm.broadcast(given, root=1) is given
            same(given, np.full((6, 2), 10 * number + 1, np.float32))
            given[...] = cuda.from_host(np.full((6, 2), 10 * number + rank, np.float32))
            block = comm.reduce_scatter(given, "mean")
            same(block, np.full((2, 2), 10 * number + 1, np.float32))
            out = cuda.empty((2, 2), np.dtype("f4"))
            assert comm.reduce_scatter(given, out=out) is out
            same(out, np.full((2, 2), 30 * number + 3, np.float32))
            for root in (1, 2):
                result = comm.reduce(given, root=root)
                assert (result is None) == (rank != root)
                if rank == root:
                    same(result, np.full((6, 2), 30 * number + 3, np.float32))
                    result[...] = cuda.from_host(np.zeros((6, 2), np.float32))
                assert comm.reduce(given, "mean", root=root, out=result) is result
                if rank == root:
                    same(result, np.full((6, 2), 10 * number + 1, np.float32))
            rows = np.arange(size, dtype=np.float32) + 10 * number
            joined = cuda.empty((18, 2), np.dtype("f4"))
            assert comm.all_gather(given, out=joined) is joined
            same(joined, np.repeat(rows, 6)[:, None].repeat(2, 1))
            own = given[: 1 + (rank + number) % 2]
            counts = [1 + (each + number) % 2 for each in range(size)]
            same(comm.all_gather(own), np.repeat(rows, counts)[:, None].repeat(2, 1))
            with pytest.raises(ValueError, match="out has 5 rows on rank 2"):
                comm.all_gather(given, out=joined[:5] if rank == 2 else None)
        bound = {key[1] for key in comm._bound_calls}
        assert bound == {"broadcast", "reduce", "reduce_scatter", "all_gather"}
        whole = cuda.from_host(np.full((6, 2), rank, np.float32))
        comm.reduce_scatter(whole, out=whole[1:3])
        same(whole[1:3], np.full((2, 2), 3, np.float32))
        with pytest.raises(TypeError, match="out has dtype"):
            comm.all_gather(whole, out=cuda.empty((18, 2), np.dtype("f8")))
        with pytest.raises(ValueError, match="axes"):
            comm.all_gather(whole, axis=2)

    with simulated() as (gpus, nccl):
        run(size, program, gpus=gpus, backend="nccl")
        for rank in range(size):
            names = [name for name, *_ in nccl.calls[rank]]
            each = {"broadcast": 4, "reduce": 16, "reduce_scatter": 9}
            each |= {"all_gather": 4, "group_start": 4}
            assert {name: names.count(name) for name in each} == each


def test_a_schedule_of_what_no_kernel_folds_is_refused_before_it_begins():
    def program(comm, cuda):
        eights = cuda.from_host(np.ones(4, ml_dtypes.float8_e5m2))
        with pytest.raises(TypeError, match="float8_e5m2"):
            comm.all_reduce(eights, algorithm="ring")
        same(
            comm.all_reduce(cuda.from_host(np.full(4, comm.rank + 1, np.float32))),
            np.full(4, 3, np.float32),
        )

    run(2, program, backend="nccl")
