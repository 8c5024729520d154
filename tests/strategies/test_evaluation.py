"""Evaluation of checkpoints while others train: each once, in order, until training has ended."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import collectives
import strategies
from strategies import ClusterSpec, MultiWorkerMirroredStrategy, Variable, optimizers
from strategies.checkpoint import Checkpoint, CheckpointError, CheckpointManager
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.evaluation import evaluate as evaluation
from strategies.evaluation.end_marker import END_MARKER, EndOfTraining, training_ends
from strategies.evaluation.evaluate import evaluate_checkpoints
from strategies.evaluation.side_by_side import train_and_evaluate
from strategies.parameter_server.strategy import ParameterServerStrategy
from tests.strategies.support import refusal, same_refusal, tf_config


def model_fn(strategy):
    """The evaluation returns ten times the number in the checkpoint."""
    variable = Variable(0.0)
    return Checkpoint(v=variable), lambda: 10 * float(variable)


def save(directory, step, value=None):
    variable = Variable(float(step if value is None else value))
    path = os.path.join(directory, f"ckpt-{step}")
    return Checkpoint(v=variable, optimizer=optimizers.SGD()).save(path)


def end(directory, run=None, ended=None):
    with training_ends(directory, run=run):
        pass
    if ended is not None:
        marker = Path(directory, END_MARKER)
        marker.write_text(json.dumps(json.loads(marker.read_text()) | {"ended": ended}))


def training_has_ended(directory, run=None):
    """The first poll of a new process."""
    return EndOfTraining(directory, run).poll()


@pytest.fixture
def meanwhile(monkeypatch):
    """Run one of the given functions each time that the evaluator sleeps for `seconds`."""

    def prepare(*happenings, seconds=1.0):
        waiting = list(happenings)

        def sleep(duration):
            assert duration == seconds
            waiting.pop(0)()

        # The module `time` itself isn't patched, since other threads sleep, too.
        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(evaluation, "time", clock)
        return waiting

    return prepare


def seen(evaluations):
    return [(each.step, each.result) for each in evaluations]


# --- one process, with a trainer's actions during sleeps -----------------------------------------


def test_each_checkpoint_is_evaluated_once_and_in_order(tmp_path, meanwhile):
    save(tmp_path, 2)
    waiting = meanwhile(
        lambda: save(tmp_path, 3),
        lambda: None,
        lambda: [save(tmp_path, step) for step in (10, 9)],
        lambda: None,
        lambda: [save(tmp_path, 11), end(tmp_path)],
    )
    told = []

    def tell(each):
        told.append(each)
        assert len(told) <= 5

    evaluations = evaluate_checkpoints(model_fn, tmp_path, on_result=tell)
    assert seen(evaluations) == [(2, 20.0), (3, 30.0), (9, 90.0), (10, 100.0), (11, 110.0)]
    assert told == evaluations
    assert evaluations[0].path == str(tmp_path / "ckpt-2.safetensors")
    assert not waiting


def test_a_checkpoint_that_appears_while_another_is_evaluated(tmp_path, meanwhile):
    save(tmp_path, 1)

    def slow_model(strategy):
        variable = Variable(0.0)

        def evaluate():
            if float(variable) == 1:
                save(tmp_path, 2)
                end(tmp_path)
            return float(variable)

        return Checkpoint(v=variable), evaluate

    meanwhile()
    assert seen(evaluate_checkpoints(slow_model, tmp_path)) == [(1, 1.0), (2, 2.0)]


def test_one_that_is_deleted_before_its_turn_is_skipped(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    end(tmp_path)

    def delete(each):
        (tmp_path / "ckpt-2.safetensors").unlink(missing_ok=True)

    assert seen(evaluate_checkpoints(model_fn, tmp_path, on_result=delete)) == [(1, 10), (3, 30)]


def test_one_that_is_deleted_just_before_it_is_read_is_skipped(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    end(tmp_path)
    restore = Checkpoint.restore

    def deleted(self, path, **named):
        if "ckpt-1" in path:
            os.unlink(path)
        restore(self, path, **named)

    monkeypatch.setattr(Checkpoint, "restore", deleted)
    assert seen(evaluate_checkpoints(model_fn, tmp_path)) == [(2, 20.0)]


def test_one_that_is_replaced_is_a_new_one(tmp_path, meanwhile):
    Checkpoint(v=Variable(1.0)).save(tmp_path / "best")
    meanwhile(
        lambda: Checkpoint(v=Variable(2.0)).save(tmp_path / "best"),
        lambda: end(tmp_path),
    )
    assert seen(evaluate_checkpoints(model_fn, tmp_path)) == [(None, 10.0), (None, 20.0)]


def test_one_that_is_replaced_within_a_tick_of_the_clock_is_a_new_one(tmp_path, meanwhile):
    def write(value):
        path = save(tmp_path, 1, value)
        os.utime(path, (1, 1))

    write(1)
    with open(tmp_path / "ckpt-1.safetensors", "rb"):  # so that the inode isn't reused
        meanwhile(lambda: write(2), lambda: end(tmp_path))
        assert seen(evaluate_checkpoints(model_fn, tmp_path)) == [(1, 10.0), (1, 20.0)]


def test_the_directory_may_be_created_later(tmp_path, meanwhile):
    meanwhile(lambda: save(tmp_path / "new", 1), lambda: end(tmp_path / "new"))
    assert seen(evaluate_checkpoints(model_fn, tmp_path / "new")) == [(1, 10.0)]


@pytest.mark.parametrize("run", [None, "mine"])
def test_the_end_of_an_earlier_run_ends_nothing(tmp_path, meanwhile, run):
    end(tmp_path, run="earlier", ended=time.time() - 3600)
    waiting = meanwhile(lambda: save(tmp_path, 1), lambda: None, lambda: end(tmp_path, run))
    assert seen(evaluate_checkpoints(model_fn, tmp_path, run=run)) == [(1, 10.0)]
    assert not waiting


def test_another_run_that_ends_now_ends_no_named_one(tmp_path, meanwhile):
    save(tmp_path, 1)
    waiting = meanwhile(lambda: end(tmp_path, "other"), lambda: end(tmp_path, "mine"))
    assert seen(evaluate_checkpoints(model_fn, tmp_path, run="mine")) == [(1, 10.0)]
    assert not waiting


def test_it_sleeps_for_poll_seconds_between_two_polls(tmp_path, meanwhile):
    save(tmp_path, 1)
    waiting = meanwhile(lambda: None, lambda: end(tmp_path), seconds=0.125)
    assert seen(evaluate_checkpoints(model_fn, tmp_path, poll_seconds=0.125)) == [(1, 10.0)]
    assert not waiting


def test_an_end_without_any_checkpoint_is_warned_of(tmp_path):
    """As where the directory is not the trainer's."""
    end(tmp_path)
    with pytest.warns(RuntimeWarning, match="training has ended without any checkpoint in"):
        assert evaluate_checkpoints(model_fn, tmp_path) == []


