"""The start of MPI through torch's store: torchrun, its restarts, torch.multiprocessing."""

import importlib.util
import math
import socket
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.frameworks.torch_backend.entry_point import entry_point
from tests.slow import slow_but
from tests.worlds import hosts
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.programs import run_launcher

USER = Path(__file__).with_name("user.py")
LIMIT = 180


@pytest.fixture(autouse=True)
def _needs_torchrun_and_mpich(torch):
    if importlib.util.find_spec("torch.distributed.run") is None:
        pytest.skip("this torch has no torchrun")
    if is_open_mpi(find_mpirun()):
        pytest.skip("only MPICH can start without mpirun")


@pytest.fixture
def python(tmp_path):
    """Run Python with arguments and a program; torch finds the backend by its entry point."""

    def run(*arguments, text="", **environment):
        if text:
            program = tmp_path / "program.py"
            program.write_text(textwrap.dedent(text), encoding="utf-8")
            arguments = [*arguments, program]
        line = [sys.executable, *map(str, arguments)]
        variables = {"PYTHONPATH": entry_point(tmp_path), "MARK": str(tmp_path / "mark")}
        return run_launcher(line, variables | environment, timeout=LIMIT)

    return run


@pytest.fixture
def torchrun(python):
    def run(ranks, *options, text=""):
        options = ["--standalone", "--nproc-per-node", ranks, *options]
        return python("-m", "torch.distributed.run", *options, text=text)

    return run


@pytest.mark.slow
def test_a_script_needs_nothing_but_torchrun(torchrun):
    ended = torchrun(2, USER, "collectives")
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks: 3.0" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["collectives", "gloo"])
def test_the_launch_command_leaves_torch_its_port(tmp_path, backend):
    """Rank 0 served the start there; then torch's store listens."""
    command = f"{sys.executable} -m collectives.launch --timeout 30 {USER} {backend}"
    line = f"RANK=1 {command} & other=$!; RANK=0 {command} && wait $other"
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables["PYTHONPATH"] = entry_point(tmp_path)
    ended = run_launcher(["sh", "-c", line], variables, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks: 3.0" in ended.stdout, ended.stderr


RESTARTED = r"""
import os, sys
import numpy as np
import collectives

comm = collectives.world()
assert comm.all_reduce(np.full(3, comm.rank + 1.0)).tolist() == [3.0] * 3
assert not [name for name in os.environ if name.startswith("PMI_")]

import torch
import torch.distributed as dist

dist.init_process_group("collectives")
assert collectives.world() is comm
assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
tensor = torch.tensor([comm.rank + 1.0])
dist.all_reduce(tensor)
if attempt == 0 and comm.rank == 1:
    raise ValueError("the first attempt fails")
dist.all_reduce(tensor)
dist.destroy_process_group()
sys.stdout.write(f"attempt {attempt}, rank {comm.rank}: {tensor.item()}\n")
"""


def test_a_restart_is_a_new_world(torchrun):
    """The store of torchrun keeps the keys of the first attempt, by which gloo fails here."""
    ended = torchrun(2, "--max-restarts", 1, text=RESTARTED)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"attempt 1, rank {rank}: 6.0" for rank in (0, 1)]
    assert "ValueError: the first attempt fails" in ended.stderr


def test_a_new_attempt_does_not_see_the_end_of_the_earlier_one(torch, monkeypatch):
    from collectives.torch import members
    from collectives.torch.members import Members

    monkeypatch.setattr(Members, "_gave_up", -math.inf)
    monkeypatch.setattr(members, "_PAUSE_SECONDS", 60)
    store = torch.distributed.HashStore()
    first = [Members(store, rank, 2, "first") for rank in (0, 1)]
    for member in first:
        member.begin_closing()
    assert all(member.await_all_closing(1) for member in first)
    second = Members(store, 0, 2, "second")
    second.begin_closing()
    assert not second.await_all_closing(0.05)
    # The next group of the same call doesn't wait again.
    third = Members(store, 0, 2, "third")
    third.begin_closing()
    began = time.monotonic()
    assert not third.await_all_closing(30)
    assert time.monotonic() - began < 20


def test_a_group_that_all_close_is_closed_however_late_one_is(torch, monkeypatch):
    """Between its calls to the store, too: no rank takes it for one that has ended."""
    from collectives.torch import members, process_group

    store = torch.distributed.HashStore()
    groups = []
    for rank in range(2):
        group = process_group.CollectivesProcessGroup.__new__(process_group.CollectivesProcessGroup)
        group._make_pending = lambda: None
        group._members = members.Members(store, rank, 2, "")
        groups.append(group)
    begin = groups[1]._members.begin_closing
    monkeypatch.setattr(groups[1]._members, "begin_closing", lambda: (time.sleep(0.2), begin()))
    closed = []
    for group in groups:
        group._comm = SimpleNamespace(closed=False, close=lambda: closed.append(1))
        group._messages = SimpleNamespace(close=lambda: None)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: group.shutdown(), groups))
    assert len(closed) == 2


