"""Device arrays by host staging, over the MPI of the environment."""

import ml_dtypes
import numpy as np
import pytest

from collectives import CollectiveError, Communicator
from collectives.gpu.host_path import CHUNK_BYTES
from tests.collectives import oracle
from tests.devices.gpu_worlds import run, same, simulated
from tests.devices.simulated_arrays import plain
from tests.slow import slow


@pytest.fixture
def staged(comm):
    """A communicator of the world whose device arrays use host staging, and its GPU."""
    from mpi4py import MPI

    with simulated() as (gpus, _):
        gpus.be_rank(comm.rank, 0)
        with Communicator(MPI.COMM_WORLD, backend="mpi", deadline=60) as own:
            yield own, gpus


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 5)
def test_all_reduce_over_mpi(staged):
    comm, gpus = staged
    for op, dtype in oracle.PAIRS:
        inputs = oracle.values(comm.size, (5, 3), dtype)
        with oracle.case(op, dtype):
            array = gpus.from_host(inputs[comm.rank])
            same(comm.all_reduce(array, op), oracle.reduced(op, inputs))
            same(array, inputs[comm.rank])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("more", [0, 1, *slow(777)])
def test_large_arrays_go_in_chunks(staged, more):
    """Several chunks, the last of which is short; the GPU copies one while another is sent."""
    comm, gpus = staged
    length = 2 * CHUNK_BYTES // 8 + more
    inputs = oracle.values(comm.size, (length,), np.float64)
    array = gpus.from_host(inputs[comm.rank])
    same(comm.all_reduce(array), oracle.reduced("sum", inputs))
    root = comm.size - 1
    reduced = comm.reduce(array, "max", root=root)
    assert (reduced is None) == (comm.rank != root)
    if reduced is not None:
        same(reduced, oracle.reduced("max", inputs))
    same(array, inputs[comm.rank])
    assert comm.broadcast(array, root=root) is array
    same(array, inputs[root])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_the_other_collectives_over_mpi(staged):
    comm, gpus = staged
    inputs = oracle.values(comm.size, (7, 3), np.float32)
    array = gpus.from_host(inputs[comm.rank])
    same(comm.all_gather(array[comm.rank :]), np.concatenate([x[r:] for r, x in enumerate(inputs)]))
    block = comm.reduce_scatter(array, axis=1)
    same(block, np.array_split(oracle.reduced("sum", inputs), comm.size, axis=1)[comm.rank])
    gathered = comm.gather(array, root=1)
    if gathered is not None:
        same(gathered, np.concatenate(inputs))
    part = comm.scatter(array if comm.rank == 1 else None, root=1)
    expected = np.array_split(inputs[1], comm.size)[comm.rank]
    np.testing.assert_array_equal(part.get() if comm.rank == 1 else part, expected)
    for peer, came in enumerate(comm.all_to_all([array[rank:] for rank in range(comm.size)])):
        same(came, inputs[peer][comm.rank :])


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_forced_algorithms_and_mismatches_over_mpi(staged):
    comm, gpus = staged
    inputs = oracle.values(2, (9,), np.float32)
    array = gpus.from_host(inputs[comm.rank])
    same(comm.all_reduce(array, algorithm="ring"), oracle.reduced("sum", inputs))
    with pytest.raises(CollectiveError, match="different shapes"):
        comm.all_reduce(array[comm.rank :])
    same(comm.all_reduce(array), oracle.reduced("sum", inputs))


def test_the_callers_stream_is_waited_for_and_waits():
    def program(comm, cuda):
        stream = cuda.new_stream()
        with cuda.on(stream):
            array = cuda.from_host(np.zeros(3, np.float32))
            cuda.slow(stream, 0.2)
            cuda.put(stream, lambda: plain(array).fill(comm.rank + 1))
            seen = []
            result = comm.all_reduce(array)
            cuda.put(stream, lambda: seen.extend(plain(result).tolist()))
            stream.synchronize()
        assert seen == [3.0] * 3

    run(2, program, backend="mpi")


def test_pinned_memory_is_used_again_in_the_order_of_the_stream():
    """Calls in a row, of growing sizes, without a wait in between."""

    def program(comm, cuda):
        results = []
        for length in (3, 3, 50, 7, 5000):
            array = cuda.from_host(np.arange(length) + comm.rank)
            results.append((length, comm.all_reduce(array)))
        for length, result in results:
            same(result, 2 * np.arange(length) + 1)

    run(2, program, backend="mpi")


def test_a_graph_can_not_capture_it():
    def program(comm, cuda):
        array = cuda.from_host(np.ones(3))
        stream = cuda.new_stream()
        with cuda.on(stream):
            stream.begin_capture()
            with pytest.raises(RuntimeError, match="can't capture"):
                comm.all_reduce(array, out=array)
            stream.end_capture()
        same(comm.all_reduce(array), np.full(3, 2.0))

    run(2, program, backend="mpi")


def test_a_refused_dtype_leaves_the_communicator_usable():
    def program(comm, cuda):
        refused = cuda.from_host(np.ones(3, ml_dtypes.float8_e5m2))
        with pytest.raises(TypeError, match="float8_e5m2"):
            comm.all_reduce(refused)
        same(comm.all_reduce(cuda.from_host(np.full(3, comm.rank))), np.full(3, 1))

    run(2, program, backend="mpi")


@pytest.mark.parametrize("backend", ["mpi", "nccl"], ids="over {}".format)
def test_a_rank_with_nothing_to_exchange_takes_part(backend):
    """Rank 2 neither sends nor receives anything, while the others exchange."""

    def program(comm, cuda):
        lengths = [0, 0, 0] if comm.rank == 2 else [3, 3, 0]
        given = [cuda.from_host(np.full(n, comm.rank, np.float32)) for n in lengths]
        for _ in range(3):
            came = [block.get().tolist() for block in comm.all_to_all(given)]
        return came

    made = run(3, program, backend=backend)
    assert made[0] == [[0.0] * 3, [1.0] * 3, []]
    assert made[2] == [[], [], []]
