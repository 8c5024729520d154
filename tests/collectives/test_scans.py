"""Prefix reductions."""

import numpy as np
import pytest

import collectives
from collectives import MismatchError, OpMismatchError, ScheduleError, ShapeMismatchError
from collectives.algorithms import doubling, find
from collectives.analysis.verify import verify_schedule
from collectives.calls.scans import identity
from collectives.reductions.reduction import ReduceOp
from collectives.schedules.spec import spec_of
from collectives.transports.local import run
from tests.collectives.oracle import PAIRS, case, reduced, value, values
from tests.slow import slow

EXCLUSIVE = {"scan": 0, "exscan": 1}


def expected(name, op, size, rank, shape, dtype):
    arrays = values(size, shape, dtype, 2)[: rank + 1 - EXCLUSIVE[name]]
    if not arrays:
        return np.full(shape, identity(ReduceOp(op), np.dtype(dtype)), dtype)
    return np.asarray(reduced(op, list(map(np.atleast_1d, arrays)))).reshape(shape)


def scans(comm):
    for name in EXCLUSIVE:
        for op, dtype in PAIRS:
            if op == "mean":
                continue
            for shape in ((), (0,), (7,), (40, 3)):
                with case(name, op, dtype, shape):
                    own = value(comm.rank, shape, dtype, 2)
                    wanted = expected(name, op, comm.size, comm.rank, shape, dtype)
                    before = own.copy()
                    found = getattr(comm, name)(own, op)
                    assert np.array_equal(found, wanted)
                    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                    assert np.array_equal(own, before)
        wanted = expected(name, "sum", comm.size, comm.rank, (6, 5), np.float64)
        strided = np.zeros((5, 6)).T
        own = value(comm.rank, (6, 5), largest=2)
        assert getattr(comm, name)(own, out=strided, algorithm="doubling") is strided
        np.testing.assert_array_equal(strided, wanted)
        in_place = own.copy()
        handle = getattr(comm, f"{name}_async")(in_place, out=in_place)
        assert handle.wait() is in_place
        np.testing.assert_array_equal(in_place, wanted)
    return True


@pytest.mark.mpi
def test_every_op_and_dtype(comm):
    assert scans(comm)


@pytest.mark.parametrize("size", [1, 3, *slow(2, 5, 8)])
def test_between_threads(size):
    assert all(run(size, lambda transport: scans(collectives.Communicator(transport, deadline=30))))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_refusals_and_mismatches(comm):
    array, odd = np.ones(4), comm.rank == 1
    for name in EXCLUSIVE:
        call = getattr(comm, name)
        with pytest.raises(ValueError, match=f"op='mean': {name} takes every other op"):
            call(array, "mean")
        with pytest.raises(ValueError, match=r"algorithm='ring': (ex)?scan has 'doubling'"):
            call(array, algorithm="ring")
        with pytest.raises(TypeError, match="complex numbers have no order"):
            call(array.astype(complex), "max")
        with pytest.raises(ValueError, match="there is no such"):
            call(array, algorithm="native")
        for error, wrong in (
            (OpMismatchError, lambda call=call: call(array, "max" if odd else "min")),
            (ShapeMismatchError, lambda call=call: call(array[int(odd) :])),
            (MismatchError, lambda: (comm.scan if odd else comm.exscan)(array)),
        ):
            with pytest.raises(error) as caught:
                wrong()
            assert len(set(comm.all_gather_object(str(caught.value)))) == 1
        assert call(array)[0] == comm.rank + 1 - EXCLUSIVE[name]


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_the_verifier_finds_a_prefix_of_other_ranks(name):
    """A schedule of the other one, and one without its last round."""
    spec, schedule = spec_of(name), find(name, "doubling").schedule
    chunks = 1 + EXCLUSIVE[name]
    ranks = np.arange(6)
    verify_schedule(spec, schedule(ranks, 6), 6, chunks)
    for wrong in (list(schedule(ranks, 6))[:-1], list(schedule(ranks, 6))[1:]):
        with pytest.raises(ScheduleError):
            verify_schedule(spec, wrong, 6, chunks)
    with pytest.raises(ScheduleError):
        verify_schedule(spec_of("scan"), doubling.all_reduce(ranks, 6), 6, 1)
