"""Uncaught errors: one traceback where all ranks raise the same, and the end of the job."""

import re
import subprocess
import sys
import time

import pytest

from tests.slow import slow_but
from tests.worlds.launcher import find_mpirun, is_open_mpi

pytestmark = pytest.mark.both_mpis

# The rank that shows the traceback ends the job once the others have had time for their lines.
START = (
    "import collectives, numpy, sys\n"
    "from collectives.consistency import uncaught\n"
    "uncaught._FURTHER_HOP = 1.0\n"
    "comm = collectives.world()\n"
    "rank = comm.rank\n"
)
# The raised error, the world rank that shows the traceback, and the ranks that don't.
ALIKE = {
    "a mismatch": (
        "comm.all_reduce(numpy.ones(3 + rank))",
        "ShapeMismatchError: the ranks called arrays of different shapes",
        (0, 1, 2),
    ),
    # As torch.distributed.init_process_group does, in order to print a prefix before each line.
    "a mismatch within a hook that collects what it prints": (
        "import io\n"
        "hook = sys.excepthook\n"
        "def collect(*error):\n"
        "    stderr, sys.stderr = sys.stderr, io.StringIO()\n"
        "    hook(*error)\n"
        "    stderr.write(sys.stderr.getvalue())\n"
        "sys.excepthook = collect\n"
        "comm.all_reduce(numpy.ones(3 + rank))",
        "ShapeMismatchError: the ranks called arrays of different shapes",
        (0, 1, 2),
    ),
    "an asynchronous mismatch": (
        "comm.all_reduce_async(numpy.ones(3 + rank)).wait()",
        "ShapeMismatchError: the ranks called arrays of different shapes",
        (0, 1, 2),
    ),
    "the root's error": (
        "comm.scatter(numpy.ones(3) if rank else [{}, 7])",
        "TypeError: ",
        (0, 1, 2),
    ),
    "a communicator of some ranks, in an order of their own": (
        "part = comm.split(0 if rank else None, key=-rank)\n"
        "if part is None: comm.barrier()\n"
        "part.all_reduce(numpy.ones(3 + rank))",
        "ShapeMismatchError: the ranks called arrays of different shapes",
        (2, 1),
    ),
    "a program that ends on rank 0": (
        "if rank == 0: sys.exit()\ncomm.barrier()",
        "CollectiveMismatchError: the ranks called different collectives",
        (1, 2),
    ),
    "the first world()": (
        "comm.close()\ncollectives.world(backend='bogus')",
        "ValueError: rank 0: backend='bogus': must be 'auto', 'mpi' or 'nccl'",
        (0, 1, 2),
    ),
    "a strategy's check": (
        "import strategies\nstrategies.LocalSGDStrategy(sync_every=1 + rank)",
        "ValueError: LocalSGDStrategy: the ranks' arguments differ",
        (0, 1, 2),
    ),
    "what all ranks are refused": (
        "import strategies\n"
        "strategy = strategies.MultiWorkerMirroredStrategy()\n"
        "strategy.reduce('sum', {}, axis='x')",
        "Error: ",
        (0, 1, 2),
    ),
}


# A framework that strategies refuse.
FOREIGN = """
import strategies
from strategies.foreign import registry
from tests.strategies import imagined_framework as imagined
registry.FRAMEWORKS, registry._MODULES = (imagined.Imagined(),), frozenset(["imagined"])
imagined.load()
strategy, model = strategies.MultiWorkerMirroredStrategy(), None
"""
for way, use in {
    "scope": "with strategy.scope(): model = imagined.Model('net')",
    "run": "model = imagined.Model('net')\nstrategy.run(lambda: model)",
    "step": "strategy.run(lambda: imagined.Optimizer().step())",
}.items():
    ALIKE[f"a model in {way}"] = FOREIGN + use, "TypeError: the Imagined ", (0, 1, 2)

LEFT = re.compile(r"^rank (\d): (.*) \(raised on all ranks: rank \d of the .*\)$", re.MULTILINE)


BY_DEFAULT = ("a mismatch within a hook that collects what it prints", "a model in run")


@pytest.mark.parametrize("case", slow_but(ALIKE, *BY_DEFAULT))
def test_an_error_that_all_ranks_raise_has_one_traceback(case, launch):
    program, message, (_, *others) = ALIKE[case]
    ended = launch(3, [sys.executable, "-c", START + program], timeout=60)
    assert ended.returncode != 0
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if message in line]
    left = {int(rank): text for rank, text in LEFT.findall(ended.stderr)}
    assert sorted(left) == sorted(others), ended.stderr
    assert all(message in text for text in left.values())
    assert len(lines) == 1 + len(others)
    if "MismatchError" in message:
        # The program's line comes last, not those of the package. torch's prefix stays.
        prefix = "[rank0]: " if "hook" in case else ""
        places = re.findall(rf'^{re.escape(prefix)}  File "(.*?)"', ended.stderr, re.MULTILINE)
        assert places[-1] == "<string>"


