"""Every collective once on more ranks than the other tests have by default, on every path."""

import numpy as np
import pytest

import collectives
from collectives import Fusion, algorithms
from tests.collectives.oracle import case, reduced, value, values

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(5, 8)]

LENGTHS = [1, 1000, 40_003]


def all_reduce(comm, length, path):
    return comm.all_reduce(value(comm.rank, length), algorithm=path)


def reduce(comm, length, path):
    return comm.reduce(value(comm.rank, length), "max", root=comm.size - 2, algorithm=path)


def broadcast(comm, length, path):
    return comm.broadcast(value(comm.rank, length), root=comm.size - 2, algorithm=path)


def all_gather(comm, length, path):
    return comm.all_gather(value(comm.rank, length + comm.rank % 3), algorithm=path)


def gather(comm, length, path):
    return comm.gather(value(comm.rank, length + comm.rank % 3), root=1, algorithm=path)


def scatter(comm, length, path):
    whole = value(9, length) if comm.rank == 1 else None
    return comm.scatter(whole, root=1, algorithm=path)


def reduce_scatter(comm, length, path):
    return comm.reduce_scatter(value(comm.rank, length), algorithm=path)


def all_to_all(comm, length, path):
    blocks = [value(comm.rank + 3 * peer, length // (peer + 1)) for peer in range(comm.size)]
    return np.concatenate(comm.all_to_all(blocks, algorithm=path))


def expected(collective, rank, size, length):
    whole = values(size, length)
    ragged = np.concatenate([value(each, length + each % 3) for each in range(size)])
    if collective is all_to_all:
        count = length // (rank + 1)
        return np.concatenate([value(peer + 3 * rank, count) for peer in range(size)])
    return {
        all_reduce: reduced("sum", whole),
        reduce: reduced("max", whole) if rank == size - 2 else None,
        broadcast: whole[size - 2],
        all_gather: ragged,
        gather: ragged if rank == 1 else None,
        scatter: np.array_split(value(9, length), size)[rank],
        reduce_scatter: np.array_split(reduced("sum", whole), size)[rank],
    }[collective]


COLLECTIVES = [
    all_reduce,
    reduce,
    broadcast,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda function: function.__name__)
def test_on_every_path(comm, collective):
    for path in (None, *algorithms.names(collective.__name__), "native", "shared"):
        for length in LENGTHS:
            if collective is reduce and path == "native":
                continue  # MPI's MAX of floats may lose a NaN, so it isn't offered
            with case(path, length):
                result = collective(comm, length, path)
                wanted = expected(collective, comm.rank, comm.size, length)
                np.testing.assert_array_equal(result, wanted)


def test_many_registered_and_asynchronous(comm):
    arrays = [value(comm.rank + place, 10 * place + 1) for place in range(7)]
    for _ in range(4):
        for place, result in enumerate(comm.all_reduce_many(arrays)):
            ranks = [value(rank + place, 10 * place + 1) for rank in range(comm.size)]
            np.testing.assert_array_equal(result, reduced("sum", ranks))
    registered = comm.empty(50_000, np.float64)
    for _ in range(4):
        registered[:] = value(comm.rank, 50_000)
        comm.all_reduce(registered, out=registered)
        np.testing.assert_array_equal(registered, reduced("sum", values(comm.size, 50_000)))
    fusion = Fusion(comm, [((3,), "f8"), ((4, 2), "i4")])
    fusion.views[1][...] = comm.rank
    assert (fusion.all_reduce()[1] == sum(range(comm.size))).all()
    handles = [comm.all_reduce_async(value(comm.rank, length)) for length in LENGTHS]
    for handle, length in zip(handles, LENGTHS, strict=True):
        np.testing.assert_array_equal(handle.wait(), reduced("sum", values(comm.size, length)))
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


def test_ranks_that_differ_get_the_same_error_and_go_on(comm):
    with pytest.raises(collectives.ShapeMismatchError) as caught:
        comm.all_reduce(np.ones(4 if comm.rank == comm.size - 1 else 3))
    assert len(caught.value.calls) == comm.size
    comm.barrier()


def test_messages_and_groups(comm):
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.send(value(comm.rank, 9), following)
    received = comm.recv(np.zeros(9), previous)
    np.testing.assert_array_equal(received, value(previous, 9))
    part = comm.split(comm.rank % 2, key=-comm.rank)
    members = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    np.testing.assert_array_equal(part.all_gather(np.array(comm.rank)), members)
    part.close()