def test_a_group_whose_other_members_have_ended_is_not_closed(torch, monkeypatch):
    """Its close would wait for them."""
    from collectives.torch.members import Members

    monkeypatch.setattr(Members, "_gave_up", -math.inf)
    mine, gone = (Members(torch.distributed.HashStore(), rank, 2, "") for rank in (0, 1))
    gone._store = mine._store
    gone.end()
    mine.begin_closing()
    began = time.monotonic()
    assert not mine.await_all_closing(30)
    assert time.monotonic() - began < 20


SPAWNED = r"""
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, path):
    dist.init_process_group("collectives", init_method=f"file://{path}", rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == 3
    dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} ends\n")

if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[0] + ".store",), 2, start_method="METHOD")
"""


@pytest.mark.parametrize("method", slow_but(["spawn", "fork"]))
def test_processes_of_torch_multiprocessing(python, method):
    ended = python(text=SPAWNED.replace("METHOD", method))
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"]


LATE = r"""
import os, sys, time
import collectives

rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(12)
    raise SystemExit
try:
    collectives.world(deadline=1)
except collectives.DeadlineExceededError as error:
    sys.stdout.write(f"rank {rank} lacks {error.absent}\n")
"""


@pytest.mark.slow
def test_an_absent_rank_is_named(torchrun):
    ended = torchrun(3, text=LATE)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["rank 0 lacks (1,)", "rank 2 lacks (1,)"]


FAILED = """
import os, sys, time
import collectives
from collectives.launching import start

if "init" in sys.argv and os.environ["RANK"] == "1":
    start.initialize = lambda mpi: os._exit(7)
comm = collectives.world()
comm.barrier()
if comm.rank == 1:
    from mpi4py import MPI

    if "fork" in sys.argv and os.fork() == 0:
        os.closerange(0, 3)
        time.sleep(60)
        os._exit(0)
    MPI.COMM_WORLD.Abort(7) if "abort" in sys.argv else os._exit(7)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code"), [("abort", "7"), ("end", "1"), ("fork", "1"), ("init", "137")]
)
def test_a_rank_that_ends_early_ends_the_others_without_torchrun(tmp_path, how, code):
    """The variables are set by hand, and nothing else ends the processes."""
    program = tmp_path / "program.py"
    program.write_text(FAILED)
    line = (
        "ranks=''; for rank in 0 1 2; do"
        f' RANK=$rank {sys.executable} {program} {how} & ranks="$ranks $!"; done;'
        " for process in $ranks; do wait $process; echo $?; done"
    )
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run_launcher(["sh", "-c", line], variables, timeout=50)
    assert ended.stdout.split() == [code, "7", code], ended.stderr
    for rank in (0, 2) if how != "init" else ():
        assert f"rank {rank} ends, because rank 1 has ended" in ended.stderr


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


ON_TWO_HOSTS = r"""
import os, pathlib, platform, sys
import collectives
import torch
import torch.distributed as dist

dist.init_process_group("collectives")
comm, mark = collectives.world(), pathlib.Path(os.environ["MARK"])
names = comm.all_gather_object(platform.node())
assert (comm.nodes, comm.local_size) == (2, names.count(platform.node())) == (2, 2), names
tensor = torch.full((100_000,), comm.rank + 1.0)
dist.all_reduce(tensor)
assert tensor.eq(10).all()
if comm.rank == 3 and not mark.exists():
    mark.touch()
    raise ValueError("the first attempt fails")
dist.barrier()
dist.destroy_process_group()
sys.stdout.write(f"rank {comm.rank} ends\n")
"""


@pytest.mark.slow
def test_restarts_on_two_hosts(tmp_path):
    if (reason := hosts.why_not()) is not None:
        pytest.skip(f"no hosts can be imitated: {reason}")
    program = tmp_path / "program.py"
    program.write_text(ON_TWO_HOSTS)
    with hosts.hosts(2) as (addresses, agent):
        parts = []
        for number, address in enumerate(addresses):
            # Hosts' names can't be resolved.
            options = f"--rdzv-endpoint {addresses[0]}:29500 --rdzv-conf is_host={1 - number}"
            parts += [
                f"{agent} {address} {sys.executable} -m torch.distributed.run --nnodes 2"
                f" --nproc-per-node 2 --max-restarts 1 --rdzv-backend c10d --rdzv-id job {options}"
                f" --local-addr {address} {program} & "
            ]
        # Without it, UCX would use this machine's shared memory between the hosts.
        variables = {"UCX_TLS": "tcp,self", "MARK": str(tmp_path / "mark")}
        variables["PYTHONPATH"] = entry_point(tmp_path)
        ended = run_launcher(["sh", "-c", "".join([*parts, "wait"])], variables, timeout=LIMIT)
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} ends" for rank in range(4)], (
        ended.stderr
    )
    assert "ValueError: the first attempt fails" in ended.stderr
