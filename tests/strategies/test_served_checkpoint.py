"""Checkpoints of parameter servers' variables: with other shards, with and without strategies."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from collectives import MismatchError
from strategies import (
    Checkpoint,
    CheckpointError,
    CheckpointManager,
    FixedShardsPartitioner,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    optimizers,
)
from strategies.checkpoint.tensor_file import PARTIAL
from tests.strategies.parameter_servers import number_of, run_workers
from tests.strategies.support import refusal

pytestmark = pytest.mark.mpi

ROWS = 7


def make():
    """A table that can be split, a scalar, and an optimizer with slots."""
    table = Variable(np.zeros((ROWS, 2)), name="table")
    scale = Variable(1.0, name="scale")
    optimizer = optimizers.SGD(0.5, momentum=0.5)
    return table, scale, optimizer, Checkpoint(table=table, scale=scale, optimizer=optimizer)


def gradient(step):
    return np.random.default_rng(step).normal(size=(ROWS, 2))


def steps(strategy, variables, optimizer, numbers):
    table, scale = variables
    for step in numbers:
        pairs = [(gradient(step), table), (float(step), scale)]
        if strategy is None:
            optimizer.apply_gradients(pairs)
        else:
            strategy.run(optimizer.apply_gradients, (pairs,))


def expected(numbers):
    """The values where one process does all these steps."""
    table, scale, optimizer, _ = make()
    steps(None, (table, scale), optimizer, numbers)
    return table.numpy(), scale.numpy()


def check(found, numbers):
    for value, wanted in zip(found, expected(numbers), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-12)


@pytest.fixture
def path(comm, tmp_path):
    """A path that is the same on every rank."""
    return os.path.join(comm.broadcast_object(str(tmp_path)), "state")


def trained_and_saved(path, numbers):
    def work(strategy):
        table, scale, optimizer, checkpoint = make()
        if strategy.is_chief:
            steps(strategy, (table, scale), optimizer, numbers)
        return checkpoint.save(path)

    return work


def restored_and_trained(path, numbers):
    def work(strategy):
        table, scale, optimizer, checkpoint = make()
        checkpoint.restore(path)
        at_once = table.numpy(), scale.numpy(), optimizer.iterations
        strategy.membership.group.barrier()
        strategy.chief_first(lambda: steps(strategy, (table, scale), optimizer, numbers))
        return at_once, (table.numpy(), scale.numpy())

    return work


@pytest.mark.ranks(3, 4, 5)
def test_what_servers_hold_is_restored_without_a_strategy(comm, path):
    split = FixedShardsPartitioner(2)
    written = run_workers(comm, 2, trained_and_saved(path, [1, 2]), variable_partitioner=split)
    assert set(written) == {f"{path}.safetensors"}
    table, scale, optimizer, checkpoint = make()
    checkpoint.restore(path)
    check((table.numpy(), scale.numpy()), [1, 2])
    steps(None, (table, scale), optimizer, [3])
    check((table.numpy(), scale.numpy()), [1, 2, 3])
    comm.barrier()


@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("shards", [1, 3])
def test_other_servers_and_shards_take_it_over(comm, path, shards):
    """All workers read the chief's restored values, and its next steps use the restored slots."""
    split = FixedShardsPartitioner(2)
    run_workers(comm, 2, trained_and_saved(path, [1, 2]), variable_partitioner=split)
    other = FixedShardsPartitioner(shards)
    work = restored_and_trained(path, [3, 4])
    for (table, scale, iterations), later in run_workers(comm, 1, work, variable_partitioner=other):
        check((table, scale), [1, 2])
        assert iterations >= 2
        check(later, [1, 2, 3, 4])


@pytest.mark.ranks(3, 4)
def test_a_checkpoint_of_one_process_is_restored_on_servers(comm, path):
    if comm.rank == 0:
        table, scale, optimizer, checkpoint = make()
        steps(None, (table, scale), optimizer, [1])
        checkpoint.save(path)
    comm.barrier()
    work = restored_and_trained(path, [2])
    for (table, scale, _), later in run_workers(
        comm, 1, work, variable_partitioner=FixedShardsPartitioner(3)
    ):
        check((table, scale), [1])
        check(later, [1, 2])


