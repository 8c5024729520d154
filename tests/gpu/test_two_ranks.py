"""Two ranks on one GPU, which NCCL refuses by default. Correctness only: they share its time."""

import numpy as np
import pytest

from tests.collectives import oracle
from tests.gpu import programs

pytestmark = [pytest.mark.gpu, pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.fixture(scope="module", params=["auto", "mpi"])
def shared(request, gpu, world_size):
    """A communicator of ranks that share the GPU: over CUDA IPC, and through the host."""
    from mpi4py import MPI

    from collectives import Communicator

    with Communicator(MPI.COMM_WORLD, backend=request.param) as comm:
        yield comm


def test_reductions(shared, gpu):
    for op, dtype in oracle.PAIRS:
        with oracle.case(op, dtype):
            programs.all_reduce(shared, gpu, op, dtype)
            programs.other_reductions(shared, gpu, op, dtype)


def test_movements(shared, gpu):
    for dtype in [*oracle.DTYPES, *programs.FLOAT8S]:
        with oracle.case(dtype):
            programs.gathers(shared, gpu, dtype)
            programs.other_movements(shared, gpu, dtype)


def test_any_strides(shared, gpu):
    for dtype in oracle.DTYPES:
        with oracle.case(dtype):
            programs.strided(shared, gpu, dtype)


def test_large_arrays(shared, gpu):
    """Several rounds of an arena, several chunks of pinned memory."""
    values = np.arange(10_000_003, dtype=np.float32) % 1000
    array = gpu.from_host(values * (shared.rank + 1))
    programs.check(shared.all_reduce(array), values * 3)
    shared.broadcast(array, root=1)
    programs.check(array, values * 2)


def test_many(shared, gpu):
    programs.many(shared, gpu)


def test_streams(shared, gpu):
    programs.asynchronous(shared, gpu)
    programs.follows_the_stream(shared, gpu, host_waits=True)
    programs.holds_what_it_uses(shared, gpu)


def test_the_way(shared, gpu):
    programs.all_reduce(shared, gpu, "sum", np.dtype("f4"))
    assert shared._devices._path.name == {"auto": "ipc", "mpi": "staged"}[shared.backend]


def test_nccl_is_refused_on_every_rank(gpu, world_size):
    from mpi4py import MPI

    from collectives import BackendUnavailableError, Communicator

    with pytest.raises(BackendUnavailableError, match="ranks 0 and 1 share the GPU"):
        Communicator(MPI.COMM_WORLD, backend="nccl")
