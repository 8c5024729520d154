"""Ranks that make different calls get the same error, and can continue."""

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.scope import named_scope
from collectives.transports import local
from tests.collectives.oracle import reduced, value, values

SMALL, LARGE = 10, 50_000
NODE_OF = {2: [0, 1], 3: [0, 0, 1], 5: [0, 0, 1, 1, 1]}
KINDS = ["world", "split", "nodes"]


def summed(comm, *arguments, **named):
    comm.all_reduce(np.ones(*arguments), **named)


# The odd rank's call, the others' calls, and the error of all ranks.
CASES = {
    "10 or 11 elements": (
        lambda comm: summed(comm, 11),
        lambda comm: summed(comm, 10),
        collectives.ShapeMismatchError,
    ),
    "100k or 200k elements": (
        lambda comm: summed(comm, 200_000),
        lambda comm: summed(comm, 100_000),
        collectives.ShapeMismatchError,
    ),
    "small or large": (
        lambda comm: summed(comm, SMALL),
        lambda comm: summed(comm, LARGE),
        collectives.ShapeMismatchError,
    ),
    "small float32 or int32": (
        lambda comm: summed(comm, SMALL, np.float32),
        lambda comm: summed(comm, SMALL, np.int32),
        collectives.DtypeMismatchError,
    ),
    "large float32 or int32": (
        lambda comm: summed(comm, LARGE, np.float32),
        lambda comm: summed(comm, LARGE, np.int32),
        collectives.DtypeMismatchError,
    ),
    "small sum or product": (
        lambda comm: summed(comm, SMALL, op="product"),
        lambda comm: summed(comm, SMALL, op="sum"),
        collectives.OpMismatchError,
    ),
    "small sum or bitwise_or": (
        lambda comm: summed(comm, SMALL, np.int32, op="bitwise_or"),
        lambda comm: summed(comm, SMALL, np.int32),
        collectives.OpMismatchError,
    ),
    "large sum or mean": (
        lambda comm: summed(comm, LARGE, op="mean"),
        lambda comm: summed(comm, LARGE, op="sum"),
        collectives.OpMismatchError,
    ),
    "small for this or that": (
        lambda comm: summed(comm, SMALL, what="this"),
        lambda comm: summed(comm, SMALL, what="that"),
        collectives.MismatchError,
    ),
    "large for this or nothing": (
        lambda comm: summed(comm, LARGE, what="this"),
        lambda comm: summed(comm, LARGE),
        collectives.MismatchError,
    ),
    "a list for this or that": (
        lambda comm: comm.all_reduce_many([np.ones(3), np.ones(4)], what="this"),
        lambda comm: comm.all_reduce_many([np.ones(3), np.ones(4)], what="that"),
        collectives.MismatchError,
    ),
    "root 0 or 1 of a broadcast": (
        lambda comm: comm.broadcast(np.ones(SMALL), root=1),
        lambda comm: comm.broadcast(np.ones(SMALL), root=0),
        collectives.RootMismatchError,
    ),
    "root 0 or 1 of a reduce": (
        lambda comm: comm.reduce(np.ones(LARGE), root=1),
        lambda comm: comm.reduce(np.ones(LARGE), root=0),
        collectives.RootMismatchError,
    ),
    "all_reduce or broadcast": (
        lambda comm: comm.broadcast(np.ones(SMALL)),
        lambda comm: summed(comm, SMALL),
        collectives.CollectiveMismatchError,
    ),
    "large all_reduce or broadcast": (
        lambda comm: comm.broadcast(np.ones(LARGE)),
        lambda comm: summed(comm, LARGE),
        collectives.CollectiveMismatchError,
    ),
    "all_reduce or barrier": (
        lambda comm: comm.barrier(),
        lambda comm: summed(comm, SMALL),
        collectives.CollectiveMismatchError,
    ),
    "a forced algorithm": (
        lambda comm: summed(comm, SMALL, algorithm="ring"),
        lambda comm: summed(comm, SMALL),
        collectives.MismatchError,
    ),
    "another forced algorithm": (
        lambda comm: summed(comm, LARGE, algorithm="ring"),
        lambda comm: summed(comm, LARGE, algorithm="doubling"),
        collectives.MismatchError,
    ),
    "axis 0 or 1 of a scatter": (
        lambda comm: comm.scatter(np.ones((SMALL, SMALL)), axis=1),
        lambda comm: comm.scatter(np.ones((SMALL, SMALL))),
        collectives.MismatchError,
    ),
    "close or barrier": (
        lambda comm: comm.close(),
        lambda comm: comm.barrier(),
        collectives.CollectiveMismatchError,
    ),
    "a registered array or all_reduce": (
        lambda comm: comm.empty(100),
        lambda comm: summed(comm, SMALL),
        collectives.CollectiveMismatchError,
    ),
    "asynchronous 10 or 11 elements": (
        lambda comm: comm.all_reduce_async(np.ones(11)).wait(),
        lambda comm: comm.all_reduce_async(np.ones(10)).wait(),
        collectives.ShapeMismatchError,
    ),
    "asynchronous all_reduce or broadcast": (
        lambda comm: comm.broadcast_async(np.ones(LARGE)).wait(),
        lambda comm: comm.all_reduce_async(np.ones(LARGE)).wait(),
        collectives.CollectiveMismatchError,
    ),
}


@pytest.fixture(scope="module")
def comms(comm):
    """Groups of every kind, with all the ranks in each."""
    groups = {
        "world": Communicator(MPI.COMM_WORLD, deadline=20),
        "split": comm.split(0, -comm.rank),
        "nodes": Communicator(MPI.COMM_WORLD, deadline=20, node_of=NODE_OF[comm.size]),
    }
    yield groups
    for group in groups.values():
        group.close()


