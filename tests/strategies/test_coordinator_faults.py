"""Chiefs, workers and servers that fail, end early or are killed: users' programs."""

import sys
import textwrap
import time

import pytest

from tests.worlds.dying import launcher_line
from tests.worlds.programs import run_launcher

START = """
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later(45, exit=True)
import numpy as np
import collectives
from strategies import ClusterSpec, Variable
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.coordinator import ClusterCoordinator
from strategies.parameter_server import ParameterServerStrategy

comm = collectives.world(deadline=20)
rank, size = comm.rank, comm.size
cluster = ClusterSpec({"ps": ["s"], "worker": ["w"] * (size - 2), "chief": ["c"]})
task = ("ps", 0) if rank == 0 else ("chief", 0) if rank == 1 else ("worker", rank - 2)
resolver = SimpleClusterResolver(cluster, task_type=task[0], task_id=task[1])
strategy = ParameterServerStrategy(resolver)


def mark(text):
    with open(os.path.join(os.environ["MARKS"], f"{rank} {text}"), "w"):
        pass


def kill_at(count, victim):
    # The victim's own process, once it has come here so often.
    global calls
    calls += 1
    if rank == victim and calls == count:
        os.kill(os.getpid(), signal.SIGKILL)


calls = 0
if rank != 1:
    # before serving
    try:
        strategy.serve()
        mark("served")
    except collectives.RankFailedError as error:
        assert "the chief, rank 1, has died" in str(error), error
        mark("orphaned")
else:
    with strategy.scope():
        total = Variable(np.zeros(1000))
    coordinator = ClusterCoordinator(strategy)



def add(number, pause=0.0, count=0, victim=None):
    time.sleep(pause)
    sys.modules["__main__"].kill_at(count, victim)
    total.assign_add(np.ones(1000))
    return number


if rank == 1:
    # the chief
"""

LIMIT_SECONDS = 40


def run(size, chief, directory, *, serve="pass", deaths=False):
    """Run the chief's program; the files that the ranks have written, and mpirun's result."""
    body = textwrap.indent(textwrap.dedent(chief), "    ")
    text = START.replace("# before serving", serve).replace("    # the chief\n", body)
    line = launcher_line(size, [sys.executable, "-c", text], deaths=deaths)
    start = time.monotonic()
    ended = run_launcher(
        line, {"MARKS": str(directory), "CODES": str(directory), "SIZE": str(size)}, timeout=80
    )
    assert time.monotonic() - start < LIMIT_SECONDS, ended.stderr
    names = [path.name for path in directory.iterdir()]
    return sorted(name for name in names if not name.startswith("code")), ended


def test_what_a_killed_worker_ran_is_run_by_another(tmp_path):
    chief = """
results = [coordinator.schedule(add, (number, 0.01, 5, 2)) for number in range(40)]
coordinator.join()
assert coordinator.fetch(results) == list(range(40))
assert total.numpy().min() >= 40
assert total.numpy().max() <= 41
assert coordinator.schedule(add, (7,)).get() == 7
mark("finished")
strategy.shutdown()
"""
    marks, ended = run(4, chief, tmp_path, deaths=True)
    assert marks == ["0 served", "1 finished", "3 served"], ended.stderr


@pytest.mark.slow
def test_workers_that_never_serve_are_lost_and_block_no_rank(tmp_path):
    chief = """
future = coordinator.schedule(add, (0,))
try:
    coordinator.join()
except collectives.RankFailedError as error:
    assert "no worker is left of worker 0 (rank 2), worker 1 (rank 3)" in str(error), error
    mark("told")
strategy.shutdown()
"""
    marks, ended = run(4, chief, tmp_path, serve="if task[0] == 'worker': sys.exit()")
    assert (marks, ended.returncode) == (["0 served", "1 told"], 0), ended.stderr


@pytest.mark.slow
def test_one_worker_that_serves_is_enough(tmp_path):
    chief = """
assert [coordinator.schedule(add, (each,)).get() for each in range(5)] == list(range(5))
mark("finished")
strategy.shutdown()
"""
    marks, ended = run(4, chief, tmp_path, serve="if task == ('worker', 1): sys.exit()")
    assert (marks, ended.returncode) == (["0 served", "1 finished", "2 served"], 0), ended.stderr


WAYS = {"killed": "os.kill(os.getpid(), 9)", "interrupted": "raise KeyboardInterrupt"}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_ends_inside_a_function_blocks_no_rank(way, tmp_path):
    chief = f"""
def fragile(number):
    import os, __main__
    __main__.calls += 1
    if __main__.rank == 2 and __main__.calls == 3:
        {WAYS[way]}
    total.assign_add(np.ones(1000))
    return number

results = [coordinator.schedule(fragile, (number,)) for number in range(40)]
coordinator.join()
assert coordinator.fetch(results) == list(range(40))
assert total.numpy().min() >= 40
mark("finished")
strategy.shutdown()
"""
    marks, ended = run(4, chief, tmp_path, deaths=True)
    assert marks == ["0 served", "1 finished", "3 served"], ended.stderr
    assert ended.stderr.count("is lost") == 1, ended.stderr
    assert "worker 0 (rank 2) is lost" in ended.stderr


@pytest.mark.slow
def test_without_workers_the_chief_gets_an_error(tmp_path):
    chief = """
results = [coordinator.schedule(add, (number, 0.01, 5, 2)) for number in range(40)]
for call in (coordinator.join, coordinator.done, lambda: coordinator.schedule(add, (1,))):
    try:
        call()
    except collectives.RankFailedError as error:
        assert "no worker is left of worker 0 (rank 2)" in str(error), error
    else:
        raise AssertionError("no error")
assert total.numpy()[0] == 4
mark("told")
"""
    marks, ended = run(3, chief, tmp_path, deaths=True)
    assert marks == ["0 served", "1 told"], ended.stderr


def test_a_killed_server_is_named(tmp_path):
    serve = (
        "import threading\n"
        "    if rank == 0: threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()"
    )
    chief = """
told = 0
while told < 3:
    try:
        for number in range(20):
            coordinator.schedule(add, (number, 0.01))
        coordinator.join()
    except collectives.RankFailedError as error:
        assert "ps 0 (rank 0)" in str(error), error
        assert "has died" in str(error), error
        told += 1
mark("told")
"""
    marks, ended = run(4, chief, tmp_path, serve=serve, deaths=True)
    assert "1 told" in marks, ended.stderr


def test_a_killed_chief_lets_the_others_end(tmp_path):
    chief = """
for number in range(40):
    coordinator.schedule(add, (number, 0.01))
time.sleep(0.2)
os.kill(os.getpid(), signal.SIGKILL)
"""
    marks, ended = run(4, chief, tmp_path, deaths=True)
    assert marks == ["0 served", "2 orphaned", "3 orphaned"], ended.stderr


ENDS = {
    "the end of its script": ("", 0),
    "shutdown": ("strategy.shutdown()", 0),
    "an exception": ("raise KeyError('the chief is unwell')", 1),
    "exit": ("sys.exit(7)", 7),
}


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", [30, 0])
@pytest.mark.parametrize("kind", ENDS)
def test_when_the_chief_ends_the_others_do(kind, scheduled, tmp_path):
    ending, code = ENDS[kind]
    chief = f"""
for number in range({scheduled}):
    coordinator.schedule(add, (number, 0.01))
{ending}
"""
    marks, ended = run(4, chief, tmp_path)
    assert marks == ["0 served", "2 served", "3 served"], ended.stderr
    assert (ended.returncode != 0) == (code != 0), ended.stderr
    assert ended.stderr.count("Traceback") == (kind == "an exception"), ended.stderr
