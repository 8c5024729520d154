"""Memory that other processes map without a collective."""

import os
import subprocess
import sys

import numpy as np
import pytest

from collectives.shm import segment, seqlock
from collectives.shm.segment import Segment, SegmentAddress, make_segment, map_segment

READER = """
import sys
import numpy as np
from collectives.shm.segment import SegmentAddress, map_segment
*numbers, token = sys.argv[1:]
address = SegmentAddress(*map(int, numbers), bytes.fromhex(token))
memory = map_segment(address)
assert memory is not None and memory.readonly
print(np.frombuffer(memory, np.int64).sum(), flush=True)
sys.stdin.readline()
print(np.frombuffer(memory, np.int64).sum(), flush=True)
"""


def start_reader(address):
    process, descriptor, nbytes, token = address
    words = [str(process), str(descriptor), str(nbytes), token.hex()]
    return subprocess.Popen(
        [sys.executable, "-c", READER, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_another_process_sees_what_is_written():
    own = make_segment(8000)
    numbers = np.frombuffer(own.memory, np.int64)
    assert len(numbers) == 1000
    assert not numbers.any()
    assert numbers.ctypes.data % 64 == 0
    numbers[:] = 3
    reader = start_reader(own.address)
    assert int(reader.stdout.readline()) == 3000
    numbers[7] = 10
    output, _ = reader.communicate("now\n", timeout=20)
    assert (int(output), reader.returncode) == (3007, 0)


def test_memory_outlives_the_address():
    """Existing mappings stay valid; new ones can't be made."""
    own = Segment(64)
    own.memory[:4] = b"here"
    mapped = map_segment(own.address)
    address = own.address
    del own
    assert bytes(mapped[:4]) == b"here"
    assert map_segment(address) is None
    with pytest.raises(TypeError, match="read-only"):
        mapped[0] = 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda right: right._replace(token=b"?" * 16),
        lambda right: right._replace(nbytes=right.nbytes + 1),
        lambda right: right._replace(descriptor=10_000),
        lambda right: right._replace(process=1 << 22),
    ],
)
def test_another_file_is_not_taken_for_it(wrong):
    own = Segment(64)
    assert map_segment(own.address) is not None
    assert map_segment(wrong(own.address)) is None


def test_a_pipe_is_no_segment():
    ends = os.pipe()
    assert map_segment(SegmentAddress(os.getpid(), ends[0], 0, b"")) is None
    for end in ends:
        os.close(end)


def test_where_the_system_has_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert make_segment(64) is None


def test_too_much_is_none():
    assert make_segment(1 << 62) is None


@pytest.mark.parametrize(("machine", "locks"), [("aarch64", 2), ("x86_64", 0)])
def test_stores_are_ordered_by_locks_elsewhere(monkeypatch, machine, locks):
    acquired = []

    class Counting:
        def __enter__(self):
            acquired.append(self)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(segment.platform, "machine", lambda: machine)
    monkeypatch.setattr(segment.threading, "Lock", Counting)
    segment._ordering()()
    assert len(acquired) == locks


def test_a_large_array_leaves_small_ones_in_their_segment():
    arrays = seqlock.SharedArrays(1)
    for _ in range(3):
        for length in (8, seqlock._SEGMENT_BYTES):
            arrays.put(np.zeros(length, np.uint8))
    assert len(arrays._kept) == 4