def check_case(comm, case, odd):
    """The odd rank's call and the others' raise the same error on every rank."""
    differ, agree, kind = CASES[case]
    call = differ if comm.rank == odd else agree
    with pytest.raises(collectives.MismatchError) as caught:
        call(comm)
    error = caught.value
    assert type(error) is kind
    assert len(error.calls) == comm.size
    assert len(set(error.calls)) == 2
    assert all((text == error.calls[odd]) == (rank == odd) for rank, text in enumerate(error.calls))
    for rank, text in enumerate(error.calls):
        assert f"rank {rank}: {text} ({__file__}:" in str(error)
    return str(error)


def check_calls(comm, rounds=1):
    """Valid calls of every path have the right results."""
    for _ in range(rounds):
        for length in (SMALL, LARGE):
            expected = reduced("sum", values(comm.size, length))
            np.testing.assert_array_equal(comm.all_reduce(value(comm.rank, length)), expected)
        comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_the_same_error_and_goes_on(comms, kind, case):
    comm = comms[kind]
    for odd in {0, comm.size - 1}:
        check_calls(comm)
        text = check_case(comm, case, odd)
        check_calls(comm)
        assert set(comm.all_gather_object(text)) == {text}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_differ_on_every_rank(comms, kind):
    comm = comms[kind]
    with pytest.raises(collectives.ShapeMismatchError) as caught:
        comm.all_reduce(np.ones(comm.rank + 1, np.float32))
    expected = tuple(f"all_reduce(sum, float32[{rank + 1}])" for rank in range(comm.size))
    assert caught.value.calls == expected
    check_calls(comm)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("kind", KINDS)
def test_valid_and_invalid_calls_in_any_order(comms, kind):
    comm = comms[kind]
    chance = np.random.default_rng(7)
    cases = list(CASES)
    for _ in range(100):
        if chance.random() < 0.5:
            check_case(comm, cases[chance.integers(len(cases))], int(chance.integers(comm.size)))
        else:
            check_calls(comm)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [SMALL, LARGE])
def test_registered_arrays(comms, kind, length):
    comm = comms[kind]
    array, longer = comm.empty(length), comm.empty(length + 1)
    array[:], longer[:] = comm.rank + 1, 0
    for odd in {0, comm.size - 1}:
        with pytest.raises(collectives.ShapeMismatchError):
            comm.all_reduce(longer if comm.rank == odd else array)
        with pytest.raises(collectives.OpMismatchError):
            comm.all_reduce(array, "max" if comm.rank == odd else "sum")
        with pytest.raises(collectives.ShapeMismatchError):
            comm.empty(7 if comm.rank == odd else 8)
        call = comm.broadcast if comm.rank == odd else comm.all_reduce
        with pytest.raises(collectives.CollectiveMismatchError):
            call(array)
        # An ordinary array on one rank alone is no difference.
        given = np.full(length, comm.rank + 1, np.float32) if comm.rank == odd else array
        total = comm.size * (comm.size + 1) / 2
        np.testing.assert_array_equal(comm.all_reduce(given), np.full(length, total))
        np.testing.assert_array_equal(array, np.full(length, comm.rank + 1))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_rank_can_see_alone_reaches_nobody(comms, kind):
    comm = comms[kind]
    if comm.rank == 0:
        with pytest.raises(ValueError, match="root=9"):
            comm.broadcast(np.ones(3), root=9)
        with pytest.raises(ValueError, match="op"):
            comm.all_reduce(np.ones(3), "median")
        with pytest.raises(TypeError, match="dtype"):
            comm.all_reduce(np.ones(3), out=np.ones(3, np.float32))
    check_calls(comm)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_threads_of_one_process(size):
    cases = [case for case in CASES if "close" not in case]

    def program(transport):
        comm = Communicator(transport, deadline=20)
        texts = []
        for number, case in enumerate(cases):
            texts.append(check_case(comm, case, number % size))
            check_calls(comm)
        return texts

    texts = local.run(size, program)
    assert all(each == texts[0] for each in texts)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_texts_of_numpy_are_those_of_python(comm):
    for number in range(4):
        text = f"step {number % 2}"
        comm.barrier(np.str_(text) if comm.rank else text)
        comm.barrier_async(text if comm.rank else np.str_(text)).wait()


@pytest.mark.mpi
def test_errors_name_what_a_call_is_made_for(comm):
    """The outermost name is used until its scope has ended, also by an error."""

    def called(name, inner, length):
        error = pytest.raises(collectives.ShapeMismatchError)
        with error as caught, named_scope(comm, name), named_scope(comm, inner):
            comm.all_reduce(np.ones(length))
        return str(caught.value)

    if comm.size == 1:
        with named_scope(comm, "a lone step"):
            assert comm.all_reduce(np.ones(1)) == 1
        return
    odd = comm.rank == 1
    text = called(f"step {comm.rank}", "its gradients", 11 if odd else 10)
    assert "rank 0: step 0: all_reduce(sum, float64[10])" in text
    assert "rank 1: step 1: all_reduce(sum, float64[11])" in text
    with pytest.raises(collectives.ShapeMismatchError) as caught:
        comm.all_reduce(np.ones(11 if odd else 10))
    assert "step" not in str(caught.value)
    with named_scope(comm, f"step {comm.rank}"):
        np.testing.assert_array_equal(comm.all_reduce(np.full(3, comm.rank)), sum(range(comm.size)))
