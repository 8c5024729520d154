"""Hosts that are lost: a link that goes down, a host that is frozen, a rank that is killed."""

import itertools
import os
import re
import signal
import subprocess
import textwrap
import time

import pytest

from bench.hosts.namespaces import shape
from tests.worlds import hosts

REASON = hosts.why_not()
pytestmark = [
    pytest.mark.both_mpis,
    pytest.mark.skipif(REASON is not None, reason=f"no hosts can be imitated: {REASON}"),
]

# Of the barrier, the check between nodes and the watchdog; the wait for MPI_Abort; a busy machine.
GRACE, ABORT, LOAD = 2, 3, 3
SMALL, LARGE = 10, 200_000
CALLS = [*itertools.product(("all_reduce", "broadcast", "all_gather"), (SMALL, LARGE))]
DEADLINE = 0.5
LAYOUTS = [(1, 1), (2, 1, 1), (1, 1, 1, 2)]
"""Ranks of each host; the last host is the one that is lost."""

START = """
import faulthandler, json, os, time
faulthandler.dump_traceback_later(90, exit=True)
from pathlib import Path
import numpy as np
import collectives
comm = collectives.world(deadline=30)
rank, size, marks = comm.rank, comm.size, Path(os.environ["MARKS"])


def mark(name, **content):
    whole = marks / f"{name}.{rank}"
    part = whole.with_name(f"part.{rank}")
    part.write_text(json.dumps(content))
    part.rename(whole)


def wait_for(name):
    while not (marks / name).exists():
        time.sleep(0.002)


def call(what, length, number, **options):
    own = np.full(length, rank + 1.0 + number)
    if what == "all_reduce":
        result, expected = comm.all_reduce(own, **options), size * (size + 1) / 2 + size * number
    elif what == "broadcast":
        result, expected = comm.broadcast(own, root=0), 1.0 + number
    else:
        result, expected = comm.all_gather(own), np.repeat(np.arange(size) + 1.0 + number, length)
    assert (result == expected).all(), (what, length, number)


def failure(*arguments, **options):
    start = time.monotonic()
    try:
        call(*arguments, **options)
    except collectives.DeadlineExceededError as error:
        absent, text = error.absent, str(error)
        return {"absent": absent, "text": text, "seconds": time.monotonic() - start}
    return {"absent": "no error"}


mark("ready", process=os.getpid())
"""

FAILS_AND_REPEATS = """
for number, (what, length) in enumerate(CALLS):
    comm.deadline = 30
    call(what, length, number)
    comm.deadline = DEADLINE
    mark(f"called {number}")
    wait_for(f"lost {number}")
    outcome = failure(what, length, number)
    mark(f"failed {number}", **outcome)
    wait_for(f"back {number}")
    comm.deadline = 30
    if outcome["absent"] != "no error":
        call(what, length, number)
mark("done")
"""


@pytest.fixture(scope="module")
def hosts_of():
    """A function: so many hosts. Those made last are kept, because making them takes a while."""
    made = {}

    def get(count):
        if count not in made:
            end()
            context = hosts.hosts(count)
            made[count] = context, context.__enter__()
        return made[count][1]

    def end():
        for context, _ in made.values():
            context.__exit__(None, None, None)
        made.clear()

    yield get
    end()


def start(made, ranks, body, **constants):
    """The job of a program; its constants come first."""
    lines = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    return hosts.job_on_hosts(*made, ranks, START + lines + textwrap.dedent(body))


def split(ranks):
    """The ranks of the hosts that stay, and of the last one, which is lost."""
    stay = sum(ranks[:-1])
    return range(stay), range(stay, sum(ranks))


def check_failures(failures, absent, *, others=()):
    """Every rank has the error, in time; it names those ranks, and may name `others`."""
    for rank, failure in failures.items():
        assert failure["absent"] != "no error", rank
        assert set(absent) <= set(failure["absent"]) <= {*absent, *others}, (rank, failure)
        assert DEADLINE <= failure["seconds"] < 2 * DEADLINE + GRACE + LOAD, (rank, failure)


