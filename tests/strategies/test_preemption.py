"""All ranks save a checkpoint at the same step and exit, once one of them is to be terminated."""

import os
import signal
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import MismatchError
from strategies import Checkpoint, CheckpointManager, Variable, latest_checkpoint
from strategies.checkpoint import preemption
from strategies.experimental import PreemptionCheckpointHandler, TerminationConfig
from tests.strategies.support import refusal, same_refusal, strategy_of

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]


@pytest.fixture
def directory(comm, tmp_path):
    return comm.broadcast_object(str(tmp_path))


class Training:
    """One number that each step increases; the handler's program."""

    def __init__(self, strategy, directory, config=None, manager=None):
        with strategy.scope():
            self.number = Variable(0.0, name="number")
        checkpoint = Checkpoint(number=self.number)
        given = (checkpoint, directory) if manager is None else (manager(checkpoint), None)
        self.handler = PreemptionCheckpointHandler(None, *given, config)

    def step(self, then=lambda: None):
        self.number.assign_add(1.0)
        then()
        return float(self.number)


def to_itself(number):
    return lambda: os.kill(os.getpid(), number)


def test_all_ranks_save_after_the_step_of_the_signal_and_go_on_there(comm, directory):
    """The signal comes to one rank; by default the program exits with 42, on all ranks."""
    before = signal.getsignal(signal.SIGTERM)
    with strategy_of(comm) as strategy:
        training = Training(strategy, directory)
        with training.handler as handler:
            assert [handler.run(training.step) for _ in range(3)] == [1, 2, 3]
            assert latest_checkpoint(directory) is None
            last = comm.rank == comm.size - 1
            with pytest.raises(SystemExit) as ended:
                handler.run(training.step, to_itself(signal.SIGTERM) if last else lambda: None)
        assert ended.value.code == 42
        assert signal.getsignal(signal.SIGTERM) is before
        comm.barrier()
        assert latest_checkpoint(directory).endswith("ckpt-4.safetensors")
        with Training(strategy, directory).handler as handler:
            assert handler.total_run_calls == 4
        restored = Training(strategy, directory)
        assert restored.handler.run(restored.step) == 5
        assert restored.handler.total_run_calls == 5
        restored.handler.close()


FORKING = """
import multiprocessing, os, signal, sys, time
from strategies import Checkpoint, CheckpointManager, Variable
from strategies.experimental import PreemptionCheckpointHandler, TerminationConfig

def work(pipe):
    pipe.send("ready")
    while True:
        time.sleep(1)
        pipe.send("working")

def start():
    here, there = multiprocessing.Pipe()
    process = forking.Process(target=work, args=(there,), daemon=True)
    process.start()
    assert here.recv() == "ready"
    return process, here

def save():
    while pipe.poll():
        pipe.recv()
    assert pipe.recv() == "working"  # after the signal
    if number == signal.SIGTERM:
        # Not by its launcher: it has had its notice.
        process.terminate()
        process.join()
    manager.save()

if os.getpgrp() != os.getpid():  # MPICH's launcher has made a group
    os.setpgrp()
forking = multiprocessing.get_context("fork")
number = signal.Signals[sys.argv[2]]
manager = CheckpointManager(Checkpoint(number=Variable(0.0)), sys.argv[1], 1)
config = TerminationConfig(save_fn=save, signals=(signal.SIGTERM, number))
handler = PreemptionCheckpointHandler(None, manager, None, config)
process, pipe = start()
process.terminate()
process.join()
assert process.exitcode == -signal.SIGTERM
# Python terminates it at the exit of the program, and waits for its end.
process, pipe = start()
handler.run(os.killpg, 0, number)
"""


@pytest.mark.ranks(1)
@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
def test_a_forked_process_works_until_its_rank_has_saved(launch, tmp_path, number):
    """The signal is sent to the group of processes, as launchers do."""
    ended = launch(1, [sys.executable, "-c", FORKING, str(tmp_path), number], timeout=30)
    assert ended.returncode == 42, ended.stderr
    assert latest_checkpoint(tmp_path) is not None


def test_a_grace_period_is_used_for_training(comm, directory, monkeypatch):
    """A checkpoint after the notice, and another one when there is time for no more."""
    saved, clock = [], SimpleNamespace(now=1.0)
    monkeypatch.setattr(preemption, "time", SimpleNamespace(monotonic=lambda: clock.now))
    config = TerminationConfig(
        exit_fn=lambda: sys.exit(7), grace_period=0.6, signals=[signal.SIGUSR1]
    )

    class Manager(CheckpointManager):
        def save(self, step=None):
            saved.append((step, clock.now))
            clock.now += 0.1  # the time that the last checkpoint must be left
            return super().save(step)

    with strategy_of(comm) as strategy:
        training = Training(strategy, None, config, lambda each: Manager(each, directory))

        def train(handler):
            for step in range(5_000):
                told = step == 2 and comm.rank == 0
                clock.now += 0.01
                handler.run(training.step, to_itself(signal.SIGUSR1) if told else lambda: None)

        with training.handler as handler, pytest.raises(SystemExit) as ended:
            train(handler)
        assert ended.value.code == 7
        assert float(training.number) == handler.total_run_calls
    (first, told_at), (second, saved_at) = saved
    assert first == 3
    assert second == handler.total_run_calls > 4
    assert saved_at < told_at + 0.6 - 0.1
    assert len(set(comm.all_gather_object(second))) == 1


