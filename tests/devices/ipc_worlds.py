"""Ranks that share one GPU, their inputs to a collective, and the required results."""

import threading

import numpy as np

from collectives.execution.device_path import Request
from collectives.gpu.ipc_path import IpcPath
from collectives.reductions.reduction import ReduceOp
from tests.collectives.oracle import reduced, value
from tests.devices.simulated import ARENA_UNIT
from tests.devices.simulated_memory import GARBAGE

REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter"]


class World:
    """The synchronization of the host's ranks."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=20)
        self.told = [b""] * size
        self.meetings = [0] * size

    def path(self, cuda, rank):
        def meet():
            self.meetings[rank] += 1
            self.barrier.wait()

        def gather(content):
            self.told[rank] = content
            meet()
            told = list(self.told)
            self.barrier.wait()
            return told

        size = len(self.told)
        return IpcPath(cuda, rank, size, barrier=meet, gather=gather, arena_bytes=ARENA_UNIT)


def garbage(length, dtype):
    return np.full(length * np.dtype(dtype).itemsize, GARBAGE, np.uint8).view(dtype)


def uneven(length, size):
    return [0 if rank % 4 == 1 else length + 3 * rank for rank in range(size)]


def place_of(rank, lengths):
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def only(place, whole):
    """The array with garbage elsewhere."""
    array = garbage(whole.size, whole.dtype)
    array[place] = whole[place]
    return array


def reduction(collective, rank, size, lengths, dtype, op, root, salt):
    """A rank's arrays, and which content is required at the end."""
    largest = 2 if op == "product" else 5
    arrays = [value(each + salt, sum(lengths), dtype, largest) for each in range(size)]
    expected = reduced(op, arrays)
    if collective == "reduce_scatter":
        place = place_of(rank, lengths)
        return arrays[rank], slice(0, lengths[rank]), expected[place]
    wanted = slice(None) if collective == "all_reduce" or rank == root else slice(0, 0)
    return arrays[rank], wanted, expected[wanted]


def movement(collective, rank, size, lengths, dtype, root, salt):
    """As `reduction`, with the lengths of all_to_all instead of those between all."""
    if collective == "all_to_all":
        return exchange(rank, size, max(lengths), dtype, salt)
    whole, mine = value(salt, sum(lengths), dtype), place_of(rank, lengths)
    everything, nothing = slice(None), slice(0, 0)
    if collective == "scatter":
        given = only(everything if rank == root else nothing, whole)
        return given, everything, whole[mine], lengths
    has, wants = {
        "broadcast": (everything if rank == root else nothing, everything),
        "gather": (mine, everything if rank == root else nothing),
        "all_gather": (mine, everything),
    }[collective]
    return only(has, whole), wants, whole[wants], lengths


def exchange(rank, size, length, dtype, salt):
    """A rank sends nothing to its predecessor, and different lengths to the others."""

    def block(sender, receiver):
        gap = size > 1 and (receiver + 1) % size == sender
        count = 0 if gap or not length else length // size + 5 * sender + receiver
        return value(sender * size + receiver + salt, count, dtype)

    outgoing = [block(rank, peer) for peer in range(size)]
    incoming = [block(peer, rank) for peer in range(size)]
    outgoing[rank] = outgoing[rank][:0]
    lengths = [part.size for part in outgoing + incoming]
    start = sum(lengths[:size])
    given = np.concatenate(outgoing + incoming)
    own = place_of(size + rank, lengths)
    given = np.concatenate([given[:start], only(own, given)[start:]])
    return given, slice(start, None), np.concatenate(incoming), lengths


def take_part(path, rank, collective, lengths, dtype, *, in_place, op=None, root=0, salt=0):
    """Call it on input that is late, and check the result."""
    cuda, size = path._cuda, path._size
    if collective in REDUCTIONS:
        op = op or "sum"
        given, wanted, expected = reduction(collective, rank, size, lengths, dtype, op, root, salt)
    else:
        given, wanted, expected, lengths = movement(
            collective, rank, size, lengths, dtype, root, salt
        )
    late, source = cuda.from_host(given), cuda.from_host(garbage(given.size, given.dtype))
    cuda.slow(cuda.current_stream(), 0.002)
    source[...] = late
    target, handed = source, None
    if collective == "reduce_scatter":
        handed = source
        own = source[place_of(rank, lengths)]
        target = own if in_place else cuda.from_host(garbage(lengths[rank], given.dtype))
    elif collective == "scatter":
        handed = source if rank == root else None
        target = cuda.from_host(garbage(lengths[rank], given.dtype))
    elif collective == "gather":
        handed = target = source[place_of(rank, lengths)]
        if rank == root:
            target = cuda.from_host(garbage(given.size, given.dtype))
    elif not in_place:
        own = place_of(rank, lengths)
        handed = source[own] if collective == "all_gather" else source
        target = cuda.from_host(garbage(given.size, given.dtype))
    whole = collective in ("all_reduce", "reduce", "broadcast")
    request = Request(
        collective, handed, target, None if whole else lengths, op and ReduceOp(op), root, None
    )
    assert path.run(request) == "ipc"
    np.testing.assert_array_equal(target.get()[wanted], expected)
    if not in_place:
        assert source.get().tobytes() == given.tobytes()
