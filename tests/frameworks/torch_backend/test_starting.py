"""How programs reach the backend: under mpirun alone, and through torch's entry point."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks.torch_backend.entry_point import entry_point
from tests.slow import slow

USER = str(Path(__file__).with_name("user.py"))
ROOT = Path(__file__).parents[3]

TORCHS_VARIABLES = """
import os, socket, collectives
comm = collectives.world()
with socket.create_server(('127.0.0.1', 0)) as server:
    port = comm.broadcast_object(server.getsockname()[1])
comm.barrier()
os.environ.update(RANK=str({rank}), WORLD_SIZE=str(comm.size))
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
"""


@pytest.fixture(autouse=True)
def _needs_torch(torch):
    pass


@pytest.mark.parametrize("ending", ["destroy", *slow("leave")])
def test_a_script_starts_under_mpirun_without_an_import_or_a_variable(launch, tmp_path, ending):
    command = [
        "env",
        f"PYTHONPATH={entry_point(tmp_path)}",
        sys.executable,
        USER,
        "collectives",
        ending,
    ]
    ended = launch(2, command, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks: 3.0" in ended.stdout
    assert ended.stderr == ""


def test_gloo_starts_in_the_same_way(launch, tmp_path):
    command = ["env", f"PYTHONPATH={entry_point(tmp_path)}", sys.executable, USER, "gloo"]
    ended = launch(2, command, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_torchs_own_variables_come_first(launch):
    """A port, a rank and a size that the user has given are used, whatever MPI says."""
    program = (
        "import collectives.torch, torch.distributed as dist\n"
        + TORCHS_VARIABLES.format(rank="1 - comm.rank")
        + "try: dist.init_process_group('collectives')\n"
        "except ValueError as error: assert 'mpirun started this process as rank' in str(error)\n"
        "else: raise AssertionError('no error')\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_rank_that_creates_no_group_is_not_waited_for_longer_than_the_timeout(launch):
    program = (
        "import collectives, collectives.torch, torch.distributed as dist\n"
        "from collectives.torch import groups\n"
        "from datetime import timedelta\n"
        "def refuse(*_): raise ValueError('refused')\n"
        "comm = collectives.world()\n"
        "if comm.rank: groups.create = refuse\n"
        "try: dist.init_process_group('collectives', timeout=timedelta(seconds=1))\n"
        "except ValueError: assert comm.rank\n"
        "except RuntimeError as error: assert not comm.rank, error\n"
        "else: raise AssertionError('no error')\n"
        "comm.barrier()\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=40)
    assert ended.returncode == 0, ended.stderr


def test_a_rank_that_destroys_its_group_late_does_not_wait_for_the_others(launch):
    program = (
        "import time, collectives, collectives.torch, torch, torch.distributed as dist\n"
        "from collectives.torch import process_group\n"
        "process_group._SHUTDOWN_SECONDS = 0.2\n"
        "dist.init_process_group('collectives')\n"
        "rank = dist.get_rank()\n"
        "time.sleep(0 if rank else 1)\n"
        "start = time.monotonic()\n"
        "dist.destroy_process_group()\n"
        "assert time.monotonic() - start < 4\n"
        "if rank: time.sleep(8)\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_tracebacks_have_torchs_prefix(launch):
    program = (
        "import collectives.torch, torch.distributed as dist\n"
        "dist.init_process_group('collectives')\n"
        "if dist.get_rank(): raise ValueError('a bad\\n\\nbatch')\n"
        "dist.barrier()\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode != 0
    assert "[rank1]: ValueError: a bad\n\n[rank1]: batch\n" in ended.stderr, ended.stderr


def test_a_group_is_destroyed_after_the_store_of_rank_0(launch):
    """As a rank does that evaluates longer; `abort` ends a pending call, and closes a group."""
    program = (
        "import gc, time, torch, torch.distributed as dist\n"
        "from collectives.torch import process_group\n"
        "from collectives.torch.members import Members\n"
        + TORCHS_VARIABLES.format(rank="comm.rank")
        + "dist.init_process_group('collectives')\n"
        "group, await_all_closing = dist.new_group(), Members.await_all_closing\n"
        "def late(*arguments):\n"
        "    closes = await_all_closing(*arguments)\n"
        "    time.sleep(0.1 * comm.rank)\n"
        "    return closes\n"
        "Members.await_all_closing = late\n"
        "process_group._SHUTDOWN_SECONDS = 20.0\n"
        "group.abort()\n"
        "assert group._comm.closed\n"
        "Members.await_all_closing, process_group._SHUTDOWN_SECONDS = await_all_closing, 0.2\n"
        "if comm.rank:\n"
        "    comm.barrier()\n"
        "    dist.destroy_process_group()\n"
        "else:\n"
        "    work = dist.all_reduce(torch.ones(2), async_op=True)\n"
        "    start = time.monotonic()\n"
        "    dist.distributed_c10d._abort_process_group()\n"
        "    assert time.monotonic() - start < 20\n"
        "    assert 'deadline' in str(work.exception()) or 'aborted' in str(work.exception())\n"
        "    del work\n"
        "    gc.collect()\n"
        "    comm.barrier()\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_abort_ends_what_other_threads_wait_for(launch):
    program = (
        "import threading, collectives, collectives.torch, torch, torch.distributed as dist\n"
        "from collectives.torch import process_group\n"
        "process_group._SHUTDOWN_SECONDS = 5.0\n"
        "dist.init_process_group('collectives')\n"
        "one, errors = torch.ones(2), []\n"
        "def note(call):\n"
        "    try: call()\n"
        "    except Exception as error: errors.append(type(error).__name__)\n"
        "if dist.get_rank() == 0:\n"
        "    calls = [lambda: dist.all_reduce(one), lambda: dist.recv(one, 1)]\n"
        "    threads = [threading.Thread(target=note, args=[call]) for call in calls]\n"
        "    for each in threads: each.start()\n"
        "    for each in threads: each.join(1)\n"
        "    pending = [dist.all_reduce(one, async_op=True) for _ in range(5)]\n"
        "    end = threading.Thread(target=dist.group.WORLD.abort)\n"
        "    end.start()\n"
        "    while end.is_alive():\n"
        "        pending.append(dist.all_reduce(one, async_op=True))\n"
        "        end.join(0.01)\n"
        "    for each in threads: each.join(5)\n"
        "    assert sorted(errors) == ['DeadlineExceededError', 'UnusableError'], errors\n"
        "    for each in pending: note(each.wait)\n"
        "    later = errors[2:]\n"
        "    assert later[-1] == 'UnusableError' and len(later) == len(pending), later\n"
        "collectives.world().barrier()\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=100)
    assert ended.returncode == 0, ended.stderr


def test_mpi_for_a_single_thread_is_refused():
    program = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "import collectives, collectives.torch, torch.distributed as dist\n"
        "try: dist.init_process_group('collectives', init_method='mpi://')\n"
        "except collectives.BackendUnavailableError as error: assert 'MULTIPLE' in str(error)\n"
        "else: raise AssertionError('no error')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_mpi_that_is_a_world_of_one_is_refused():
    """As Lightning starts it, before the environment has a rank."""
    program = (
        "from mpi4py import MPI\n"
        "import collectives, collectives.torch, torch.distributed as dist\n"
        "store = dist.HashStore()\n"
        "try: dist.init_process_group('collectives', store=store, rank=0, world_size=2)\n"
        "except collectives.LaunchError as error: assert 'LightningEnv' in str(error), error\n"
        "else: raise AssertionError('no error')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_one_process_alone():
    program = (
        "import collectives.torch, torch, torch.distributed as dist\n"
        "dist.init_process_group('collectives', init_method='mpi://')\n"
        "tensor = torch.ones(2); dist.all_reduce(tensor); assert tensor.tolist() == [1, 1]\n"
        "dist.all_reduce(tensor, async_op=True).wait(); dist.destroy_process_group()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_importing_collectives_imports_no_torch():
    program = "import sys, collectives; assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_names_of_collectives_torch_are_imported_by_their_first_use():
    program = (
        "import sys, collectives.torch\n"
        "assert 'collectives.torch.functions' not in sys.modules\n"
        "assert set(collectives.torch.__all__) >= {'all_reduce', 'SyncBatchNorm'}\n"
        "for name in collectives.torch.__all__: assert callable(getattr(collectives.torch, name))\n"
        "try: collectives.torch.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise AssertionError('no error')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_torch_is_imported_where_collectives_can_not_be(tmp_path):
    """A package that collectives needs may be absent or broken: the process group says so."""
    path = entry_point(tmp_path)
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('a broken package')")
    environment = os.environ | {"PYTHONPATH": path}
    program = (
        "import torch\n"
        "print(torch.ones(2).sum().item())\n"
        "torch.distributed.init_process_group('collectives', init_method='mpi://')\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0
    assert ended.stdout == "2.0\n"
    assert ended.stderr.endswith("ImportError: a broken package\n"), ended.stderr
