"""The doctor's report, its self-test, and how it ends where something is wrong."""

import inspect
import json
import runpy
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from collectives import Communicator
from collectives.doctor import packages
from collectives.doctor.attempt import WrongResultError, check
from collectives.doctor.checks import NEEDS_PEERS, TRIALS
from collectives.doctor.machine import RankFacts, report_ranks, report_shared_memory
from collectives.doctor.report import Report, ranges
from collectives.transports.local import run
from tests.collectives.test_launch import free_port
from tests.slow import slow
from tests.worlds.launcher import find_mpirun, is_open_mpi, world_environment
from tests.worlds.programs import ROOT

DOCTOR = [sys.executable, "-m", "collectives", "doctor"]


def run_alone(command, directory, **environment):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=world_environment(directory) | {"PYTHONPATH": str(ROOT)} | environment,
    )


def rows(report):
    """Labels to texts; what follows a row without a label of its own belongs to it."""
    found, label = {}, None
    for line in report.splitlines():
        label = line[2:28].strip() or label
        if line.startswith("  "):
            found[label] = [*found.get(label, []), line[29:]]
    return found


def test_alone_it_tries_all_that_one_rank_can(tmp_path):
    ended = run_alone(DOCTOR, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = rows(ended.stdout)
    for name in NEEDS_PEERS:
        assert found.pop(name) == ["not tried: one rank has no other to send to"]
    assert all(found[name] == ["ok"] for name in TRIALS if name not in NEEDS_PEERS)
    assert found["ranks"] == ["1"]
    assert found["numpy"] == [np.__version__]
    assert found["MPI"][0].startswith("this MPI reads GPU memory: no")
    assert found["MPI window"] == ["can be shared on every node"]
    assert ended.stdout.splitlines()[-1].startswith("All is well")


@pytest.mark.parametrize("size", [2, *slow(3)])
def test_under_mpirun_one_rank_reports_on_all(size, launch):
    ended = launch(size, DOCTOR, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = rows(ended.stdout)
    assert [found[name] for name in TRIALS] == [["ok"]] * len(TRIALS)
    assert found["ranks"] == [str(size)]
    assert f": ranks 0-{size - 1} on " in found["node 0"][0]
    assert ended.stdout.count("\nCollectives\n") == 1


def test_of_tasks_without_mpirun_one_reports_on_all(tmp_path):
    if is_open_mpi(find_mpirun()):
        pytest.skip("without mpirun only MPICH can start ranks")
    cluster = {"worker": [f"127.0.0.1:{free_port()}"] * 2}
    command = [sys.executable, "-m", "strategies.launch", "-m", "collectives", "doctor"]

    def task(index):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        return run_alone([*command, "--limit", "50"], tmp_path, TF_CONFIG=config)

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(task, range(2))
    assert first.returncode == other.returncode == 0, first.stderr + other.stderr
    assert rows(first.stdout)["ranks"] == ["2"]
    assert other.stdout == ""


BREAK = """
import sys
from collectives import Communicator, doctor
from collectives.doctor.checks import TRIALS
del TRIALS["tune"]  # takes seconds
whole = Communicator.all_gather
def broken(comm, array, **keywords):
    if comm.rank == 1: {fault}
    return whole(comm, array, **keywords)
Communicator.all_gather = broken
sys.exit(doctor.main(limit={limit}))
"""
GARBAGE = "return whole(comm, array, **keywords) + 7"


@pytest.mark.slow
def test_a_wrong_result_on_one_rank_fails(launch):
    ended = launch(3, [sys.executable, "-c", BREAK.format(fault=GARBAGE, limit=30)], timeout=60)
    assert ended.returncode == 1
    found = rows(ended.stdout)
    assert found["all_gather"][0] == "FAILED"
    assert found["all_gather"][1].startswith("rank 1: got array([7, 8, 8, 9, 9, 9]), expected")
    assert len(found["all_gather"]) == 2
    # What is tried after it is tried all the same.
    assert found["gather"] == found["all_gather_object"] == ["ok"]
    # The split's part is tried with all_gather.
    assert "2 failures" in ended.stdout.splitlines()[-1]


def test_a_rank_that_raises_while_the_others_wait_is_reported(launch):
    program = BREAK.format(fault="raise KeyError('no gathering')", limit=3)
    start = time.monotonic()
    ended = launch(3, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode != 0
    found = rows(ended.stdout)
    assert found["all_gather"][0] == "FAILED"
    assert "rank 1: KeyError: 'no gathering'" in found["all_gather"]
    assert any("did not end within 3 s" in line for line in found["all_gather"])
    assert found["broadcast"] == ["ok"]
    assert "gather" not in found
    # Three seconds until the others give up; the start of three interpreters comes on top.
    assert time.monotonic() - start < 50


@pytest.mark.slow
def test_without_threads_such_ranks_are_ended(launch):
    level = "import os; os.environ['MPI4PY_RC_THREAD_LEVEL'] = 'funneled'"
    program = level + BREAK.format(fault="raise KeyError('no gathering')", limit=2)
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode != 0
    found = rows(ended.stdout)
    assert found["thread level"][0] == "FUNNELED"
    assert "asynchronous calls run at once" in found["thread level"][1]
    assert "rank 1: KeyError: 'no gathering'" in ended.stderr


def test_without_mpi4py_it_says_what_to_install(tmp_path):
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('mpi4py', 'cupy'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from collectives import doctor\n"
        "sys.exit(doctor.main())\n"
    )
    ended = run_alone([sys.executable, "-c", program], tmp_path)
    assert ended.returncode == 1, ended.stderr
    found = rows(ended.stdout)
    assert found["numpy"] == [np.__version__]
    assert found["library"][0].startswith("FAILED: MPI can't be loaded")
    assert "pip install 'mpi-collectives[mpich]'" in found["library"][0]
    assert "all_reduce" not in found


@pytest.mark.slow
def test_the_mpirun_of_another_mpi_is_noticed(tmp_path):
    # What the other MPI's mpirun says of two processes, neither of which this MPI understands.
    prefix = "PMI_" if is_open_mpi(find_mpirun()) else "OMPI_COMM_WORLD_"
    first, second = (
        run_alone(DOCTOR, tmp_path, **{f"{prefix}SIZE": "2", f"{prefix}RANK": rank})
        for rank in "01"
    )
    assert first.returncode == 1
    seen = f"FAILED: 2 processes were started ({prefix}SIZE=2), but MPI sees a world of 1 rank"
    assert rows(first.stdout)["world"][0].startswith(seen)
    assert "all_reduce" not in rows(first.stdout)
    # The second one is silent: mpirun would end the first at its end.
    assert (second.returncode, second.stdout) == (0, "")
    allowed = {f"{prefix}SIZE": "2", f"{prefix}RANK": "0", "COLLECTIVES_ALLOW_SINGLETON": "1"}
    ended = run_alone(DOCTOR, tmp_path, **allowed)
    assert ended.returncode == 0
    assert rows(ended.stdout)["world"][1].startswith("warning: each process runs alone")
    assert rows(ended.stdout)["all_reduce"] == ["ok"]


def facts(node, cores, version="2.0", shared_memory=None):
    return RankFacts(node, f"host{node}", frozenset(cores), shared_memory, {"numpy": version})


def test_ranks_are_told_by_node_with_the_cores_they_share(capsys):
    report = Report(prints=True)
    report_ranks(report, [facts(0, [0, 1]), facts(1, [4]), facts(0, [1, 2, 7]), facts(1, [4])])
    found = rows(capsys.readouterr().out)
    assert found["nodes"] == ["2"]
    assert found["node 0"] == ["host0: ranks 0, 2 on 4 cores (0-2, 7)"]
    assert found["node 1"] == [
        "host1: ranks 1, 3 on 1 core (4)",
        "warning: 2 ranks share 1 core: oversubscribed",
    ]
    assert "numpy" not in found
    assert report.warnings == 1


def test_ranks_that_share_cores_under_autogroup_are_told(capsys):
    report = Report(prints=True)
    alone, shared = replace(facts(0, [0]), autogroup=True), replace(facts(1, [4]), autogroup=True)
    report_ranks(report, [alone, shared, shared])
    found = rows(capsys.readouterr().out)
    assert len(found["node 0"]) == 1
    assert "sysctl kernel.sched_autogroup_enabled=0" in found["node 1"][2]
    assert report.warnings == 2


def test_ranks_with_different_software_are_told(capsys):
    report_ranks(Report(prints=True), [facts(0, [0]), facts(1, [0], "2.1"), facts(2, [0])])
    found = rows(capsys.readouterr().out)
    assert found["numpy"] == ["differs", "warning: 2.0 on ranks 0, 2; 2.1 on rank 1"]


def test_little_shared_memory_is_told(capsys):
    # An MPI of one rank, which has no windows.
    world = types.SimpleNamespace(allgather=lambda outcome: [outcome])
    mpi = types.SimpleNamespace(Query_thread=lambda: 3, THREAD_MULTIPLE=3, COMM_WORLD=world)
    spaces = [(60 << 20, 64 << 20), (900 << 20, 1 << 30), None]
    ranks = [facts(node, [0], shared_memory=space) for node, space in enumerate(spaces)]
    report_shared_memory(Report(prints=True), mpi, ranks, limit=9)
    found = rows(capsys.readouterr().out)
    assert found["MPI window"][0] == "can't be shared"
    assert found["MPI window"][1].startswith("warning: rank 0: AttributeError: ")
    assert found["/dev/shm, node 0"][0] == "60 MiB of 64 MiB free"
    assert "--shm-size" in found["/dev/shm, node 0"][1]
    assert found["/dev/shm, node 1"] == ["900 MiB of 1024 MiB free"]
    assert found["/dev/shm, node 2"] == ["missing"]


def test_ranges():
    assert [ranges(each) for each in ([], [3], [1, 0], [0, 1, 2, 5, 7, 8])] == [
        "",
        "3",
        "0-1",
        "0-2, 5, 7-8",
    ]


def test_the_extras_are_those_of_the_package(monkeypatch):
    given = {}
    fake = types.ModuleType("setuptools")
    fake.setup, fake.find_packages = given.update, lambda **_: []
    monkeypatch.setitem(sys.modules, "setuptools", fake)
    runpy.run_path(str(ROOT / "setup.py"))
    extras = {
        extra: {requirement.split(">=")[0] for requirement in requirements}
        for extra, requirements in given["extras_require"].items()
    }
    extras["test"] -= extras["bench"] | extras["examples"]
    extras["dev"] -= extras["test"] | extras["bench"] | extras["examples"]
    assert {extra: set(names) for extra, names in packages.EXTRAS.items()} == extras


def test_every_method_that_communicates_is_tried():
    tried = {part for name in TRIALS for part in name.split(", ")}
    methods = {name for name, _ in inspect.getmembers(Communicator, inspect.isfunction)}
    public = {name for name in methods if not name.startswith("_")}
    # For what is to be done later.
    later = {"before_next_call", "at_end", "run_deferred", "finish"}
    assert tried == public - later - {"explain", "close", "close_at_exit", "forbid"}


def wrong(result):
    """Something that is not the result, of its kind."""
    if isinstance(result, np.ndarray):
        return result + 1
    if isinstance(result, list):
        return [wrong(each) for each in result]
    if isinstance(result, dict):
        return {}
    if isinstance(result, str):
        return f"{result}!"
    if callable(result):
        return lambda: wrong(result())
    return types.SimpleNamespace(wait=lambda: wrong(result.wait()))


def garbling(name):
    """A communicator whose rank 1 gets a wrong result of this call."""

    def garbled(comm, *arguments, **keywords):
        result = getattr(Communicator, name)(comm, *arguments, **keywords)
        return wrong(result) if comm.rank == 1 else result

    return type("Garbling", (Communicator,), {name: garbled})


class Maximizing(Communicator):
    """Gives the largest elements for the smallest."""

    def all_reduce_async(self, array, op="sum", **options):
        return super().all_reduce_async(array, "max" if op == "min" else op, **options)


class Disordered(Communicator):
    """Splits without regard to the key."""

    def split(self, color, key=0):
        return super().split(color)


def ranks_that_fail(size, kind, trial):
    def failed(transport):
        try:
            check(trial, kind(transport))
        except WrongResultError:
            return True
        return False

    return [rank for rank, failure in enumerate(run(size, failed)) if failure]


# Those that return nothing, and those that have a test of their own.
UNGARBLED = {
    "barrier",
    "barrier_async",
    "trace",
    "send, recv",
    "isend, irecv",
    "mailbox",
    "empty, zeros",
    "empty_shared",
    "split",
}


@pytest.mark.parametrize("name", sorted({*TRIALS, "recv", "irecv", "zeros"} - UNGARBLED))
def test_a_trial_finds_a_wrong_result(name):
    trial = next(trial for label, trial in TRIALS.items() if name in label.split(", "))
    assert ranks_that_fail(2, Communicator, trial) == []
    # The last rank is every trial's root.
    assert 1 in ranks_that_fail(2, garbling(name), trial)


def test_asynchronous_reductions_are_tried_by_every_op():
    assert ranks_that_fail(2, Maximizing, TRIALS["all_reduce_async"]) == [0, 1]


def test_a_trial_finds_a_split_in_the_wrong_order():
    assert ranks_that_fail(4, Communicator, TRIALS["split"]) == []
    assert ranks_that_fail(4, Disordered, TRIALS["split"]) == [0, 1, 2, 3]


class Misdelivering(Communicator):
    """Opens mailboxes of which rank 1's gives wrong arrays."""

    def mailbox(self):
        box = super().mailbox()
        receive = box.receive

        def wrongly(timeout):
            message = receive(timeout)
            return message._replace(arrays=wrong(message.arrays)) if self.rank == 1 else message

        box.receive = wrongly
        return box


def test_a_trial_finds_a_wrong_message():
    assert ranks_that_fail(2, Communicator, TRIALS["mailbox"]) == []
    assert ranks_that_fail(2, Misdelivering, TRIALS["mailbox"]) == [1]


class Forgetful(Communicator):
    """Writes a trace in which rank 1's calls are missing."""

    def trace(self, path):
        super().trace(path)
        if self.rank == 0:
            content = json.loads(path.read_text(encoding="utf-8"))
            events = [event for event in content["traceEvents"] if event["pid"] != 1]
            path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def test_a_trial_finds_a_rank_missing_in_the_trace():
    assert ranks_that_fail(2, Communicator, TRIALS["trace"]) == []
    assert ranks_that_fail(2, Forgetful, TRIALS["trace"]) == [0]
