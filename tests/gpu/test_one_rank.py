"""Real NCCL between the GPU and itself: calls, dtypes, streams and graphs, without reductions.

NCCL copies where there is one rank; `test_two_ranks` covers reductions.
"""

import numpy as np
import pytest

from tests.collectives import oracle
from tests.gpu import programs

pytestmark = pytest.mark.gpu

MOVED = [*oracle.DTYPES, *programs.FLOAT8S]


def test_reductions(alone, gpu):
    for op, dtype in oracle.PAIRS:
        with oracle.case(op, dtype):
            programs.all_reduce(alone, gpu, op, dtype)
            programs.other_reductions(alone, gpu, op, dtype)


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", programs.FLOAT8S, ids=str)
def test_reductions_of_8_bit_floats(alone, gpu, op, dtype):
    if gpu.capability(gpu.current_device()) < (9, 0) and op in ("sum", "mean", "product"):
        pytest.skip("this GPU doesn't add 8-bit floats")
    programs.all_reduce_8_bit_floats(alone, gpu, op, dtype)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_stays_nan(alone, gpu, op, dtype):
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1, -1], dtype)
    programs.check(alone.all_reduce(gpu.from_host(values), op), values)


def test_movements(alone, gpu):
    for dtype in MOVED:
        with oracle.case(dtype):
            programs.gathers(alone, gpu, dtype)
            programs.other_movements(alone, gpu, dtype)
            programs.strided(alone, gpu, dtype)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_many(alone, gpu, op):
    programs.many(alone, gpu, op, [np.float32, np.float16, np.int32, oracle.DTYPES[-1]])


def test_asynchronous(alone, gpu):
    programs.asynchronous(alone, gpu)
    programs.runs_beside(alone, gpu)


def test_the_call_follows_the_callers_stream(alone, gpu):
    programs.follows_the_stream(alone, gpu)


def test_the_stream_that_the_program_uses_stays_current(alone, gpu):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    array = gpu.from_host(np.ones(3, np.int16))
    alone.all_reduce(array)
    stream.use()
    try:
        alone.all_reduce(array)
        alone.all_reduce_async(array).wait()
        assert cupy.cuda.get_current_stream() == stream
    finally:
        cupy.cuda.Stream.null.use()


def test_memory_is_kept_as_long_as_it_is_used(alone, gpu):
    programs.holds_what_it_uses(alone, gpu)


@pytest.mark.parametrize("many", [False, True], ids=["all_reduce", "all_reduce_many"])
def test_a_graph_of_it_runs_on_new_inputs(alone, gpu, many):
    programs.captured(alone, gpu, many)


def test_several_communicators_and_a_part_of_one(gpu):
    from collectives import Communicator
    from collectives.transports import local

    for _ in range(3):
        with Communicator(local.alone(), backend="nccl") as comm:
            part = comm.split(0)
            programs.all_reduce(comm, gpu, "sum", np.dtype("f4"))
            programs.all_reduce(part, gpu, "sum", np.dtype("f4"))
            part.close()


def test_new_arrays_lie_on_the_gpu(alone, gpu):
    array = alone.empty((3, 4), "float64")
    assert gpu.device_of(array) == gpu.current_device()
    assert array.shape == (3, 4)
    assert array.dtype == np.float64


def test_over_mpi_of_one_rank(gpu):
    from collectives import Communicator
    from collectives.launching.start import start_mpi

    with Communicator(start_mpi().COMM_SELF, backend="nccl") as comm:
        programs.all_reduce(comm, gpu, "mean", np.dtype("f4"))


def test_it_was_nccl(alone, gpu):
    programs.all_reduce(alone, gpu, "sum", np.dtype("f4"))
    assert alone._devices._path.name == "nccl"
    assert alone._engine.path == "nccl"