def test_checkpoints_of_the_programs_own_stay(comm, directory):
    """A number of its own, though the program numbers others, and never calls `run`."""
    told = [False]
    config = TerminationConfig(lambda: told[0], exit_fn=lambda: None)
    with strategy_of(comm) as strategy:
        training = Training(strategy, None, config, lambda each: CheckpointManager(each, directory))
        with training.handler as handler:
            handler._manager.save(1000)
            training.step()
            told[0] = True
            handler.save_checkpoint_if_preempted()
            assert [each[-16:-12] for each in handler._manager.checkpoints] == ["1000", "1001"]


def test_a_watcher_and_functions_of_ones_own(comm, directory):
    """Without an exit the training continues, and the next notice is one of its own."""
    calls, told = [], [False]
    config = TerminationConfig(
        lambda: told[0], lambda: calls.append("exit"), save_fn=lambda *args: calls.append(args)
    )
    with strategy_of(comm) as strategy, Training(strategy, directory, config).handler as handler:
        for step in range(4):
            told[0] = step in (1, 3) and comm.rank == 0
            handler.run(lambda: None)
            handler.save_checkpoint_if_preempted("given")
        told[0] = True
        handler.save_checkpoint_if_preempted("given")
    assert calls == [(), "exit", ("given",), "exit"] * 2 + [("given",), "exit"]


def test_a_watcher_that_fails_is_reported_on_all_ranks(comm, directory):
    def watch():
        if comm.rank == comm.size - 1:
            raise ValueError("no such service")
        return False

    with strategy_of(comm) as strategy:
        config = TerminationConfig(termination_watcher_fn=watch)
        with (
            Training(strategy, directory, config).handler as handler,
            pytest.raises(Exception, match="no such service"),
        ):
            handler.run(lambda: None)
        assert strategy.reduce("sum", np.ones(1), axis=None) == comm.size


def test_what_is_refused(comm, directory):
    with strategy_of(comm) as strategy:
        checkpoint = Checkpoint(number=Variable(0.0))
        manager = CheckpointManager(checkpoint, directory)
        make = PreemptionCheckpointHandler
        refusal(ValueError, "checkpoint_dir=None: must be the dir", make, None, checkpoint)
        refusal(ValueError, "must be None, the manager has one", make, None, manager, directory)
        same_refusal(comm, TypeError, "dict: must be a Checkpoint or a C", make, None, {})
        odd = comm.rank == 1
        for config in (
            TerminationConfig(grace_period=1.0 + odd),
            TerminationConfig(exit_fn=print if odd else None),
            TerminationConfig(save_fn=print if odd else None),
            TerminationConfig(grace_period="30" if odd else None),
            TerminationConfig(exit_fn=5 if odd else None),
        ):
            if comm.size > 1:
                call = partial(make, None, manager, communicator=comm, termination_config=config)
                wrong = config.grace_period == "30" or config.exit_fn == 5
                wrong = comm.all_gather_object(wrong)[1]
                error = TypeError if wrong else ValueError
                text = "grace_period='30': must|exit_fn=5: must" if wrong else "tions differ"
                same_refusal(comm, error, text, call)
        if comm.size > 1:
            # Also where the checkpoint has another communicator, which makes no call then.
            for error, *given in (
                (TypeError, {} if odd else manager),
                (ValueError, checkpoint, None if odd else directory),
                (ValueError, manager, None, TerminationConfig(signals=(9,) if odd else ())),
                (ValueError, manager, None, TerminationConfig(signals=(999,) if odd else ())),
            ):
                call = partial(make, None, *given, communicator=comm)
                same_refusal(comm, error, "must be|can't be handled", call)
            with strategy.scope():
                distributed = Checkpoint(number=Variable(0.0))
                for call in (
                    partial(make, None, {} if odd else distributed, directory),
                    partial(CheckpointManager, {} if odd else distributed, directory),
                ):
                    same_refusal(comm, MismatchError, "refused by TypeError: .*must be a", call)
            call = partial(make, None, distributed, directory if odd else None)
            same_refusal(comm, ValueError, "checkpoint_dir=None", call)