@pytest.mark.parametrize("poll", [0, -1.0, float("nan")])
def test_a_busy_loop_is_refused(tmp_path, poll):
    refusal(
        ValueError, "poll_seconds=", evaluate_checkpoints, model_fn, tmp_path, poll_seconds=poll
    )


def test_after_the_idle_limit_it_warns_and_ends(tmp_path):
    save(tmp_path, 4)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"no new checkpoint for \d+ s, and no end of training"):
        found = evaluate_checkpoints(model_fn, tmp_path, poll_seconds=0.02, idle_seconds=0.1)
    assert seen(found) == [(4, 40.0)]
    assert time.monotonic() - began >= 0.1


def test_an_evaluations_exception_is_raised(tmp_path):
    save(tmp_path, 1)
    end(tmp_path)

    def broken(strategy):
        return Checkpoint(v=Variable(0.0)), lambda: [][1]

    refusal(IndexError, "out of range", evaluate_checkpoints, broken, tmp_path)
    (tmp_path / "ckpt-1.safetensors").write_bytes(b"half")
    refusal(CheckpointError, "incomplete", evaluate_checkpoints, model_fn, tmp_path)


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["model_fn", "evaluate", "on_result"])
def test_what_one_rank_raises_is_raised_on_all(comm, directory, place):
    def fail_in(here):
        if here == place and comm.rank == 1:
            raise OSError("no room")

    def made(strategy):
        fail_in("model_fn")
        value = Variable(0.0)

        def evaluate():
            fail_in("evaluate")
            return float(value.numpy())

        return Checkpoint(v=value), evaluate

    if comm.rank == 0:
        save(directory, 1)
        save(directory, 2)
        end(directory)
    comm.barrier()
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    error = collectives.MismatchError
    with pytest.raises(error, match="evaluate_checkpoints refused by OSError: no room"):
        evaluate_checkpoints(
            made, directory, strategy=strategy, on_result=lambda _: fail_in("on_result")
        )
    comm.barrier()


# --- the marker ----------------------------------------------------------------------------------


