"""pytest's report of GPU tests where there is no GPU, on a separate suite."""

import pytest

from tests.test_worlds import Suite

CONFTEST = """
import tests.gpu.problem

tests.gpu.problem.gpu_problem = lambda: "no GPU: for this test"
pytest_plugins = ["tests.worlds.plugin", "tests.gpu.plugin"]
"""
TESTS = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    assert False

@pytest.mark.gpu
@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_in_a_world():
    assert False

def test_on_the_host():
    pass
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return Suite(
        tmp_path_factory.mktemp("gpu"), TESTS, CONFTEST, "-p no:hypothesispytest -o markers=gpu"
    )


def test_they_are_skipped_and_listed(suite):
    told = suite.run("-q", "-r", "N").stdout
    assert "1 passed, 4 skipped" in told
    assert "not run, for want of a GPU: 4" in told
    assert "  test_it.py::test_alone (3)\n" in told
    assert "  test_it.py::test_in_a_world\n" in told


def test_the_reason_is_shown_without_starting_a_world(suite):
    outcomes = suite.outcomes("--worlds=2")
    assert outcomes["test_in_a_world[2ranks]"][0] == "skipped"
    assert "no GPU: for this test" in outcomes["test_in_a_world[2ranks]"][1]


def test_those_that_no_offered_world_suits_are_listed_too(suite):
    assert "not run, for want of a GPU: 4" in suite.run("--worlds=3").stdout


def test_deselected_tests_are_not_listed(suite):
    assert "for want of a GPU" not in suite.run("-k", "host").stdout
