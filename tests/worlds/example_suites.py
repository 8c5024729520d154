"""Suites that demonstrate the harness: the texts of their files."""

CONFTEST = """
import pytest
pytest_plugins = ["tests.worlds.plugin"]

@pytest.fixture(scope="session")
def comm(world_size):
    from mpi4py import MPI
    return MPI.COMM_WORLD
"""

HEALTHY = """
import os
import pytest

def test_ordinary():
    pass

@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["sum", "maximum"])
def test_each_size(comm, world_size, kind):
    assert comm.allreduce(1) == world_size

@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_marked(comm):
    assert comm.size in (2, 3)

@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_without_fixtures():
    assert os.environ["OMP_NUM_THREADS"] == "1"

@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_skipped():
    pytest.skip("not on a Sunday")

@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known")
def test_expected_failure_without_exception():
    pytest.xfail("known")

@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.ranks(2)
def test_slow():
    pass

@pytest.mark.mpi
@pytest.mark.ranks(3, 7)
def test_marked_larger_too():
    pass

@pytest.mark.mpi
@pytest.mark.ranks(5)
def test_marked_larger_alone():
    pass
"""

TROUBLED = """
import os
import signal
import time
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]

def test_before(comm):
    comm.Barrier()

def test_fails_on_one_rank(comm):
    print("printed on rank", comm.rank)
    assert comm.rank != 1, "one is unwell"
    comm.Barrier()

def test_after_a_failure(comm):
    comm.Barrier()

@pytest.mark.timeout_seconds(1)
def test_hangs(comm):
    if comm.rank == 2:
        time.sleep(100)
    comm.Barrier()

def test_killed(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()

def test_ranks_disagree(comm):
    if comm.rank == 0:
        pytest.skip("rank 0 would rather not")

@pytest.fixture
def broken(comm):
    if comm.rank == 2:
        raise OSError("no such thing")

def test_setup_fails(comm, broken):
    comm.Barrier()

def test_last(comm):
    comm.Barrier()
"""

DRAWN = """
import pytest
from hypothesis import given, settings, strategies

@pytest.mark.mpi
@pytest.mark.ranks(2)
@settings(derandomize=True, database=None, max_examples=5)
@given(number=strategies.integers())
def test_drawn_passes(comm, number):
    assert comm.allreduce(number) == 2 * number

@pytest.mark.mpi
@pytest.mark.ranks(2)
@settings(derandomize=True, database=None, max_examples=5)
@given(number=strategies.integers())
def test_drawn_fails(comm, number):
    assert comm.rank != 1, "one dislikes it"
    comm.Barrier()
"""

SEVERAL_FILES = 20

FIRST_OF_SEVERAL = """
import time
from pathlib import Path
import pytest

@pytest.mark.timeout(60)
def test_first():
    end = time.monotonic() + 60
    while not Path("begun").exists():
        assert time.monotonic() < end, "no second process has begun"
        time.sleep(0.01)
"""

ONE_OF_SEVERAL = """
import os
import time
from pathlib import Path
import pytest

def test_process():
    Path("begun").touch()
    print("in process", os.getpid())
    if NUMBER == 17:
        time.sleep(1)  # longer than the limit of the first process
    if NUMBER == 18:
        pytest.skip("not on a Sunday")
    assert NUMBER != 19, f"in process {os.getpid()}"
"""