def test_the_marker_is_written_at_the_end_and_when_training_fails(tmp_path):
    assert not training_has_ended(tmp_path)
    with training_ends(tmp_path / "new", run="a"):
        assert not training_has_ended(tmp_path / "new", "a")
    assert training_has_ended(tmp_path / "new", "a")
    assert not training_has_ended(tmp_path / "new", "b")

    @training_ends(tmp_path / "new", run="b")
    def fail():
        # The earlier run's marker is removed.
        assert not training_has_ended(tmp_path / "new", "a")
        raise KeyError("lost")

    refusal(KeyError, "lost", fail)
    assert training_has_ended(tmp_path / "new", "b")
    told = json.loads((tmp_path / "new" / END_MARKER).read_text())
    assert told["failure"] == "KeyError: 'lost'"
    assert os.listdir(tmp_path / "new") == [END_MARKER]


def test_only_the_writing_rank_touches_the_marker(tmp_path):
    end(tmp_path, "earlier")
    with training_ends(tmp_path, run="mine", writes=False):
        assert training_has_ended(tmp_path, "earlier")
    assert training_has_ended(tmp_path, "earlier")


def test_without_a_name_the_time_decides_about_an_end_before_the_first_poll(tmp_path):
    end(tmp_path, ended=time.time() + 1)
    assert training_has_ended(tmp_path)
    end(tmp_path, ended=time.time() - 3600)
    assert not training_has_ended(tmp_path)


def test_a_failure_is_raised_though_it_cannot_be_marked(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr("strategies.checkpoint.tensor_file.write", full)
    with pytest.raises(ValueError, match="diverged"), training_ends(tmp_path):
        raise ValueError("diverged")
    assert "not marked for evaluators: no space" in caplog.text
    with pytest.raises(OSError, match="no space"), training_ends(tmp_path):
        assert not list(tmp_path.iterdir())


def test_the_clock_of_the_training_host_may_be_late(tmp_path):
    end(tmp_path, ended=100.0)
    watch = EndOfTraining(tmp_path, None)
    assert not watch.poll()
    end(tmp_path, ended=200.0)
    assert watch.poll()
    assert watch.poll()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"ended": "now"}', '{"ended": null}'])
def test_a_foreign_marker_is_refused(tmp_path, text):
    (tmp_path / END_MARKER).write_text(text)
    refusal(ValueError, "is not a marker of the end of training", training_has_ended, tmp_path)


# --- between ranks -------------------------------------------------------------------------------


@pytest.fixture
def directory(comm, tmp_path):
    """A directory that is the same on all ranks."""
    return comm.broadcast_object(str(tmp_path))


def roles_of(size, *, inside):
    """A cluster and each rank's task; the evaluator is rank 0."""
    cluster = {"chief": ["c"], "worker": [f"w{index}" for index in range(size - 2)]}
    cluster = {job: tasks for job, tasks in cluster.items() if tasks}
    workers = [("worker", index) for index in range(size - 2)]
    return cluster | ({"evaluator": ["e"]} if inside else {}), [
        ("evaluator", 0),
        *workers,
        ("chief", 0),
    ]


