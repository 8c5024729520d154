"""One array for all ranks of a node: all ranks read what one stores; its memory is reused."""

import gc

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, ShapeMismatchError
from collectives.transports import local

pytestmark = pytest.mark.mpi

MAPS = {
    "the node's own": lambda size: None,
    "two nodes": lambda size: [rank * 2 // size for rank in range(size)],
    "in turns": lambda size: [rank % 2 for rank in range(size)],
    "each alone": list,
}


@pytest.fixture(params=MAPS)
def group(comm, request):
    """A communicator over nodes of each map."""
    labels = MAPS[request.param](range(comm.size) if request.param == "each alone" else comm.size)
    with Communicator(MPI.COMM_WORLD, deadline=30, node_of=labels) as made:
        yield made


KINDS = [(5, "float32"), ((3, 4), "int64"), ((), "bool"), ((0, 2), "int8"), (100_003, "float64")]


def test_what_a_rank_stores_its_node_sees(group):
    nodes = group.all_gather_object(group.node)
    members = [rank for rank, node in enumerate(nodes) if node == group.node]
    for shape, dtype in KINDS:
        array = group.empty_shared(shape, dtype)
        assert (array.shape, array.dtype) == (np.empty(shape, dtype).shape, np.dtype(dtype))
        for writer in (0, len(members) - 1):
            if group.local_rank == writer:
                array[...] = members[writer] + 1
            group.barrier()
            expected = np.full(shape, members[writer] + 1, dtype)
            np.testing.assert_array_equal(array, expected, f"{dtype}{shape}")
            group.barrier()


def test_memory_that_all_have_let_go_of_is_used_again(group):
    first = group.empty_shared(1000)
    address = first.ctypes.data
    view = first[10:]
    del first
    second = group.empty_shared(1000)
    if group.local_size > 1:
        assert second.ctypes.data != address
    del view
    gc.collect()
    third = group.empty_shared(1000)
    if group.local_size > 1:
        assert third.ctypes.data == address
    second[...] = third[...] = 0


def test_memory_that_one_rank_holds_on_to_is_left_to_it(group):
    held = group.empty_shared(1000, "int64")
    if group.local_rank == 0:
        held[...] = 7
    group.barrier()
    if group.local_rank != group.local_size - 1:
        held = None
    for _ in range(3):
        other = group.empty_shared(1000, "int64")
        other[...] = 1
        group.barrier()
    assert held is None or held.tolist() == [7] * 1000


def test_ranks_that_ask_for_different_ones_are_told(group):
    if group.size == 1:
        assert group.empty_shared(3).shape == (3,)
        return
    with pytest.raises(ShapeMismatchError, match="empty_shared"):
        group.empty_shared(3 + group.rank)
    assert group.empty_shared(3) is not None


def test_what_can_not_be_shared(group):
    wrong = [(-1, "float32", ValueError), (3, object, TypeError), ((2, -2), "int8", ValueError)]
    for shape, dtype, error in wrong:
        with pytest.raises(error):
            group.empty_shared(shape, dtype)


def test_an_array_outlives_its_communicator(comm):
    group = Communicator(MPI.COMM_WORLD, deadline=30)
    array = group.empty_shared(1000)
    if group.rank == 0:
        array[...] = 3
    group.close()
    comm.barrier()
    assert array.tolist() == [3.0] * 1000


def test_where_one_node_has_no_memory_nobody_gets_an_array(comm, monkeypatch):
    labels = [rank * 2 // comm.size for rank in range(comm.size)]
    with Communicator(MPI.COMM_WORLD, deadline=30, node_of=labels) as group:
        node = group._engine.node
        if node is not None and group.node == 0:
            monkeypatch.setattr(node.common, "_share", lambda nbytes: None)
        array = group.empty_shared(10)
        # Where every rank is a node of its own, an ordinary array is enough.
        assert (array is None) == (comm.size > 2)


def test_threads_have_no_such_memory():
    def body(transport):
        return Communicator(transport).empty_shared(4)

    assert local.run(2, body) == [None, None]
    assert local.run(1, body)[0].shape == (4,)
