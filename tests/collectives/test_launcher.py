"""The launchers' variables, and unintended worlds of one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from collectives.errors import LaunchError
from collectives.launching.launcher import Launcher, check_launch, find_launcher
from tests.worlds.launcher import find_mpirun, is_open_mpi, world_environment
from tests.worlds.programs import ROOT, run_launcher

pytestmark = pytest.mark.both_mpis


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (1, 0)),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, (4, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}, (2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "PMIX_RANK": "5"}, (8, 5)),
        # A batch script: an allocation for eight, and a single process.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (1, 0)),
        # mpirun in a batch script.
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "SLURM_PROCID": "0"}, (4, 2)),
        ({"PMI_SIZE": "many"}, (1, 0)),
        ({"WORLD_SIZE": "4", "RANK": "2"}, (4, 2)),
        ({"WORLD_SIZE": "4", "RANK": " 2 "}, (4, 2)),
        ({"WORLD_SIZE": "4", "RANK": "²"}, (1, 0)),
        # Variables of other programs.
        ({"WORLD_SIZE": "4"}, (1, 0)),
        # mpirun with the variables that torch needs.
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "WORLD_SIZE": "4", "RANK": "3"}, (2, 1)),
    ],
)
def test_what_the_launcher_says(environment, expected):
    launcher = find_launcher(environment)
    assert isinstance(launcher, Launcher)
    assert (launcher.size, launcher.rank) == expected


WORLD = [
    sys.executable,
    "-c",
    "import collectives, sys\ncomm = collectives.world()\n"
    "sys.stdout.write(f'{comm.rank} {comm.size} ')",
]


def run_alone(directory, environment):
    return subprocess.run(
        WORLD,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=world_environment(directory) | {"PYTHONPATH": str(ROOT)} | environment,
    )


def foreign_variables(size, rank):
    """The variables that the other MPI's mpirun gives to its processes."""
    prefix = "PMI_" if is_open_mpi(find_mpirun()) else "OMPI_COMM_WORLD_"
    return {f"{prefix}SIZE": str(size), f"{prefix}RANK": str(rank)}


def test_a_launcher_that_this_mpi_does_not_understand_is_refused(tmp_path):
    ended = run_alone(tmp_path, foreign_variables(4, 3))
    assert ended.returncode == 1
    assert ended.stdout == ""
    (variable, *_) = foreign_variables(4, 3)
    error = ended.stderr.splitlines()[-1]
    assert error.startswith("collectives.errors.LaunchError: 4 processes were started")
    assert f"({variable}=4), but MPI sees a world of 1 rank" in error
    beside = Path(sys.executable).with_name("mpirun")
    assert f"`{beside if beside.exists() else 'mpirun'} -n 4 python …`" in error
    assert "srun" not in error
    assert "COLLECTIVES_ALLOW_SINGLETON=1" in error


# The variables of every task of a step, with any plugin for MPI.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
}


def test_a_slurm_step_without_the_plugin_of_this_mpi_is_refused(tmp_path):
    ended = run_alone(tmp_path, STEP)
    assert ended.returncode == 1
    plugin = "pmix" if is_open_mpi(find_mpirun()) else "pmi2"
    assert "2 processes were started (SLURM_STEP_NUM_TASKS=2)" in ended.stderr
    assert f"`srun --mpi={plugin} -n 2 python …`" in ended.stderr


def test_variables_of_torchrun_that_can_not_be_read_are_refused(monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(size=1))
    alone_of_mpich = SimpleNamespace(**vars(alone), Get_library_version=lambda: "MPICH Version: 5")
    for name, value in [
        ("RANK", "$(JOB_COMPLETION_INDEX)"),
        ("RANK", "-1"),
        ("RANK", None),
        ("RANK", "2"),
        ("WORLD_SIZE", "1"),
        ("WORLD_SIZE", "two"),
    ]:
        wrong = {key: text for key, text in (given | {name: value}).items() if text is not None}
        # Also of processes that the script of a single task starts.
        for one in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}):
            with pytest.raises(LaunchError, match=re.escape(f"{name}={value or ''!r}")):
                check_launch(alone, wrong | one)
        check_launch(alone, wrong | {"COLLECTIVES_ALLOW_SINGLETON": "1"})
        check_launch(SimpleNamespace(COMM_WORLD=SimpleNamespace(size=2)), wrong)
    for rank, size in (("$(INDEX)", "2"), ("-1", "2"), ("'0'", "'2'"), ("0", "0")):
        with pytest.raises(LaunchError, match=re.escape(f"RANK={rank!r}, WORLD_SIZE={size!r}")):
            check_launch(alone, {"RANK": rank, "WORLD_SIZE": size})
    for one in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        check_launch(alone, {one: "1"})
        text = r"WORLD_SIZE=2\), but MPI sees .* COLLECTIVES_ALLOW_SINGLETON=1, not 'true'\."
        two = {"RANK": "0", "WORLD_SIZE": "2", "COLLECTIVES_ALLOW_SINGLETON": "true", one: "1"}
        with pytest.raises(LaunchError, match=text):
            check_launch(alone_of_mpich, two)
    check_launch(alone, given | {"WORLD_SIZE": "1", "RANK": "x"})
    check_launch(alone, given | {"PMI_SIZE": "1", "RANK": "x"})
    # Of a shell that trains on one process as well.
    check_launch(alone, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})


