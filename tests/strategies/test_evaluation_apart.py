"""Evaluation during asynchronous training: all values are those of one checkpoint."""

import os
import time

import numpy as np
import pytest

from strategies import Checkpoint, CheckpointManager, Variable, metrics
from strategies.evaluation.end_marker import training_ends
from strategies.evaluation.evaluate import evaluate_checkpoints
from strategies.evaluation.side_by_side import train_and_evaluate
from strategies.parameter_server import FixedShardsPartitioner
from strategies.parameter_server.strategy import ParameterServerStrategy
from tests.strategies.parameter_servers import number_of, run_workers
from tests.strategies.support import refusal, tf_config

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4, 5)]

SIZE = 20_000
CHECKPOINTS = 4


@pytest.fixture
def directory(comm, tmp_path):
    """A directory that is the same on all ranks."""
    return comm.broadcast_object(str(tmp_path))


@pytest.fixture
def servers(comm, monkeypatch):
    """Give each rank its task: one ps of three ranks, two of more; there is a chief."""
    count = 1 if comm.size == 3 else 2
    jobs = ["ps"] * count + ["worker"] * (comm.size - count - 1) + ["chief"]
    cluster = {job: ["a"] * jobs.count(job) for job in jobs}
    job = jobs[comm.rank]
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, job, comm.rank - jobs.index(job)))


def make(strategy=None):
    """A step counter, and weights whose elements all equal that number."""
    return Variable(0, name="step"), Variable(np.zeros(SIZE), name="weights")


def model_fn(strategy):
    """Evaluate step and weights, which are read at different times."""
    step, weights = make()
    mean = metrics.Mean()

    def evaluate():
        before = int(step)
        time.sleep(0.01 * (1 + number_of(strategy)))
        mean.reset_state()
        for part in strategy.distribute_datasets_from_function(lambda context: parts(context)):
            strategy.run(lambda rows: mean.update_state(weights.sparse_read(rows)), (part,))
        return before, int(step), float(weights[0]), float(weights[-1]), float(mean.result())

    return Checkpoint(step=step, weights=weights), evaluate


def parts(context):
    """All row numbers; one of several pipelines would get a part of them."""
    share = np.array_split(np.arange(SIZE), context.num_input_pipelines)[context.input_pipeline_id]
    return np.array_split(share, 3)


def train(directory, steps):
    """Each worker counts its steps; the chief saves sometimes."""

    def train_fn(strategy):
        with strategy.scope():
            step, weights = make()
        manager = CheckpointManager(
            Checkpoint(step=step, weights=weights), directory, max_to_keep=None
        )
        for done in range(1, steps + 1):
            step.assign_add(1)
            weights.assign_add(np.ones(SIZE))
            if done % (steps // CHECKPOINTS) == 0:
                manager.save()
        return done

    return train_fn


def held(path):
    """The content of a checkpoint's file, all of which an evaluation must return."""
    step, weights = make()
    Checkpoint(step=step, weights=weights).restore(path)
    number, values = int(step), weights.numpy()
    return number, number, values[0], values[-1], pytest.approx(values.mean())


@pytest.mark.usefixtures("servers")
def test_without_an_evaluator_every_worker_evaluates_what_each_checkpoint_holds(comm, directory):
    done = train_and_evaluate(
        train(directory, 12),
        model_fn,
        directory,
        strategy_fn=lambda communicator: ParameterServerStrategy(
            variable_partitioner=FixedShardsPartitioner(2), communicator=communicator
        ),
        communicator=comm,
        poll_seconds=0.01,
    )
    if done.trained is not None:
        assert [each.step for each in done.evaluations] == [1, 2, 3, 4]
        for each in done.evaluations:
            assert each.result == held(each.path)
    comm.barrier()


def test_a_worker_evaluates_while_the_others_train(comm, directory):
    """The servers' variables keep training's values; access to them is refused."""
    if comm.rank == 0:
        with training_ends(directory):
            for number in (1, 2):
                state = {"step": Variable(number), "weights": Variable(np.full(SIZE, 5.0))}
                Checkpoint(**state).save(os.path.join(directory, f"ckpt-{number}"))
    comm.barrier()

    def work(strategy):
        step, weights = make()
        number, before = number_of(strategy), weights.numpy()
        strategy.membership.group.barrier()
        if number == 0:
            found = evaluate_checkpoints(model_fn, directory, strategy=strategy)
            assert [each.result for each in found] == [(n, n, 5, 5, 5) for n in (1, 2)]
            trained = Checkpoint(step=step, weights=weights)
            for wrong in (lambda _: (trained, int), lambda _: (model_fn(strategy)[0], step.numpy)):
                match = "while a worker evaluates, variables on the parameter servers can't be read"
                refusal(
                    RuntimeError, match, evaluate_checkpoints, wrong, directory, strategy=strategy
                )
        else:
            weights.assign_add(np.ones(SIZE))
        strategy.membership.group.barrier()
        workers = len(strategy.roles.workers)
        np.testing.assert_array_equal(weights.numpy(), before + workers - 1)
        return int(step)

    assert set(run_workers(comm, 1, work)) == {0}
