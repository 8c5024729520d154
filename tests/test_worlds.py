"""The harness of the mpi tests, demonstrated on small suites in a separate pytest."""

import mmap
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.worlds.cleanup import find_segments, remove_segments, used_files
from tests.worlds.example_suites import (
    CONFTEST,
    DRAWN,
    FIRST_OF_SEVERAL,
    HEALTHY,
    ONE_OF_SEVERAL,
    SEVERAL_FILES,
    TROUBLED,
)
from tests.worlds.launcher import find_mpirun, mpirun_command, world_environment

ROOT = Path(__file__).parents[1]


WITHOUT_MPIRUN = """
import sys, pytest
from tests.worlds import launcher, parent
launcher.find_mpirun = parent.find_mpirun = lambda: None
sys.exit(pytest.main(sys.argv[1:]))
"""


class Suite:
    """A directory of tests, and pytest's output for them."""

    def __init__(self, directory, text, conftest=CONFTEST, options="-p no:hypothesispytest"):
        # Most suites don't load the plugin of Hypothesis, whose import is slow.
        self.directory = directory
        (directory / "conftest.py").write_text(conftest)
        (directory / "pytest.ini").write_text(
            f"[pytest]\naddopts = -ra --strict-markers {options}\n"
        )
        (directory / "test_it.py").write_text(text)

    def run(self, *arguments, before=(sys.executable, "-m", "pytest"), **variables):
        """Run pytest, or another command of it, in the directory."""
        environment = world_environment(self.directory) | {"PYTHONPATH": str(ROOT)} | variables
        del environment["TEST_WORLD_DIRECTORY"]
        return subprocess.run(
            [*before, *arguments],
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def outcomes(self, *arguments, **variables):
        """Run pytest; return the outcome and the failure's text by test name."""
        report = self.directory / "junit.xml"
        finished = self.run(f"--junitxml={report}", *arguments, **variables)
        assert report.exists(), finished.stdout + finished.stderr
        return {
            case.get("name"): outcome_of(case)
            for case in ElementTree.parse(report).iter("testcase")
        }


def outcome_of(case):
    """Return the outcome and the text of a test case in a JUnit report."""
    for element in case:
        if element.tag in ("failure", "error", "skipped"):
            return element.tag, f"{element.get('message')}\n{element.text}"
    return "passed", ""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return Suite(tmp_path_factory.mktemp("healthy"), HEALTHY)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """The outcomes of the troubled suite, and the shared memory that it did not free."""
    known = find_segments()
    outcomes = Suite(tmp_path_factory.mktemp("troubled"), TROUBLED).outcomes()
    # Other jobs on this machine may have created segments too, but theirs are in use.
    return outcomes, find_segments() - known - used_files()


@pytest.fixture
def outcomes(troubled):
    return troubled[0]


@pytest.mark.slow
def test_healthy_suite_passes_at_each_size(healthy):
    # As in a job of another MPI, whose variables must not reach the worlds.
    outcomes = healthy.outcomes(PMI_RANK="1", PMI_SIZE="2", OMPI_COMM_WORLD_SIZE="2")
    sizes = ["1rank", "2ranks", "3ranks"]
    passed = {f"test_each_size[{kind}-{size}]" for kind in ("sum", "maximum") for size in sizes}
    passed |= {"test_marked[2ranks]", "test_marked[3ranks]"}
    passed |= {"test_marked_larger_too[3ranks]", "test_marked_larger_alone[5ranks]"}
    passed |= {"test_ordinary", "test_without_fixtures[2ranks]"}
    assert {name for name, (outcome, _) in outcomes.items() if outcome == "passed"} == passed
    assert len(outcomes) == len(passed) + 2
    assert outcomes["test_skipped[2ranks]"][0] == "skipped"
    assert "not on a Sunday" in outcomes["test_skipped[2ranks]"][1]
    assert "known" in outcomes["test_expected_failure_without_exception[2ranks]"][1]


@pytest.mark.slow
def test_slow_tests_and_larger_worlds_are_for_the_option(healthy):
    usual, slow = (
        set(re.findall(r"::(\S+)", healthy.run("--collect-only", "-q", *options).stdout))
        for options in ([], ["--slow"])
    )
    more = {f"test_each_size[{kind}-{n}ranks]" for kind in ("sum", "maximum") for n in (4, 5, 7, 8)}
    assert usual < slow
    assert slow - usual == more | {"test_slow[2ranks]", "test_marked_larger_too[7ranks]"}
    finished = healthy.run("--slow", "-v", "-k", "slow")
    assert "test_slow[2ranks] PASSED" in finished.stdout
    finished = healthy.run("-k", "slow")
    assert "slow tests left out: 1 (--slow runs them)" in finished.stdout


def test_single_case_launches_one_world(healthy):
    assert set(healthy.outcomes("test_it.py::test_marked[3ranks]")) == {"test_marked[3ranks]"}


@pytest.mark.slow
def test_option_restricts_the_sizes(healthy):
    finished = healthy.run("--worlds=1", "-v", "-k", "marked or each")
    assert "test_each_size[sum-1rank] PASSED" in finished.stdout
    assert "2 passed" in finished.stdout
    assert "mpi tests left out: their ranks marks exclude the world sizes offered here (1)" in (
        finished.stdout
    )


def test_typed_mpirun_runs_the_tests_of_its_size(healthy):
    before = [*mpirun_command(find_mpirun(), 3), sys.executable, "-m", "mpi4py", "-m", "pytest"]
    finished = healthy.run("--with-mpi", "--only-mpi", "-x", before=before)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("4 passed") == 3
    assert "4 mpi tests left out: their ranks marks exclude" in finished.stdout


def test_failure_on_one_rank_names_it(outcomes):
    outcome, text = outcomes["test_fails_on_one_rank[3ranks]"]
    assert outcome == "failure"
    assert "failed on rank 1 of 3: AssertionError: one is unwell" in text
    assert 'assert comm.rank != 1, "one is unwell"' in text


@pytest.mark.parametrize("name", ["before", "after_a_failure", "last"])
def test_other_tests_pass(outcomes, name):
    assert outcomes[f"test_{name}[3ranks]"] == ("passed", "")


def test_hang_shows_the_stacks(outcomes):
    outcome, text = outcomes["test_hangs[3ranks]"]
    assert outcome == "failure"
    assert "not finished on ranks 0, 1, 2 of 3" in text
    assert text.count("in test_hangs") == 3


def test_killed_rank_is_reported(outcomes):
    outcome, text = outcomes["test_killed[3ranks]"]
    assert outcome == "failure"
    assert "of 3: mpirun ended with code" in text


def test_disagreeing_ranks_fail(outcomes):
    outcome, text = outcomes["test_ranks_disagree[3ranks]"]
    assert outcome == "failure"
    assert (
        "the ranks disagree: rank 0 skipped: rank 0 would rather not; ranks 1, 2 passed"
    ) in text


def test_failing_setup_is_an_error(outcomes):
    outcome, text = outcomes["test_setup_fails[3ranks]"]
    assert outcome == "error"
    assert "failed on rank 2 of 3: OSError: no such thing" in text


@pytest.mark.slow
def test_hypothesis_test_fails_at_its_first_example(tmp_path):
    outcomes = Suite(tmp_path, DRAWN, options="").outcomes()
    assert outcomes["test_drawn_passes[2ranks]"] == ("passed", "")
    outcome, text = outcomes["test_drawn_fails[2ranks]"]
    assert outcome == "failure"
    assert "failed on rank 1 of 2: AssertionError: one dislikes it" in text


def test_killed_worlds_leave_no_shared_memory(troubled):
    assert troubled[1] == set()


def test_new_unmapped_segments_are_removed(tmp_path):
    old, new, other = (tmp_path / name for name in ("mpich_shm_1", "mpich_shm_2", "other"))
    for path in (old, new, other):
        path.touch()
    remove_segments({old}, tmp_path)
    assert set(tmp_path.iterdir()) == {old, other}


def test_mapped_segment_is_kept(tmp_path):
    path = tmp_path / "mpich_shm_1"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        remove_segments(set(), tmp_path)
        assert path.exists()


def test_no_mpirun_fails_with_advice(tmp_path):
    suite = Suite(tmp_path, TROUBLED, f"import sys; sys.executable = '/none/python'\n{CONFTEST}")
    outcome, text = suite.outcomes("-k", "before", PATH="/none")["test_before[3ranks]"]
    assert outcome == "failure"
    assert "pip install mpich" in text


@pytest.mark.slow
def test_world_that_never_starts_is_ended(tmp_path):
    text = "import os, time\nif 'TEST_WORLD_DIRECTORY' in os.environ: time.sleep(100)\n" + TROUBLED
    outcomes = Suite(tmp_path, text).outcomes("-k", "before or last", "--world-timeout=2")
    for name in ("test_before[3ranks]", "test_last[3ranks]"):
        assert "no test began on 3 ranks: mpirun was killed after 2 s" in outcomes[name][1]


def test_world_that_ends_badly_fails_its_last_test(tmp_path):
    text = "import atexit, os, pytest\n\n@pytest.mark.mpi\n@pytest.mark.ranks(2)\n"
    text += "def test_treacherous():\n    atexit.register(os._exit, 3)\n"
    outcome, text = Suite(tmp_path, text).outcomes()["test_treacherous[2ranks]"]
    assert outcome == "failure"
    assert "every rank finished its tests, but mpirun ended with code" in text


@pytest.mark.slow
def test_a_second_process_runs_ordinary_tests_from_the_end(tmp_path):
    suite = Suite(tmp_path, FIRST_OF_SEVERAL)
    for number in range(SEVERAL_FILES):
        text = ONE_OF_SEVERAL.replace("NUMBER", str(number))
        (tmp_path / f"test_it_{number:02}.py").write_text(text)
    # The limit is that of this process's own tests: the other one may need longer.
    finished = suite.run("-v", "-rA", "--timeout=0.7")
    processes = set(re.findall(r"in process (\d+)", finished.stdout))
    assert len(processes) > 1, finished.stdout
    assert f"1 failed, {SEVERAL_FILES - 1} passed, 1 skipped" in finished.stdout
    assert "not on a Sunday" in finished.stdout
    assert finished.stdout.count(" PASSED ") == SEVERAL_FILES - 1
    # The second process needs no mpirun.
    (tmp_path / "begun").unlink()
    finished = suite.run(PATH="/nowhere", before=(sys.executable, "-c", WITHOUT_MPIRUN))
    assert f"1 failed, {SEVERAL_FILES - 1} passed, 1 skipped" in finished.stdout
    # As with a debugger, in which the tests run where the user sees them.
    (tmp_path / "begun").touch()
    finished = suite.run("-s")
    assert len(set(re.findall(r"in process (\d+)", finished.stdout))) == 1