@pytest.mark.ranks(3, 4)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_worker(comm, path):
    run_workers(comm, 1, trained_and_saved(path, [1]))

    def work(strategy):
        other = Checkpoint(table=Variable(np.ones((ROWS, 3))))
        with pytest.raises(CheckpointError, match=r"table: float64 of shape \(7, 2\), wanted"):
            other.restore(path, expect_partial=True)
        return float(other.table[0, 0])

    assert set(run_workers(comm, 1, work)) == {1.0}


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("call", ["save", "restore"])
@pytest.mark.parametrize("wrong", ["chief", "last"])
def test_an_error_while_one_worker_finds_states(comm, path, call, wrong):
    """The chief's error is raised on all ranks; another rank's error on that rank only."""

    def work(strategy):
        number = number_of(strategy)
        told = 0 if wrong == "chief" else len(strategy.roles.workers) - 1
        things = {"table": Variable(np.ones((ROWS, 2)))}
        checkpoint = Checkpoint(things=things)
        checkpoint.save(path)
        if number == told:
            things[number, "key"] = things["table"]
        act = partial(getattr(checkpoint, call), path)
        if told in (0, number):
            refusal(TypeError, rf"has the key \({told}, 'key'\)", act)
        else:
            act()
        return strategy.chief_first(lambda: "next")

    before, comm.deadline = comm.deadline, 5
    assert set(run_workers(comm, 1, work)) == {"next"}
    comm.deadline = before


@pytest.mark.ranks(3, 4)
def test_a_workers_own_variables_are_restored_and_calls_are_compared(comm, path):
    def work(strategy):
        on_read = VariableSynchronization.ON_READ, VariableAggregation.SUM
        rules = dict(zip(("synchronization", "aggregation"), on_read, strict=True))
        own, shared = Variable(1.0, trainable=False, **rules), Variable(2.0)
        checkpoint = Checkpoint(own=own, shared=shared)
        checkpoint.save(path)
        own.assign(10.0 + number_of(strategy))
        checkpoint.restore(path)
        others = Checkpoint(shared=shared) if strategy.is_chief else Checkpoint(other=shared)
        if strategy.is_chief:
            # Another file: the chief doesn't wait until the others have read that one.
            others.save(f"{path}-2")
            others.restore(f"{path}-2")
        else:
            refusal(MismatchError, "save of other, but the chief .*of shared", others.save, path)
            refusal(MismatchError, "save of other, but the chief .*restore", others.save, path)
        return float(own.numpy()), strategy.chief_first(lambda: "next")

    assert set(run_workers(comm, 1, work)) == {(1.0, "next")}


@pytest.mark.ranks(3, 4)
def test_the_chief_alone_reads_the_file(comm, path):
    """Else a worker would restore a newer one, or none, where the chief keeps one checkpoint."""

    def work(strategy):
        on_read = VariableSynchronization.ON_READ
        table, scale, optimizer, _ = make()
        own = Variable(7.0, synchronization=on_read, aggregation=VariableAggregation.SUM)
        checkpoint = Checkpoint(table=table, own=own, optimizer=optimizer)
        if strategy.is_chief:
            steps(strategy, (table, scale), optimizer, [1, 2])
        written = checkpoint.save(path)
        own.assign(0.0)
        if strategy.is_chief:
            checkpoint.restore(path)
            os.remove(written)
        strategy.membership.group.barrier()
        if not strategy.is_chief:
            checkpoint.restore("of a worker, unused")
        return float(own.numpy()), optimizer.iterations

    results = run_workers(comm, 1, work)
    assert results == [(7.0, 2)] * len(results)


@pytest.mark.ranks(3, 4)
def test_managers_start_with_the_chiefs_list(comm, path):
    """A late worker neither restores a newer checkpoint nor deletes it."""
    directory = os.path.dirname(path)

    def work(strategy):
        *_, checkpoint = make()
        late = not strategy.is_chief
        if late:
            strategy.membership.group.barrier()
        manager = CheckpointManager(checkpoint, directory)
        began = manager.restore_or_initialize()
        saved = manager.save()
        if not late:
            # As while the next checkpoint is being written.
            half = Path(directory, f".ckpt-2.safetensors.1{PARTIAL}")
            half.touch()
            strategy.membership.group.barrier()
        strategy.membership.group.barrier()
        assert os.path.basename(saved) == "ckpt-1.safetensors"
        assert manager.checkpoints == [saved]
        return began, sorted(os.listdir(directory))

    before, comm.deadline = comm.deadline, 10
    names = [f".ckpt-2.safetensors.1{PARTIAL}", "ckpt-1.safetensors"]
    results = run_workers(comm, 1, work)
    assert results == [(None, names)] * len(results)
    comm.deadline = before
