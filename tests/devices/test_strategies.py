"""NCCL in strategies: arrays of the host, staged on simulated GPUs, and device arrays."""

import logging
import sys

import numpy as np
import pytest

from collectives import BackendUnavailableError, MismatchError
from collectives.cuda import runtime as cuda_module
from collectives.gpu import probe
from strategies import (
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Variable,
    get_replica_context,
    optimizers,
)
from strategies.core.options import CommunicationOptions
from strategies.cross_device_ops import NcclAllReduce
from tests.devices import simulated_kernels  # noqa: F401  fills the simulator's kernels
from tests.devices.gpu_worlds import run, simulated
from tests.slow import slow
from tests.strategies import support
from tests.strategies.support import lone_strategy

SIZES = [3, *slow(2)]


def strategy_of(comm, *options):
    return MultiWorkerMirroredStrategy(None, CommunicationOptions(*options), communicator=comm)


def arrays_of(rank):
    """Exact in each dtype, whatever the order of the sum; of one that NCCL lacks as well."""
    return support.arrays_of(rank) | {"short": (np.arange(12) + rank).astype(np.int16)}


def leaves(nest):
    return [*nest.values(), *nest["integers"]]


def same(found, expected):
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        if not isinstance(one, list):
            assert isinstance(one, np.ndarray | np.generic)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def reduced(strategy, value, op="sum", options=None):
    return strategy.run(lambda: get_replica_context().all_reduce(op, value, options))


def packs(nccl, rank=0):
    """The elements of each all-reduce that NCCL ran."""
    return [arguments[0] for name, arguments in nccl.calls[rank] if name == "all_reduce"]


# --- arrays of the host --------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("way", ["options", "a call's options", "packs", "no packs"])
def test_the_numbers_are_those_of_the_host(size, op, way):
    def program(comm, cuda):
        nccl = CommunicationOptions(implementation="NCCL")
        if way == "options":
            strategy = strategy_of(comm, 0, None, "NCCL")
        elif way == "a call's options":
            strategy = strategy_of(comm)
        else:
            ops = NcclAllReduce(3 if way == "packs" else 0)
            strategy = MirroredStrategy(None, ops, communicator=comm)
        given = arrays_of(comm.rank)
        expected = reduced(strategy_of(comm), given, op)
        same(reduced(strategy, given, op, nccl if way.startswith("a call") else None), expected)
        same(given, arrays_of(comm.rank))
        np.testing.assert_array_equal(
            strategy.reduce(op, given["matrix"], axis=0),
            strategy_of(comm).reduce(op, given["matrix"], axis=0),
        )

    with simulated() as (cuda, nccl):
        run(size, program, gpus=cuda)
        for rank in range(size):
            assert len(packs(nccl, rank)) >= 3


@pytest.mark.parametrize(
    ("options", "ops", "expected"),
    [
        ((0, None, "NCCL"), None, [2, 8]),
        ((12, None, "NCCL"), None, [2, 8]),
        ((11, None, "NCCL"), None, [2, 3, 5]),
        (None, 1, [2, 8]),
        (None, 3, [2, 2, 2, 4]),
        (None, 0, [2, 3, 5]),
    ],
)
def test_packs_are_what_nccl_reduces(options, ops, expected):
    def program(comm, cuda):
        if options:
            strategy = strategy_of(comm, *options)
        else:
            strategy = MirroredStrategy(None, NcclAllReduce(ops), communicator=comm)
        given = [np.ones(5, np.float32), np.ones((3, 1), np.float32), np.ones(2, np.int32)]
        assert [each.tolist() for each in reduced(strategy, given)] == [
            [2] * 5,
            [[2]] * 3,
            [2] * 2,
        ]

    with simulated() as (cuda, nccl):
        run(2, program, gpus=cuda)
        assert packs(nccl) == expected


def test_a_model_trains_over_nccl():
    def trained(comm, options):
        strategy = strategy_of(comm, *options)
        with strategy.scope():
            weights = Variable(np.arange(6, dtype=np.float32))
            optimizer = optimizers.SGD(0.5)

        def step():
            optimizer.apply_gradients([(np.full(6, comm.rank + 1, np.float32), weights)])

        for _ in range(3):
            strategy.run(step)
        return weights.read_value()

    def program(comm, cuda):
        np.testing.assert_array_equal(trained(comm, (0, None, "NCCL")), trained(comm, ()))

    with simulated() as (cuda, nccl):
        run(3, program, gpus=cuda)
        assert packs(nccl) == [6] * 3


