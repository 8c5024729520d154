"""The commands of the page on Slurm, in a Slurm of two nodes."""

import re

import pytest

from tests.worlds import slurm
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.pages import page_of, run_in

pytestmark = pytest.mark.slow
FILES, COMMANDS = page_of("slurm")
DOCTOR, *TRAININGS = COMMANDS


@pytest.fixture(scope="module")
def variables():
    if (reason := slurm.why_not()) is not None:
        pytest.skip(f"no Slurm: {reason}")
    with slurm.slurm() as made:
        yield made


def run(command, folder, variables):
    """Run a command of the page; with Open MPI, with its plugin."""
    files = FILES
    if is_open_mpi(find_mpirun()):
        files = {title: code.replace("pmi2", "pmix") for title, code in files.items()}
        command = command.replace("pmi2", "pmix")
    ended = run_in(folder, files, command, timeout=280, **variables)
    if "can not load PMIx library" in ended.stderr:
        pytest.skip("Slurm's plugin pmix finds no libpmix.so (apt-get install libpmix-dev)")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_doctor_sees_two_nodes(tmp_path, variables):
    report = run(DOCTOR, tmp_path, variables)
    assert re.search(r"^  ranks +4$", report, re.MULTILINE), report
    for node, ranks in enumerate(("0-1", "2-3")):
        assert f"node{node}: ranks {ranks} on" in report
    assert "FAILED" not in report
    assert "All is well" in report


@pytest.mark.parametrize("command", TRAININGS, ids=lambda command: command.split()[0])
def test_the_digits_are_learned(tmp_path, variables, command):
    output = run(command, tmp_path, variables)
    if (tmp_path / "job.txt").exists():
        output = (tmp_path / "job.txt").read_text()
    accuracies = re.findall(r"test accuracy +([\d.]+)%", output)
    assert float(accuracies[-1]) > 90, output