@pytest.mark.slow
def test_under_mpi4pys_runner_too(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(START + "comm.all_reduce(numpy.ones(3 + rank))\n")
    ended = launch(2, [sys.executable, "-m", "mpi4py", str(program)], timeout=60)
    assert ended.returncode != 0
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert [rank for rank, _ in LEFT.findall(ended.stderr)] == ["1"]


# Open MPI 5.0.11's own mpirun ends the ranks, and then sometimes itself never ends: it locks a
# mutex twice if the other rank is ended while it connects (PMIX_ERR_UNREACH is its last message).
@pytest.mark.skipif(
    is_open_mpi(find_mpirun() or "mpirun"), reason="Open MPI's mpirun ends the ranks without us"
)
def test_an_exception_before_the_start_of_mpi_ends_the_job(launch):
    program = (
        "import collectives, os, sys\n"
        "if '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')):\n"
        "    sys.stdout = None\n"
        "    raise FileNotFoundError('no such data')\n"
        "collectives.world()"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    # MPICH's mpirun may give that of the rank that it kills.
    assert ended.returncode == 1 or (ended.returncode == 9 and not is_open_mpi(find_mpirun()))
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "\nFileNotFoundError: no such data\n" in ended.stderr


@pytest.mark.skipif(
    is_open_mpi(find_mpirun() or "mpirun"),
    reason="Open MPI's mpirun ends the job at the first failure",
)
def test_after_an_exception_before_the_start_of_mpi_a_later_program_starts(launch):
    # One write for a line: print makes two under PYTHONUNBUFFERED, between which the other rank's
    # line may come.
    shows = 'import os, collectives; os.write(1, b"%d\\n" % collectives.world().size)'
    program = (
        f"{sys.executable} -c 'import collectives; raise ValueError' || "
        f"exec {sys.executable} -c '{shows}'"
    )
    ended = launch(2, ["sh", "-c", program], timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", "2"]


def test_an_exception_after_mpi_has_ended_is_shown(launch):
    # mpirun may end the other rank as soon as this one has ended.
    end_late = "import atexit, time\natexit.register(time.sleep, 2)\n"
    program = START + end_late + "from mpi4py import MPI\nMPI.Finalize()\nraise KeyError(rank)"
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode != 0
    for rank in range(2):
        assert f"\nKeyError: {rank}\n" in ended.stderr, ended.stderr


# A stand-in for torch suffices: the entry point registers nothing with it.
ENTRY = """
import os, socket, sys, types
ends = socket.socketpair()
os.environ["PMI_FD"] = str(ends[0].fileno())
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.distributed = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
torch.distributed.is_available = lambda: False
import collectives_torch_entry
collectives_torch_entry.register()
assert "collectives" not in sys.modules and sys.excepthook is sys.__excepthook__
import collectives
assert sys.excepthook is not sys.__excepthook__
"""


def test_import_torch_imports_no_collectives():
    """Processes of mpirun that use torch alone may not belong together: they keep their hook."""
    subprocess.run([sys.executable, "-W", "error", "-c", ENTRY], check=True)


def test_what_one_rank_alone_knows_of_it_is_shown_there(launch):
    program = (
        "import strategies\n"
        "strategy = strategies.MultiWorkerMirroredStrategy()\n"
        "strategy.reduce('sum', 1.0, axis='x' if rank == 1 else None)"
    )
    ended = launch(3, [sys.executable, "-c", START + program], timeout=60)
    assert ended.returncode != 0
    # Rank 1's, preceded by its own TypeError; the mismatch on rank 0.
    assert ended.stderr.count("Traceback") == 3, ended.stderr
    assert "\nTypeError: axis='x'" in ended.stderr
    assert [rank for rank, _ in LEFT.findall(ended.stderr)] == ["2"]


def test_a_dataset_that_fails_is_shown_where_it_fails(launch):
    program = (
        "import strategies\n"
        "strategy = strategies.MultiWorkerMirroredStrategy()\n"
        "def dataset(context):\n"
        "    if rank == 2: raise KeyError('no such file')\n"
        "    return [numpy.ones(3)]\n"
        "strategy.distribute_datasets_from_function(dataset)"
    )
    ended = launch(3, [sys.executable, "-c", START + program], timeout=60)
    assert ended.returncode != 0
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "\nKeyError: 'no such file'" in ended.stderr
    told = "DatasetError: the dataset of rank 2 raised KeyError: 'no such file'"
    assert sorted(LEFT.findall(ended.stderr)) == [("0", told), ("1", told)]


@pytest.mark.slow
def test_where_the_first_rank_caught_the_error_another_shows_it(launch):
    program = (
        "try: comm.all_reduce(numpy.ones(3 + rank))\n"
        "except collectives.MismatchError:\n"
        "    if rank: raise\n"
        "comm.barrier()"
    )
    start = time.monotonic()
    ended = launch(2, [sys.executable, "-c", START + program], timeout=60)
    assert ended.returncode != 0
    assert ended.stderr.count("Traceback") == 1, ended.stderr
    assert "in <module>" in ended.stderr
    # Five seconds for the other rank to show it; the start of two interpreters comes on top.
    assert 5 < time.monotonic() - start < 50
