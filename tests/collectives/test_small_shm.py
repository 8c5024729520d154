"""A small /dev/shm, as in containers: allocated memory can be written."""

import mmap
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from collectives.transports import pages
from tests.slow import slow, slow_but
from tests.worlds.programs import run_programs

MOUNT = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
SMALL = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'


@pytest.fixture(scope="module")
def small_shm():
    """A command that runs another with a /dev/shm of 64 MiB."""
    try:
        tried = subprocess.run([*MOUNT, SMALL, "sh", "true"], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"a small /dev/shm needs unshare(1): {error}")
    if tried.returncode:
        pytest.skip(f"a small /dev/shm can't be mounted here: {tried.stderr.strip()}")
    return [*MOUNT, SMALL, "sh"]


PROGRAM = """
import numpy as np
import collectives
from collectives.transports import pages

if {without_madvise}:
    pages._madvise = lambda: None
comm = collectives.world(deadline=30)
rank, size = comm.rank, comm.size
total = size * (size + 1) / 2


def registered(array):
    return comm._engine.node.pool.locate(array.ctypes.data, array.nbytes) > 0


def same(number):
    numbers = comm.all_gather_object(number)
    assert len(set(numbers)) == 1, numbers
    return number


def check(array):
    array[:] = rank + 1
    assert (comm.all_reduce(array, out=array) == total).all()
"""

BODIES = {
    "registered arrays": """
        arrays = [comm.empty(3_000_000 // size) for _ in range(9)]
        count = same(sum(map(registered, arrays)))
        assert 1 <= count < 9, count
        for array in arrays:
            check(array)
        # What was given back is there again.
        arrays.clear()
        del array
        assert same(registered(comm.empty(3_000_000 // size)))
        """,
    "shared arrays": """
        arrays = []
        while (array := comm.empty_shared(1_000_000)) is not None:
            arrays.append(array)
        assert 1 <= same(len(arrays)) < 16, len(arrays)
        for array in arrays:
            array[rank::size] = rank + 1
            comm.barrier()
            assert (array[:size] == range(1, size + 1)).all()
            comm.barrier()
        """,
    "communicators": """
        parts = [comm.split(0) for _ in range(24)]
        count = same(sum(part._engine.node is not None for part in parts))
        assert 1 <= count < 24, count
        for part in parts:
            array = np.full(400_000, rank + 1.0)
            assert (part.all_reduce(array) == total).all()
            assert (part.all_reduce(array, algorithm="ring") == total).all()
        assert comm.all_reduce_async(np.ones(5)).wait()[0] == size
        """,
}


@pytest.mark.parametrize("without_madvise", [False, *slow(True)])
@pytest.mark.parametrize("what", slow_but(BODIES, next(iter(BODIES))))
def test_no_store_to_what_was_handed_out_fails(small_shm, what, without_madvise):
    body = PROGRAM.format(without_madvise=without_madvise) + textwrap.dedent(BODIES[what])
    parts = [(3 if without_madvise else 2, [sys.executable, "-c", body])]
    ended = run_programs(parts, timeout=90, prefix=small_shm)
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.count("no memory is left that ranks can share (/dev/shm)")
    assert said == (what != "shared arrays"), ended.stderr


@pytest.fixture
def file_memory():
    """Memory of 40 pages in a file, and a function that counts the allocated ones."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 40 * mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(descriptor, 40 * mmap.PAGESIZE))
    yield memory, lambda: os.fstat(descriptor).st_blocks * 512 // mmap.PAGESIZE
    os.close(descriptor)


@pytest.mark.parametrize("madvise", [True, False])
def test_pages_are_taken_and_given_back(file_memory, monkeypatch, madvise):
    memory, count = file_memory
    if not madvise:
        monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert count() == 0
    part = memory[mmap.PAGESIZE + 100 : 11 * mmap.PAGESIZE + 100]
    assert pages.take_pages(part)
    assert count() == 11
    monkeypatch.undo()
    pages.give_pages_back(part)
    assert count() == 2
    assert pages.take_pages(memory[:0])
    pages.give_pages_back(memory[:0])


def test_pages_that_are_not_there(monkeypatch):
    """A store beyond the end of a file would be a SIGBUS."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * mmap.PAGESIZE)
    memory = memoryview(mmap.mmap(descriptor, 2 * mmap.PAGESIZE))
    os.ftruncate(descriptor, mmap.PAGESIZE)
    if pages._advise(np.frombuffer(memory, np.uint8).ctypes.data, mmap.PAGESIZE, 23):
        pytest.skip("the kernel takes no pages beforehand (MADV_POPULATE_WRITE, Linux 5.14)")
    assert not pages.take_pages(memory)
    os.close(descriptor)


def test_where_there_is_no_memory_file_system(monkeypatch):
    monkeypatch.setattr(pages, "_SHARED_MEMORY", "/nowhere/at/all")
    assert pages.has_room(1 << 62)