@pytest.mark.parametrize(
    ("ranks", "calls"),
    [
        ((2, 1, 1), CALLS[:1]),
        *(pytest.param(ranks, CALLS, marks=pytest.mark.slow) for ranks in LAYOUTS),
    ],
)
def test_a_link_that_is_down_before_a_call(hosts_of, ranks, calls):
    """Every rank names those that it can't reach. With the link, the same call works again."""
    made, (stay, lost) = hosts_of(len(ranks)), split(ranks)
    (addresses, agent) = made
    with start(made, ranks, FAILS_AND_REPEATS, CALLS=calls, DEADLINE=DEADLINE) as job:
        for number in range(len(calls)):
            job.marks(f"called {number}", job.ranks)
            hosts.set_link(agent, addresses[-1], "down")
            job.tell(f"lost {number}")
            check_failures(job.marks(f"failed {number}", stay), lost)
            check_failures(job.marks(f"failed {number}", lost), stay)
            hosts.set_link(agent, addresses[-1], "up")
            job.tell(f"back {number}")
        job.marks("done", job.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_host_that_is_frozen_before_a_call_and_continues(hosts_of, ranks):
    made, (stay, lost) = hosts_of(len(ranks)), split(ranks)
    with start(made, ranks, FAILS_AND_REPEATS, CALLS=CALLS, DEADLINE=DEADLINE) as job:
        for number in range(len(CALLS)):
            job.marks(f"called {number}", job.ranks)
            for rank in lost:
                os.kill(job.processes[rank], signal.SIGSTOP)
            job.tell(f"lost {number}")
            check_failures(job.marks(f"failed {number}", stay), lost)
            # Their call, which they make now, is the one that the others repeat.
            job.tell(f"back {number}")
            for rank in lost:
                os.kill(job.processes[rank], signal.SIGCONT)
        job.marks("done", job.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("fault", ["link", "frozen"])
def test_a_host_that_is_back_before_the_deadline(hosts_of, ranks, fault):
    """In the middle of a loop of calls: all of them have the right values."""
    made, (_, lost) = hosts_of(len(ranks)), split(ranks)
    body = """
    for number, (what, length) in enumerate(CALLS):
        times = [time.monotonic()]
        mark(f"begins {number}")
        while not comm.broadcast_object((marks / f"back {number}").exists()):
            call(what, length, len(times))
            times.append(time.monotonic())
        mark(f"calls {number}", longest=max(np.diff([*times, time.monotonic()])))
    """
    with start(made, ranks, body, CALLS=CALLS) as job:
        for number in range(len(CALLS)):
            job.marks(f"begins {number}", job.ranks)
            time.sleep(0.1)
            lose(made, job, lost, fault)
            time.sleep(1)
            bring_back(made, job, lost, fault)
            job.tell(f"back {number}")
            calls = job.marks(f"calls {number}", job.ranks)
            # Those of a lost host may have been stopped between two calls.
            assert all(calls[rank]["longest"] > 0.5 for rank in split(ranks)[0]), calls


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("fault", ["link", "frozen"])
@pytest.mark.parametrize("what", ["all_reduce", "broadcast", "all_gather"])
def test_a_host_that_is_lost_in_a_loop_of_calls(hosts_of, ranks, fault, what):
    """A rank may be in the call before, which it made with the lost host: it is named as well."""
    made, (stay, lost) = hosts_of(len(ranks)), split(ranks)
    body = """
    outcome, number = {"absent": "no error"}, 0
    comm.deadline = DEADLINE
    while outcome["absent"] == "no error":
        outcome = failure(WHAT, SMALL, number)
        number += 1
    mark("failed", **outcome)
    wait_for("back")
    """
    with start(made, ranks, body, WHAT=what, SMALL=SMALL, DEADLINE=DEADLINE) as job:
        time.sleep(0.1)
        lose(made, job, lost, fault)
        check_failures(job.marks("failed", stay), lost, others=stay)
        if fault == "link":
            check_failures(job.marks("failed", lost), stay)
        bring_back(made, job, lost, fault)


def lose(made, job, lost, fault):
    """Lose the last host, which has those ranks."""
    addresses, agent = made
    if fault == "link":
        hosts.set_link(agent, addresses[-1], "down")
    for rank in lost if fault == "frozen" else ():
        os.kill(job.processes[rank], signal.SIGSTOP)


def bring_back(made, job, lost, fault):
    """Undo `lose`."""
    addresses, agent = made
    if fault == "link":
        hosts.set_link(agent, addresses[-1], "up")
    for rank in lost if fault == "frozen" else ():
        os.kill(job.processes[rank], signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [None, "ring"])
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_a_link_that_goes_down_in_the_middle_of_a_transfer(hosts_of, ranks, algorithm):
    """First for a while. Then for ever: every process ends, though mpirun may not.

    A rank that had received everything notices it in the next call.
    """
    made = addresses, agent = hosts_of(len(ranks))
    shape(agent, addresses, "400mbit")
    body = """
    for number in range(1000):
        comm.barrier()
        mark(f"begins {number}")
        comm.deadline = DEADLINE if number else 30
        start = time.monotonic()
        call("all_reduce", LENGTH, number, algorithm=ALGORITHM)
        mark(f"ends {number}", seconds=time.monotonic() - start)
    """
    length = 2_000_000
    constants = {"LENGTH": length, "DEADLINE": DEADLINE, "ALGORITHM": algorithm}
    with start(made, ranks, body, **constants) as job:
        for number in range(2):
            job.marks(f"begins {number}", job.ranks)
            before = sent_bytes(made)
            while sent_bytes(made) - before < length:
                pass
            hosts.set_link(agent, addresses[-1], "down")
            if number == 0:
                time.sleep(1)
                hosts.set_link(agent, addresses[-1], "up")
                ended = job.marks("ends 0", job.ranks)
                assert all(each["seconds"] > 1 for each in ended.values()), ended
        alive = job.wait_until_ended(2 * DEADLINE + GRACE + ABORT + LOAD)
        hosts.set_link(agent, addresses[-1], "up")
        assert not alive, job.errors()
        assert re.search("DeadlineExceededError|inside a library", job.errors())


def sent_bytes(made):
    """What the last host has sent."""
    addresses, agent = made
    path = "/sys/class/net/eth0/statistics/tx_bytes"
    line = ["ip", "netns", "exec", hosts.namespace_of(agent, addresses[-1]), "cat", path]
    return int(subprocess.run(line, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("fault", ["link", "killed"])
@pytest.mark.parametrize(("what", "length"), [("all_reduce", SMALL), ("all_gather", LARGE)])
def test_an_error_that_is_not_caught_ends_every_process(hosts_of, ranks, fault, what, length):
    made = addresses, agent = hosts_of(len(ranks))
    body = """
    comm.deadline = DEADLINE
    number = 0
    while True:
        call(WHAT, LENGTH, number)
        number += 1
    """
    constants = {"DEADLINE": DEADLINE, "WHAT": what, "LENGTH": length}
    with start(made, ranks, body, **constants) as job:
        time.sleep(0.1)
        if fault == "killed":
            os.kill(job.processes[job.ranks[-1]], signal.SIGKILL)
            # MPI ends the job by itself.
            assert not job.wait_until_ended(LOAD), job.errors()
            assert job.process.wait(LOAD) != 0
        else:
            hosts.set_link(agent, addresses[-1], "down")
            alive = job.wait_until_ended(2 * DEADLINE + GRACE + ABORT + LOAD)
            hosts.set_link(agent, addresses[-1], "up")
            assert not alive, (alive, job.errors())
            assert re.search("DeadlineExceededError|inside a library", job.errors())
