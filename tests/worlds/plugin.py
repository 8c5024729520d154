"""The entry of the harness: pytest loads this module, in the parent and in every rank."""

import os
from pathlib import Path

import pytest

from tests.worlds.launcher import DIRECTORY_VARIABLE, ORDINARY_VARIABLE
from tests.worlds.parent import Parent
from tests.worlds.rank import Rank
from tests.worlds.recording import Recording
from tests.worlds.selection import Selection, parse_sizes


def pytest_addoption(parser):
    group = parser.getgroup("worlds", "tests on worlds of MPI ranks")
    group.addoption(
        "--worlds",
        type=parse_sizes,
        metavar="SIZES",
        help="run the mpi tests on worlds of these sizes only, for example 2,3",
    )
    group.addoption(
        "--slow",
        action="store_true",
        help="run also the tests marked slow, the mpi tests on larger worlds too, and more examples"
        " of Hypothesis",
    )
    group.addoption(
        "--world-timeout",
        type=float,
        metavar="SECONDS",
        help="end a world whose ranks made no progress for so long"
        " (default: a minute more than the longest limit of its tests)",
    )


def pytest_configure(config):
    for line in (
        "ranks(*sizes): world sizes that an mpi test runs on",
        "timeout_seconds(seconds): how long an mpi test may take on a rank (default: 60)",
        "slow: a test that only --slow runs",
        "both_mpis: an ordinary test of what the MPIs differ in: programs that end, die or stop",
    ):
        config.addinivalue_line("markers", line)
    directory = os.environ.get(DIRECTORY_VARIABLE)
    only_world_tests = config.getoption("only_mpi")
    # Tests start pytests of their own.
    if ordinary := os.environ.pop(ORDINARY_VARIABLE, None):
        config.pluginmanager.register(Recording(config, Path(ordinary)), "worlds-ordinary")
        offered = config.getoption("worlds")
    elif directory or only_world_tests or config.getoption("with_mpi"):
        rank = Rank(config, Path(directory) if directory else None)
        config.pluginmanager.register(rank, "worlds-rank")
        offered = (rank.communicator.size,)
    else:
        config.pluginmanager.register(Parent(config), "worlds-parent")
        offered = config.getoption("worlds")
    selection = Selection(offered, only_world_tests, config.getoption("slow"))
    config.pluginmanager.register(selection, "worlds-selection")


@pytest.fixture(scope="session")
def slow(request):
    """Whether slow tests are wanted: other tests may do more then."""
    return request.config.getoption("slow")


@pytest.fixture(scope="session")
def world_size(request):
    """The number of ranks of the world that the test runs in."""
    if not hasattr(request, "param"):
        pytest.fail("a test that asks for the world's size must be marked mpi", pytrace=False)
    return request.param
