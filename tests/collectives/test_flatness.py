"""No resource grows with the number of calls, and messages may be longer than 2 GiB."""

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator

PAGE = os.sysconf("SC_PAGE_SIZE")
GROWTH = 2 << 20
LONG = (2 << 30) + 5


def mismatch(comm):
    with pytest.raises(collectives.ShapeMismatchError):
        comm.all_reduce(np.ones(comm.rank + 1))


def register(comm):
    array = comm.empty(5000)
    array[0] = 1


# What is done, and how often: before anything is measured, and then again. A tenth by default.
LOADS = {
    "small": (lambda comm: comm.all_reduce(np.ones(10)), 10_000),
    "large": (lambda comm: comm.all_reduce(np.ones(50_000)), 1_500),
    "schedule": (lambda comm: comm.all_reduce(np.ones(10), algorithm="ring"), 1_000),
    # As many shapes as fill the caches a whole number of times.
    "shapes": (lambda comm: [comm.all_reduce(np.ones(n)) for n in range(1, 1025)], 3),
    "registered": (register, 1_500),
    "asynchronous": (lambda comm: comm.all_reduce_async(np.ones(10)).wait(), 1_000),
    "mismatches": (mismatch, 500),
    "groups": (lambda comm: comm.split(0).close(), 30),
}


def usage():
    """Resident bytes, mappings of memory, open files."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    return resident, mappings, len(os.listdir("/proc/self/fd"))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize("load", LOADS)
def test_nothing_grows(comm, load, slow):
    act, times = LOADS[load]
    times = times if slow else -(-times // 10)
    group = Communicator(MPI.COMM_WORLD, deadline=60)
    for _ in range(max(2, times // 4)):
        act(group)
    resident, mappings, files = usage()
    for _ in range(times):
        act(group)
    after = usage()
    group.close()
    assert after[0] - resident < GROWTH
    assert after[1] - mappings <= 4
    assert after[2] <= files


def available():
    content = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+) kB", content)[1]) << 10


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.timeout_seconds(150)
def test_messages_of_more_than_2_gib(comm):
    # Two ranks with an array each, and MPI's copies of it.
    needed = 3 * comm.size * LONG // 2
    fits = comm.all_gather_object(available() > needed)
    if not all(fits):
        pytest.skip(f"{needed >> 30} GiB of memory are not available")
    array = np.full(LONG, comm.rank + 1, np.uint8)
    places = [0, LONG // 2, (1 << 31) - 1, 1 << 31, LONG - 1]
    array[places] = 10 + comm.rank
    comm.all_reduce(array, out=array)
    assert array[places].tolist() == [21] * 5
    assert array[1] == 3
    array[places] = 50 + comm.rank
    comm.broadcast(array, root=1)
    assert array[places].tolist() == [51] * 5
    comm.all_reduce(array, "max", out=array, algorithm="ring")
    assert array[places].tolist() == [51] * 5
    assert array[1] == 3
