"""Bitwise reductions, of bool and integers."""

import ml_dtypes
import numpy as np
import pytest

from collectives import Communicator, Fusion, ReduceOp
from collectives.reductions.reduction import reduction_for
from collectives.schedules.paths import FORCED
from collectives.transports.local import run
from tests.collectives.oracle import BITWISE, DTYPES, case, reduced

INTEGERS = [dtype for dtype in DTYPES if dtype.kind in "biu"]
OTHERS = [dtype for dtype in DTYPES if dtype not in INTEGERS]


def bits(rank, shape, dtype):
    """All bits are used, the sign among them; three of four are set, so that AND keeps some."""
    chance = np.random.default_rng([rank, dtype.num])
    count = int(np.prod(shape)) * dtype.itemsize
    first, second = (chance.integers(0, 256, count, np.uint8) for _ in range(2))
    if dtype.kind == "b":
        return (first % 3 > 0).reshape(shape)
    return (first | second).view(dtype).reshape(shape)


def check_reductions(comm):
    """Every call that reduces; all_reduce over every path that its dtype has."""
    for op, dtype in ((op, dtype) for op in BITWISE for dtype in INTEGERS):
        for length in (5, 20_001) if dtype.itemsize == 4 else (5,):
            arrays = [bits(rank, (length,), dtype) for rank in range(comm.size)]
            with case(op, dtype, length):
                check_all_reduce(comm, arrays, op)
                check_others(comm, arrays, op)


def check_all_reduce(comm, arrays, op):
    given, expected = arrays[comm.rank], reduced(op, arrays)
    there = comm._engine.paths("all_reduce", ReduceOp(op), given.dtype)
    forced = [path for path in there if path in FORCED]
    for algorithm in (None, "ring", *forced):
        result = comm.all_reduce(given, op, algorithm=algorithm)
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected, f"{algorithm}")
    array = given.copy()
    assert comm.all_reduce(array, ReduceOp(op), out=array) is array
    np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(comm.all_reduce_async(given, op).wait(), expected)


def check_others(comm, arrays, op):
    given, expected, root = arrays[comm.rank], reduced(op, arrays), comm.size - 1
    result = comm.reduce(given, op.upper(), root=root)
    if comm.rank == root:
        np.testing.assert_array_equal(result, expected)
    block = comm.reduce_scatter(given, op)
    np.testing.assert_array_equal(block, np.array_split(expected, comm.size)[comm.rank])
    for result in comm.all_reduce_many([given, given[:3]], op):
        np.testing.assert_array_equal(result, expected[: len(result)])
    fused = Fusion(comm, [given], op)
    fused.views[0][...] = given
    np.testing.assert_array_equal(fused.all_reduce()[0], expected)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", ["one node", "a node each"])
def test_reductions_between_processes(comm, nodes):
    from mpi4py import MPI

    node_of = None if nodes == "one node" else list(range(comm.size))
    with Communicator(MPI.COMM_WORLD, deadline=60, node_of=node_of) as group:
        check_reductions(group)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_mpi_does_those_of_wide_integers(comm):
    for op, dtype in ((op, dtype) for op in BITWISE for dtype in INTEGERS):
        offered = "native" in comm._engine.paths("all_reduce", ReduceOp(op), dtype)
        assert offered == (dtype.itemsize >= 4), (op, dtype)


def test_reductions_between_threads():
    run(3, lambda transport: check_reductions(Communicator(transport)))


def test_other_dtypes_are_refused():
    calls = (
        lambda comm, array, op: comm.all_reduce(array, op),
        lambda comm, array, op: comm.all_reduce(array, op, algorithm="ring"),
        lambda comm, array, op: comm.all_reduce_async(array, op),
        lambda comm, array, op: comm.all_reduce_many([array], op),
        lambda comm, array, op: comm.reduce(array, op),
        lambda comm, array, op: comm.reduce_scatter(array, op),
        lambda comm, array, op: Fusion(comm, [array], op),
    )

    def program(transport):
        comm = Communicator(transport)
        for call, dtype, op in ((c, d, op) for c in calls for d in OTHERS for op in BITWISE):
            text = f"op='{op}': array of dtype {dtype}: must be bool or an integer: bool, int8,"
            with pytest.raises(TypeError, match=text):
                call(comm, np.ones(3, dtype), op)

    run(1, program)


def test_on_a_gpu_8_bit_floats_are_refused_too():
    with pytest.raises(TypeError, match="float8_e5m2: must be bool or an integer"):
        reduction_for(ReduceOp.BITWISE_OR, np.dtype(ml_dtypes.float8_e5m2), on_gpu=True)
