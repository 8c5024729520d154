"""Workers and servers that fail, end early or are killed: users' programs."""

import sys
import textwrap
import time

import pytest

from tests.slow import slow_but
from tests.worlds.dying import launcher_line
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

START = """
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later(45, exit=True)
import numpy as np
import collectives
from strategies import ClusterSpec, Variable, optimizers
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.parameter_server import ParameterServerStrategy

comm = collectives.world(deadline=20)
rank, size = comm.rank, comm.size
servers = int(os.environ["SERVERS"])
task = ("ps", rank) if rank < servers else ("worker", rank - servers)
cluster = ClusterSpec({"ps": ["s"] * servers, "worker": ["w"] * (size - servers)})
resolver = SimpleClusterResolver(cluster, task_type=task[0], task_id=task[1])
staleness = int(os.environ["STALENESS"]) if os.environ["STALENESS"] else None
strategy = ParameterServerStrategy(resolver, staleness=staleness)
STEPS = 40


def mark(text):
    with open(os.path.join(os.environ["MARKS"], f"{rank} {text}"), "w"):
        pass


def train(steps=STEPS, pause=0.0):
    optimizer = optimizers.SGD(1.0)
    for _ in range(steps):
        time.sleep(pause)
        gradients = [(np.full(3, -1.0), first), (np.full(20_000, -1.0), second)]
        strategy.run(optimizer.apply_gradients, args=(gradients,))
        assert np.isfinite(first * second[:3]).all()


if task[0] == "ps":
    # before serving
    strategy.serve()
    mark("served")
else:
    with strategy.scope():
        first, second = Variable(np.zeros(3)), Variable(np.zeros(20_000))
"""


class Ending:
    """The program's result, and the files that its ranks have written."""

    def __init__(self, ended, seconds, directory):
        self.returncode, self.output, self.errors = ended.returncode, ended.stdout, ended.stderr
        self.seconds = seconds
        names = [path.name for path in directory.iterdir()]
        self.marks = sorted(name for name in names if not name.startswith("code"))
        codes = (path.read_text() for path in directory.iterdir() if path.name.startswith("code"))
        self.codes = sorted(int(code) for code in codes)

    def __repr__(self):
        return f"code {self.returncode}, codes {self.codes}, marks {self.marks}\n{self.errors}"


def run(size, servers, body, directory, *, serve="pass", deaths=False, staleness=""):
    """Run the body on the workers."""
    text = START.replace("# before serving", serve) + textwrap.indent(textwrap.dedent(body), "    ")
    line = launcher_line(size, [sys.executable, "-c", text], deaths=deaths)
    variables = {"MARKS": str(directory), "SERVERS": str(servers), "SIZE": str(size)}
    variables |= {"CODES": str(directory), "STALENESS": str(staleness)}
    start = time.monotonic()
    ended = run_launcher(line, variables, timeout=80)
    return Ending(ended, time.monotonic() - start, directory)


SIZES = pytest.mark.parametrize(
    ("size", "servers"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)]
)

ENDS = {
    "an exception": ("raise KeyError('one is unwell')", 1),
    "exit": ("sys.exit(7)", 7),
    "the end of its script": ("", 0),
}


@pytest.mark.slow
@SIZES
@pytest.mark.parametrize("kind", slow_but(ENDS, "an exception"))
def test_a_worker_that_ends_early_does_not_end_the_others(size, servers, kind, tmp_path):
    ending, code = ENDS[kind]
    body = f"""
if rank == size - 1:
    train(3)
    {ending or "pass"}
else:
    train(pause=0.02)
    values = [variable.numpy().copy() for variable in (first, second)]
    assert all(STEPS <= value.min() for value in values), values
    mark("finished")
    strategy.shutdown()
"""
    ended = run(size, servers, body, tmp_path)
    wanted = [f"{rank} served" for rank in range(servers)]
    wanted += [f"{rank} finished" for rank in range(servers, size - 1)]
    assert ended.marks == wanted, ended
    assert (ended.returncode != 0) == (code != 0), ended
    assert ("KeyError: 'one is unwell'" in ended.errors) == (kind == "an exception"), ended
    assert ended.errors.count("Traceback") == (kind == "an exception"), ended
    assert ended.seconds < 40


