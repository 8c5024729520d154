"""Start, failure and end: users' programs."""

import subprocess
import sys
import time

import pytest

from tests.slow import slow, slow_but

pytestmark = pytest.mark.both_mpis

ON_ONE_RANK = {
    "an exception": ("raise KeyError('the reason')", "KeyError: 'the reason'"),
    "an assertion": ("assert comm.size == 7, 'wrong size'", "AssertionError: wrong size"),
    "a bad root": ("comm.broadcast(numpy.ones(3), root=9)", "ValueError: root=9: must be an int"),
    "an interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("fault", slow_but(ON_ONE_RANK, "an exception"))
def test_an_uncaught_exception_on_one_rank_ends_the_job(fault, launch):
    line, message = ON_ONE_RANK[fault]
    program = (
        "import collectives, numpy\n"
        "comm = collectives.world()\n"
        f"if comm.rank == 1:\n    {line}\n"
        "comm.barrier()\n"
        "comm.all_reduce(numpy.ones(1000))\n"
    )
    start = time.monotonic()
    ended = launch(3, [sys.executable, "-c", program], timeout=60)
    seconds = time.monotonic() - start
    assert ended.returncode != 0
    assert message in ended.stderr
    assert "line 4" in ended.stderr
    # Five seconds after the fault; the start of three interpreters comes on top.
    assert seconds < 40


def test_a_pending_asynchronous_call_does_not_keep_a_failing_job_alive(launch):
    program = (
        "import collectives, numpy\n"
        "comm = collectives.world()\n"
        "if comm.rank == 0:\n"
        "    handle = comm.all_reduce_async(numpy.ones(1000))\n"
        "    raise RuntimeError('while waiting')\n"
        "comm.barrier()\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    assert ended.returncode != 0
    assert "RuntimeError: while waiting" in ended.stderr


def test_an_ordinary_end_says_nothing(launch):
    program = (
        "import collectives, numpy\n"
        "comm = collectives.world()\n"
        "part = comm.split(comm.rank % 2)\n"
        "part.all_reduce(numpy.ones(10))\n"
        "assert collectives.world() is comm\n"
        "comm.all_reduce(numpy.ones(100_000))\n"
    )
    ended = launch(3, [sys.executable, "-c", program], timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def run_alone(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_starts_nothing_and_needs_no_mpi4py():
    program = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('mpi4py', 'cupy'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import collectives, strategies\n"
        "assert 'mpi4py' not in sys.modules\n"
        "try: collectives.world()\n"
        "except collectives.BackendUnavailableError as error: print(error)\n"
    )
    ended = run_alone(program)
    assert ended.returncode == 0, ended.stderr
    assert "pip install 'mpi-collectives[mpich]'" in ended.stdout


def test_a_program_alone_is_a_world_of_one_rank():
    program = (
        "import collectives, numpy\n"
        "comm = collectives.world()\n"
        "print(comm.rank, comm.size, comm.all_reduce([1, 2], 'mean').tolist())\n"
        "comm.close()\n"
        "print(collectives.world() is comm)\n"
    )
    assert run_alone(program).stdout == "0 1 [1.0, 2.0]\nFalse\n"


def test_an_unknown_backend_is_refused_at_every_call():
    program = (
        "import collectives\n"
        "collectives.world()\n"
        "try: collectives.world(backend='bogus')\n"
        "except ValueError as error: print(error)\n"
    )
    assert run_alone(program).stdout == "backend='bogus': must be 'auto', 'mpi' or 'nccl'\n"


def test_another_backend_than_the_first_is_refused():
    program = (
        "import collectives\n"
        "collectives.world(backend='mpi')\n"
        "assert collectives.world() is collectives.world(backend='mpi')\n"
        "try: collectives.world(backend='nccl')\n"
        "except ValueError as error: print(error)\n"
    )
    assert run_alone(program).stdout == "backend='nccl': the world was made with 'mpi'\n"


@pytest.mark.parametrize("wrong", ["backend='bogus'", *slow("deadline='long'")])
def test_what_is_wrong_in_one_ranks_first_call_is_raised_on_all(launch, wrong):
    program = (
        "from mpi4py import MPI\n"
        "import collectives\n"
        "try:\n"
        f"    collectives.world({wrong}) if MPI.COMM_WORLD.rank else collectives.world()\n"
        "except (ValueError, TypeError) as error:\n"
        # In one write: the launcher interleaves what the ranks write in pieces.
        "    print(type(error).__name__ + ' ' + str(error).split(':')[0] + '\\n', end='')\n"
    )
    ended = launch(2, [sys.executable, "-c", program], timeout=60)
    kind = "ValueError" if "backend" in wrong else "TypeError"
    assert ended.stdout.splitlines() == [f"{kind} rank 1"] * 2


def test_the_error_tree():
    import collectives

    for name in ("Collective", "Shape", "Dtype", "Op", "Root"):
        error = getattr(collectives, f"{name}MismatchError")
        assert issubclass(error, collectives.MismatchError)
    assert issubclass(collectives.DeadlineExceededError, TimeoutError)
    assert issubclass(collectives.CollectiveError, RuntimeError)
    error = collectives.ShapeMismatchError("they differ", ("one", "two"))
    assert error.calls == ("one", "two")
    assert str(error) == "they differ\n  rank 0: one\n  rank 1: two"