def trainer(comm, directory, steps, *, together):
    """Save a value that depends on the ranks at each step; together: wait for its evaluation."""

    def train(strategy):
        with strategy.scope():
            variable = Variable(0.0)
        manager = CheckpointManager(Checkpoint(v=variable), directory, max_to_keep=None)
        for step in range(1, steps + 1):
            replica = strategy.communicator.rank
            variable.assign(strategy.reduce("sum", step + 100.0 * replica, axis=None))
            manager.save()
            if together:
                comm.barrier()
        return float(variable)

    return train


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("inside", [True, False], ids=["in the cluster", "outside of it"])
def test_an_evaluator_works_while_the_others_train(comm, monkeypatch, directory, inside):
    cluster, tasks = roles_of(comm.size, inside=inside)
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, *tasks[comm.rank]))
    if comm.rank == 0:
        end(directory, "earlier")
    comm.barrier()
    done = train_and_evaluate(
        trainer(comm, directory, 4, together=True),
        model_fn,
        directory,
        communicator=comm,
        poll_seconds=0.01,
        on_result=lambda _: comm.barrier(),
    )
    replicas = comm.size - 1
    others = 100 * replicas * (replicas - 1) / 2
    if comm.rank == 0:
        expected = [(step, 10 * (replicas * step + others)) for step in (1, 2, 3, 4)]
        assert (done.trained, seen(done.evaluations)) == (None, expected)
    else:
        assert done == (4 * replicas + others, [])
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_without_an_evaluator_all_evaluate_after_training(comm, directory):
    told = []
    done = train_and_evaluate(
        trainer(comm, directory, 2, together=False),
        model_fn,
        directory,
        communicator=comm,
        on_result=told.append,
    )
    others = 100 * comm.size * (comm.size - 1) / 2
    assert done.trained == 2 * comm.size + others
    assert seen(done.evaluations) == [(step, 10 * (comm.size * step + others)) for step in (1, 2)]
    assert told == done.evaluations


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_where_training_fails_the_evaluator_ends_all_the_same(comm, monkeypatch, directory):
    cluster, tasks = roles_of(comm.size, inside=True)
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, *tasks[comm.rank]))

    def failing(strategy):
        trainer(comm, directory, 2, together=False)(strategy)
        raise FloatingPointError("diverged")

    def call():
        return train_and_evaluate(
            failing, model_fn, directory, communicator=comm, poll_seconds=0.01
        )

    if comm.rank == 0:
        assert [each.step for each in call().evaluations] == [1, 2]
    else:
        refusal(FloatingPointError, "diverged", call)
    comm.barrier()
    told = json.loads(Path(directory, END_MARKER).read_text())
    assert told["failure"] == "FloatingPointError: diverged"


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_cluster_without_a_chief_is_refused_on_every_rank(comm, monkeypatch, directory):
    cluster = {"worker": [f"w{index}" for index in range(comm.size)]}
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, "worker", comm.rank))
    match = "a task of job 'chief' is needed"
    arguments = (ValueError, match, train_and_evaluate, None, model_fn, directory)
    same_refusal(comm, *arguments, communicator=comm)
    assert not os.listdir(directory)
    comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("unused", [None, {"worker": ["a", "b"]}])
def test_a_resolver_can_give_the_roles(comm, monkeypatch, directory, unused):
    """A TF_CONFIG that isn't used may name another cluster."""
    if unused and comm.rank == 0:
        monkeypatch.setenv("TF_CONFIG", tf_config(unused, "worker", 0))
    cluster, tasks = roles_of(comm.size, inside=True)
    role, index = tasks[comm.rank]
    resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=role, task_id=index)
    done = train_and_evaluate(
        trainer(comm, directory, 1, together=False),
        model_fn,
        directory,
        strategy_fn=lambda communicator: MultiWorkerMirroredStrategy(
            resolver, communicator=communicator
        ),
        communicator=comm,
        poll_seconds=0.01,
    )
    assert [each.step for each in done.evaluations] == ([1] if role == "evaluator" else [])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_evaluator_by_hand(comm, monkeypatch, directory):
    """As a script that branches on its role itself."""
    cluster, tasks = roles_of(comm.size, inside=True)
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, *tasks[comm.rank]))
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    if strategy.cluster_resolver.task_type == "evaluator":
        found = evaluate_checkpoints(model_fn, directory, strategy=strategy, poll_seconds=0.01)
        assert [each.step for each in found] == [1, 2, 3]
    else:
        with training_ends(directory, writes=strategy.is_chief):
            trainer(comm, directory, 3, together=False)(strategy)
    strategy.communicator.close()
    assert not strategies.has_strategy()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_parameter_server_serves_training_ranks(comm, monkeypatch, directory):
    """Chief and ps; of three ranks the last one evaluates."""
    roles = ["chief", "ps", "evaluator"][: comm.size]
    role = roles[comm.rank]
    monkeypatch.setenv("TF_CONFIG", tf_config({each: ["a"] for each in roles}, role, 0))

    def train(strategy):
        with strategy.scope():
            variable = Variable(0.5)
        variable.assign_add(comm.rank + 1.0)
        Checkpoint(v=variable).save(os.path.join(directory, "ckpt-1"))
        return role

    done = train_and_evaluate(
        train,
        model_fn,
        directory,
        strategy_fn=ParameterServerStrategy,
        communicator=comm,
        poll_seconds=0.01,
    )
    evaluates = role == ("chief" if comm.size == 2 else "evaluator")
    assert done.trained == ("chief" if role == "chief" else None)
    assert seen(done.evaluations) == ([(1, 15.0)] if evaluates else [])
    comm.barrier()


def test_what_a_model_function_must_return(tmp_path):
    for returned in ((3, print), (Checkpoint(v=Variable(0.0)), 3)):
        with pytest.raises(TypeError, match=r"model_fn returned a .*: must return a .*Checkpoint"):
            evaluate_checkpoints(lambda strategy, returned=returned: returned, tmp_path)


def test_a_strategy_of_another_package_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"strategy_fn returned a builtins\.object: must be a str"):
        train_and_evaluate(print, print, tmp_path, strategy_fn=lambda communicator: object())