@pytest.mark.slow
@SIZES
def test_a_killed_worker_does_not_end_the_others(size, servers, tmp_path):
    body = """
if rank == size - 1:
    train(3)
    os.kill(os.getpid(), signal.SIGKILL)
train(pause=0.02)
assert first.numpy().min() >= STEPS
mark("finished")
strategy.shutdown()
"""
    ended = run(size, servers, body, tmp_path, deaths=True)
    wanted = [f"{rank} served" for rank in range(servers)]
    wanted += [f"{rank} finished" for rank in range(servers, size - 1)]
    assert ended.marks == wanted, ended
    if not is_open_mpi(find_mpirun()):
        assert ended.codes == [0] * (size - 1) + [137], ended
    assert ended.seconds < 40


def test_a_server_that_never_serves_is_named(tmp_path):
    serve = "mark('here'); sys.exit()"
    ended = run(3, 1, "", tmp_path, serve=serve)
    assert ended.marks == ["0 here"], ended
    assert ended.returncode != 0
    assert "RankFailedError: " in ended.errors
    named = "ps 0 (rank 0) has ended, or never called `serve()`", "can be sent to ps 0 (rank 0)"
    assert any(each in ended.errors for each in named), ended
    assert ended.seconds < 40


MIDDLES = {
    "a push": "large.assign_add(ones)",
    "a pull by messages": "large.numpy()",
}


@pytest.mark.parametrize("middle", slow_but(MIDDLES, "a push"))
def test_a_worker_killed_in_the_middle_of_a_large_message(middle, tmp_path):
    body = f"""
import threading
if {middle == "a pull by messages"}:
    strategy.worker.client._same_node = lambda number: False
with strategy.scope():
    large = Variable(np.zeros(4_000_000))
ones = np.ones(4_000_000)
if rank == size - 1:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True: {MIDDLES[middle]}
end = time.monotonic() + 1.5
while time.monotonic() < end:
    {MIDDLES[middle]}
    value = large.numpy()
    assert value.min() == value.max()
mark("finished")
strategy.shutdown()
"""
    ended = run(3, 1, body, tmp_path, deaths=True)
    assert ended.marks == ["0 served", "1 finished"], ended
    assert ended.seconds < 40


@pytest.mark.slow
@SIZES
def test_a_killed_worker_ends_the_wait_for_it(size, servers, tmp_path):
    body = """
if rank == size - 1:
    train(1)
    os.kill(os.getpid(), signal.SIGKILL)
train()
mark("finished")
"""
    ended = run(size, servers, body, tmp_path, deaths=True, staleness=1)
    assert [f"{rank} finished" for rank in range(servers, size - 1)] == [
        mark for mark in ended.marks if "finished" in mark
    ], ended
    assert ended.seconds < 40


WAITS = {
    "pulling": "while True: first.numpy()",
    "pushing": "while True: first.assign_add(np.ones(3)); time.sleep(0.001)",
    "training": "train(steps=1_000_000)",
    "pulling by messages": (
        "strategy.worker.client._same_node = lambda number: False\n    while True: first.numpy()"
    ),
}


@pytest.mark.parametrize("wait", slow_but(WAITS, "training"))
def test_a_killed_server_is_named(wait, tmp_path):
    body = f"""
start = time.monotonic()
try:
    {WAITS[wait]}
except collectives.RankFailedError as error:
    assert "ps 0 (rank 0)" in str(error), error
    assert time.monotonic() - start < 15
    mark("told")
"""
    serve = "import threading; threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()"
    ended = run(3, 1, body, tmp_path, serve=serve, deaths=True)
    assert ended.marks == ["1 told", "2 told"], ended
    if not is_open_mpi(find_mpirun()):
        assert ended.codes == [0, 0, 137], ended
    assert ended.seconds < 40


@pytest.mark.slow
def test_a_server_that_fails_ends_the_job(tmp_path):
    body = "train(steps=1_000_000)"
    ended = run(2, 1, body, tmp_path, serve="raise OSError('no room')")
    assert ended.returncode != 0
    assert "OSError: no room" in ended.errors, ended
    assert ended.seconds < 15
