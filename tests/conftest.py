"""Fixtures and settings of all tests."""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests.broken_transport import BROKEN_VARIABLE, break_communicator
from tests.worlds.launcher import DIRECTORY_VARIABLE

pytest_plugins = ["tests.worlds.plugin", "tests.gpu.plugin"]

# All the ranks of a world must draw the same examples: no chance, no memory and no clock.
for name, examples in (("worlds", 20), ("slow", 200)):
    settings.register_profile(
        name,
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )


def pytest_configure(config):
    """Before any test is imported, so that those that ask for fewer examples get the rest."""
    settings.load_profile("slow" if config.getoption("slow") else "worlds")


def pytest_collection_finish():
    """Spare each garbage collection the thousands of tests, and all modules."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_its_own(tmp_path_factory):
    """Don't read or write the developer's files; a world's ranks share a directory already."""
    if "COLLECTIVES_CACHE" in os.environ and DIRECTORY_VARIABLE in os.environ:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTIVES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def comm(world_size):
    """The communicator of the world that an mpi test runs in."""
    import collectives

    comm = collectives.world()
    if broken := os.environ.get(BROKEN_VARIABLE):
        break_communicator(comm, broken)
    return comm


@pytest.fixture
def hasty_threads():
    """The threads of this process take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="session")
def launch():
    """Run a command on ranks under mpirun, as a user does: `launch(2, command, timeout=9)`."""
    from tests.worlds.programs import run_program

    return run_program