HANGUP = """
import os, signal
import collectives
hangups = []
signal.signal(signal.SIGHUP, lambda *_: hangups.append(1))
collectives.world()
os.kill(os.getpid(), signal.SIGHUP)
print(hangups)
"""


def test_the_handlers_of_a_program_stay(tmp_path):
    environment = world_environment(tmp_path) | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", HANGUP]
    ended = subprocess.run(
        line, capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (ended.returncode, ended.stdout) == (0, "[1]\n"), ended.stderr


@pytest.mark.parametrize(
    "environment",
    [
        {**STEP, "COLLECTIVES_ALLOW_SINGLETON": "1"},
        # The shell of an allocation for eight, or a batch script.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "4"},
    ],
    ids=["allowed", "allocation", "one process", "no rank"],
)
def test_a_world_of_one_rank_that_was_meant_is_none_the_worse(environment, tmp_path):
    ended = run_alone(tmp_path, environment)
    assert (ended.returncode, ended.stdout) == (0, "0 1 "), ended.stderr


def test_a_world_of_several_ranks_is_never_refused():
    """Variables of launchers around it are ignored: its own launcher fits this MPI."""
    mpirun = find_mpirun()
    line = [mpirun, *(["--oversubscribe"] if is_open_mpi(mpirun) else []), "-n", "2", *WORLD]
    around = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    ended = run_launcher(line, around | {"WORLD_SIZE": "4", "RANK": "0"}, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["0", "1", "2", "2"]


SPLITS = """
import collectives
from mpi4py import MPI
comm = collectives.Communicator(MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank))
assert comm.size == 1 and collectives.world().size == 2
"""


def test_communicators_of_one_rank_are_not_refused(launch):
    ended = launch(2, [sys.executable, "-c", SPLITS], timeout=60)
    assert ended.returncode == 0, ended.stderr


def other_mpiruns():
    """The mpirun commands on the PATH of other MPIs than this one."""
    folders = os.get_exec_path()
    found = [path for folder in folders if (path := Path(folder) / "mpirun").exists()]
    return [str(path) for path in found if is_open_mpi(str(path)) != is_open_mpi(find_mpirun())]


def test_another_mpis_mpirun_is_refused_for_real():
    if not (others := other_mpiruns()):
        pytest.skip("no mpirun of another MPI is on the PATH")
    line = [others[0], "-n", "2", *WORLD]
    ended = run_launcher(
        line, {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}, timeout=60
    )
    assert ended.returncode != 0
    # MPICH itself ends a process that Open MPI's mpirun has started.
    assert "LaunchError: 2 processes" in ended.stderr or "unsupported PMI version" in ended.stderr


CHILDREN = """
import collectives, os, subprocess, sys
comm = collectives.world()
program = "import collectives; print(collectives.world().size)"
def run(*command, close_fds=True):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, timeout=20, close_fds=close_fds,
        env=os.environ | {"COLLECTIVES_ALLOW_SINGLETON": str(comm.rank)},
    )
for closed in (True, False):  # without, as `os.system` starts it
    child = run("-c", program, close_fds=closed)
    refused = "this process is no rank: rank 0 of 2 has started it" in child.stderr
    expected = (0, "1\\n", False) if comm.rank else (1, "", True)
    assert (child.returncode, child.stdout, refused) == expected, child
if comm.rank == 0:
    # MPICH's child has no task; Open MPI's would be taken for the rank.
    child = run("-m", "collectives.launch", sys.argv[1])
    assert (child.returncode, child.stdout) == (1, ""), child
    assert "python -m collectives.launch: " in child.stderr, child
"""


def test_a_process_that_a_rank_of_mpirun_has_started_is_no_rank(launch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text("import collectives; print(collectives.world().size)")
    ended = launch(2, [sys.executable, "-c", CHILDREN, str(child)], timeout=90)
    assert ended.returncode == 0, ended.stderr