@pytest.mark.parametrize("current", ["their own", "the same"])
def test_each_rank_takes_a_gpu_of_its_own(current):
    """In a job without GPU variables, all ranks begin with the first one."""

    def program(comm, cuda):
        before = cuda.current_device()
        assert reduced(strategy_of(comm, 0, None, "NCCL"), np.ones(3)).tolist() == [2] * 3
        assert cuda.current_device() == before
        ops = MirroredStrategy(None, NcclAllReduce(), communicator=comm)
        assert reduced(ops, np.ones(3)).tolist() == [2] * 3

    with simulated() as (cuda, nccl):
        run(2, program, gpus=cuda, device=lambda rank: rank + 4 if current == "their own" else 0)
        used = {comm.owner: comm.device for comm in nccl.comms}
        assert used == ({0: 4, 1: 5} if current == "their own" else {0: 0, 1: 1})


def test_what_is_gathered_stays_on_the_host():
    def program(comm, cuda):
        rows = np.full((comm.rank + 1, 2), comm.rank)
        assert strategy_of(comm, 0, None, "NCCL").gather(rows, axis=0)[:, 0].tolist() == [0, 1, 1]

    with simulated() as (cuda, nccl):
        run(2, program, gpus=cuda)
        assert not nccl.comms


# --- where there is no NCCL ----------------------------------------------------------------------


def without(nccl, cuda, kind):
    """Remove it on rank 1."""
    if kind == "no NCCL":
        nccl.missing[1] = "NCCL can't be loaded"
    elif kind == "no GPU":
        cuda.missing[1] = "CuPy finds no GPU"
    else:
        cuda.uuids[1, 1] = cuda.uuids[1, 0] = 0
    return {"one GPU": "ranks 0 and 1 share the GPU"}.get(kind, "rank 1")


LACKING = pytest.mark.parametrize("kind", ["no NCCL", "no GPU", "one GPU"])


@LACKING
@pytest.mark.parametrize("by", ["strategy", "call"])
def test_the_hint_falls_back_to_auto_on_all_ranks(kind, by, caplog):
    def program(comm, cuda):
        nccl = (0, None, "NCCL")
        strategy = strategy_of(comm, *(nccl if by == "strategy" else ()))
        options = None if by == "strategy" else CommunicationOptions(*nccl)
        for _ in range(2):
            assert reduced(strategy, np.ones(3), "sum", options).tolist() == [3] * 3

    with simulated() as (cuda, nccl), caplog.at_level(logging.INFO, "strategies"):
        text = without(nccl, cuda, kind)
        run(3, program, gpus=cuda)
        assert not nccl.comms
    (said,) = [record.getMessage() for record in caplog.records]
    assert "all ranks take AUTO" in said
    assert text in said


@LACKING
def test_cross_device_ops_are_refused_on_all_ranks(kind):
    """Rank 1 had all requirements when they were created."""

    def program(comm, cuda):
        strategy = MirroredStrategy(None, NcclAllReduce(), communicator=comm)
        comm.barrier()
        if comm.rank == 0:
            texts.append(without(nccl, cuda, kind))
        comm.barrier()
        for _ in range(2):
            with pytest.raises(
                BackendUnavailableError, match=r"NcclAllReduce: .*RingAllReduce"
            ) as caught:
                reduced(strategy, np.ones(3))
            assert texts[0] in str(caught.value)
        return str(caught.value)

    texts = []
    with simulated() as (cuda, nccl):
        assert len(set(run(2, program, gpus=cuda))) == 1


def test_ops_are_not_made_where_there_is_no_nccl():
    with simulated() as (cuda, nccl):
        nccl.missing[0] = "NCCL can't be loaded"
        cuda.be_rank(0)
        with pytest.raises(BackendUnavailableError, match=r"NcclAllReduce: .*can't be loaded"):
            NcclAllReduce()


def test_ranks_that_ask_for_different_ways_are_told():
    def program(comm, cuda):
        way = "NCCL" if comm.rank else "RING"
        with pytest.raises(MismatchError) as caught:
            reduced(strategy_of(comm), np.ones(3), options=CommunicationOptions(0, None, way))
        return str(caught.value)

    assert len(set(run(2, program))) == 1


# --- without a request for GPUs ------------------------------------------------------------------


def test_cupy_is_not_looked_for(monkeypatch):
    """It takes a second to import."""

    def refuse(*_):
        raise AssertionError("CuPy was asked for")

    monkeypatch.setattr(cuda_module, "_made", None)
    monkeypatch.setitem(sys.modules, "collectives.cuda.cupy_cuda", None)
    monkeypatch.setattr(probe, "nccl_driver", refuse)
    monkeypatch.setattr(probe, "find_gpu", refuse)
    strategy = lone_strategy()
    assert reduced(strategy, [np.ones(3), 1.0])[0].tolist() == [1] * 3
    comm = strategy.communicator
    for made in (
        MirroredStrategy("CPU:0", communicator=comm),
        OneDeviceStrategy("/cpu:0"),
        strategy_of(comm, 8, None, "RING"),
    ):
        assert made.reduce("sum", 1.0, axis=None) == 1
        assert made.gather(np.ones(2), axis=0).tolist() == [1, 1]
