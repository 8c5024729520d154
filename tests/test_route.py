"""How many Python functions and files a warm call passes through, and that the number stays small.

`pytest tests/test_route.py -s --worlds 2` prints the table. A call is counted on rank 0 of two, the
least of many repetitions: a rank that has to wait for the other one polls.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

import collectives
import strategies
from collectives.schedules.paths import STAGED
from collectives.shm.online_tuning import PathTimes

# Calls and files that are aimed at; a fifth more fails.
TARGETS = {
    "all_reduce, 8 B": (3, 3),
    "all_reduce, 1 MiB, ordinary": (25, 8),
    "all_reduce, 1 MiB, registered, in place": (20, 8),
    "all_reduce_many, 20 arrays, out=": (25, 8),
    "all_reduce_many, 20 new arrays": (25, 8),
    "all_reduce, 1 MiB, non-contiguous": (40, 10),
    "all_gather, 1 MiB, without out": (35, 10),
    "reduce, 8 B": (10, 7),
    "broadcast, 8 B": (10, 7),
    "all_gather, 8 B": (12, 7),
    "reduce_scatter, 8 B": (10, 6),
    "all_to_all, 8 B": (10, 6),
    "all_to_all, 1 MiB, out=": (30, 12),
    "scatter, 8 B": (18, 8),
    "run + apply_gradients, 10 variables": (150, 14),
    "strategy.reduce, a number": (60, 12),
}
SLACK = 1.2
# Entered where the other rank is late, as it is on a busy machine.
WAITING = ("wait_policy.py", "node_barrier.py", "verdict_barrier.py", "call_check.py")
LEFT_OUT = (*WAITING, "test_route.py")
WAITS_OF_PROGRESS = ("_await", "<lambda>")
WARM, COUNTED = 60, 300


def counted(call):
    """The code objects of the Python functions that the call enters, the fewest of many times."""
    entered = []

    def note(frame, event, argument):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        waits = file.endswith("progress.py") and name in WAITS_OF_PROGRESS
        if event == "call" and not waits and not file.endswith(LEFT_OUT):
            entered[-1].append(frame.f_code)

    for _ in range(WARM):
        call()
    for _ in range(COUNTED):
        entered.append([])
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    return min(entered, key=len)


def rows(comm):
    """The calls, by name; those of registered arrays last, since they change what the others do."""
    megabyte = 1 << 17
    number, array, out = np.ones(1), np.ones(megabyte), np.empty(megabyte)
    strided, part = np.ones((megabyte, 2))[:, 0], np.ones(megabyte // 2)
    pair = np.ones(2, np.float32)
    gradients = [np.full(1000, comm.rank + 1.0) for _ in range(20)]
    reduced = [np.empty(1000) for _ in range(20)]
    yield "all_reduce, 8 B", lambda: comm.all_reduce(number)
    yield "all_reduce, 1 MiB, ordinary", lambda: comm.all_reduce(array, out=out)
    yield "all_reduce_many, 20 arrays, out=", lambda: comm.all_reduce_many(gradients, out=reduced)
    yield (
        "all_reduce_many, 20 new arrays",
        lambda: comm.all_reduce_many(list(map(np.ndarray.copy, gradients))),
    )
    yield "all_reduce, 1 MiB, non-contiguous", lambda: comm.all_reduce(strided)
    yield "all_gather, 1 MiB, without out", lambda: comm.all_gather(part)
    yield "reduce, 8 B", lambda: comm.reduce(number, root=1)
    yield "broadcast, 8 B", lambda: comm.broadcast(number)
    yield "all_gather, 8 B", lambda: comm.all_gather(number)
    yield "reduce_scatter, 8 B", lambda: comm.reduce_scatter(pair)
    yield "all_to_all, 8 B", lambda: comm.all_to_all(pair)
    yield "scatter, 8 B", lambda: comm.scatter(pair if comm.rank == 0 else None)
    yield "all_to_all, 1 MiB, out=", lambda: comm.all_to_all(array, out=out)
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    with strategy.scope():
        variables = [strategies.Variable(np.zeros(100)) for _ in range(10)]
        optimizer = strategies.optimizers.SGD(0.1)
    pairs = [(np.full(100, comm.rank + 1.0), variable) for variable in variables]

    def step():
        optimizer.apply_gradients(pairs)

    yield (
        "run + apply_gradients, 10 variables",
        lambda: strategy.run(step),
    )
    yield "strategy.reduce, a number", lambda: strategy.reduce("sum", 1.0, axis=None)
    registered = comm.zeros(megabyte, "f8")
    yield (
        "all_reduce, 1 MiB, registered, in place",
        lambda: comm.all_reduce(registered, out=registered),
    )


@pytest.fixture
def one_path(monkeypatch):
    """Copy-in/copy-out throughout: other paths, which a slow machine may prefer, count more."""

    def choose(times):
        times._path = STAGED
        return STAGED

    monkeypatch.setattr(PathTimes, "choose", choose)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_few_functions_lie_between_a_call_and_the_memory(comm, one_path):
    with comm.split(0) as own:
        table = {name: counted(call) for name, call in rows(own)}
    found = {
        name: (len(codes), len({code.co_filename for code in codes}))
        for name, codes in table.items()
    }
    if comm.rank != 0:
        return
    lines = [f"{'call':42}{'calls':>6}{'files':>6}   aimed at"]
    for name, (calls, files) in found.items():
        lines.append(f"{name:42}{calls:6}{files:6}   {TARGETS[name][0]} / {TARGETS[name][1]}")
    print("\n" + "\n".join(lines))
    assert set(found) == set(TARGETS)
    beyond = {
        name: counts
        for name, counts in found.items()
        if any(count > SLACK * most for count, most in zip(counts, TARGETS[name], strict=True))
    }
    for name in beyond:
        functions = [f"{Path(code.co_filename).name}:{code.co_name}" for code in table[name]]
        lines.append(f"{name}: {', '.join(functions)}")
    assert not beyond, "\n".join(lines)


def documented(title):
    """The table of the architecture page below that line: files and functions."""
    page = Path(__file__).parents[1] / "docs" / "explanation" / "architecture.md"
    text = page.read_text(encoding="utf-8")
    table = text[text.index(f"\n{title}") :].split("\n\n")[1]
    return re.findall(r"^\| `(\S+\.py)` \| `(\w+)`", table, re.MULTILINE)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_call_enters_the_functions_of_the_architecture_page(comm, one_path):
    package, megabyte = Path(collectives.__file__).parent, 1 << 17
    titles = "The first time, with 1 MiB:", "Again, with 1 MiB:", "Again, with 8 bytes"
    with comm.split(0) as own:
        for title, length in zip(titles, (megabyte, megabyte, 1), strict=True):
            array, entered = np.full(length, 1.0 + own.rank), []
            if title.startswith("Again"):
                for _ in range(WARM):
                    own.all_reduce(array)

            def note(frame, event, argument):
                file = Path(frame.f_code.co_filename)
                if event == "call" and file.is_relative_to(package):
                    entered.append((str(file.relative_to(package)), frame.f_code.co_name))  # noqa: B023

            sys.setprofile(note)
            try:
                own.all_reduce(array)
            finally:
                sys.setprofile(None)
            rest, expected = iter(entered), documented(title)
            assert len(expected) >= 2
            missing = [each for each in expected if each not in rest]
            assert not missing, (title, missing, entered)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_any_number_of_recurring_lists_is_bound(comm):
    """Each of forty lists costs what a single one costs."""
    lists = [[np.full(9, 1.0 * comm.rank + number) for _ in range(3)] for number in range(40)]
    outs = [[np.empty(9) for _ in range(3)] for _ in lists]
    with comm.split(0) as own:
        for _ in range(3):
            for arrays, out in zip(lists, outs, strict=True):
                own.all_reduce_many(arrays, out=out)
        one = counted(lambda: own.all_reduce_many(lists[0], out=outs[0]))

        def reduce_all():
            for arrays, out in zip(lists, outs, strict=True):
                own.all_reduce_many(arrays, out=out)

        every = counted(reduce_all)
    if comm.rank == 0:
        assert len(every) <= SLACK * len(lists) * len(one)
        assert outs[39][2].tolist() == [79.0] * 9
