"""Numbered checkpoints: which are kept, which is the latest, and from where a program continues."""

import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from strategies import Variable, VariableAggregation, VariableSynchronization
from strategies.checkpoint import Checkpoint, CheckpointManager, latest_checkpoint
from strategies.checkpoint.tensor_file import PARTIAL
from tests.strategies.support import on_ranks, refusal, same_refusal


def names(directory):
    return sorted(os.listdir(directory))


def test_files_are_numbered_and_the_oldest_deleted(tmp_path):
    variable = Variable(0)
    manager = CheckpointManager(Checkpoint(v=variable), tmp_path, max_to_keep=3)
    assert (manager.latest_checkpoint, manager.checkpoints) == (None, [])
    for number in range(1, 6):
        variable.assign(number)
        assert manager.save() == str(tmp_path / f"ckpt-{number}.safetensors")
    assert names(tmp_path) == [f"ckpt-{number}.safetensors" for number in (3, 4, 5)]
    assert manager.checkpoints == [str(tmp_path / name) for name in names(tmp_path)]
    assert manager.latest_checkpoint == latest_checkpoint(tmp_path) == manager.checkpoints[-1]


@pytest.mark.parametrize("keep", [None, 0])
def test_all_can_be_kept(tmp_path, keep):
    manager = CheckpointManager(Checkpoint(v=Variable(0)), tmp_path, keep, checkpoint_name="a")
    for step in (0, 7, np.int32(7), Variable(100)):
        manager.save(step)
    assert names(tmp_path) == ["a-0.safetensors", "a-100.safetensors", "a-7.safetensors"]
    assert manager.checkpoints[-1] == str(tmp_path / "a-100.safetensors")


def test_a_restart_continues_after_the_last_checkpoint(tmp_path):
    variable = Variable(0)
    first = CheckpointManager(Checkpoint(v=variable), tmp_path, 2)
    assert first.restore_or_initialize() is None
    for step in (9, 10):
        variable.assign(step)
        first.save(step)
    Path(tmp_path, "other-99.safetensors").write_bytes(b"another program's")
    variable.assign(0)
    second = CheckpointManager(Checkpoint(v=variable), tmp_path, 2)
    assert second.restore_or_initialize() == str(tmp_path / "ckpt-10.safetensors")
    assert int(variable) == 10
    assert second.save() == str(tmp_path / "ckpt-11.safetensors")
    assert names(tmp_path) == [
        "ckpt-10.safetensors",
        "ckpt-11.safetensors",
        "other-99.safetensors",
    ]


def test_a_name_may_have_folders(tmp_path):
    checkpoint = Checkpoint(v=Variable(0))
    first = CheckpointManager(checkpoint, tmp_path, 1, checkpoint_name="run/ckpt")
    first.save()
    left = Path(tmp_path, f"run/.ckpt-0.safetensors.1{PARTIAL}")
    left.write_bytes(b"of a killed program")
    os.utime(left, (1, 1))
    second = CheckpointManager(checkpoint, tmp_path, 1, checkpoint_name="run/ckpt")
    assert second.restore_or_initialize() == str(tmp_path / "run/ckpt-1.safetensors")
    second.save()
    assert names(tmp_path / "run") == ["ckpt-2.safetensors"]


def test_a_step_back_is_refused(tmp_path):
    checkpoint = Checkpoint(v=Variable(0))
    CheckpointManager(checkpoint, tmp_path).save(10)
    manager = CheckpointManager(checkpoint, tmp_path)
    refusal(TypeError, "checkpoint is a Var.*: must be a", CheckpointManager, Variable(0), tmp_path)
    refusal(ValueError, "step=9: must be at least 10, the latest step in ", manager.save, 9)
    refusal(TypeError, "integer", manager.save, 10.5)
    refusal(ValueError, "max_to_keep=-1", CheckpointManager, checkpoint, tmp_path, -1)
    new = CheckpointManager(checkpoint, tmp_path / "new")
    refusal(ValueError, r"step=-1: must be at least 0$", new.save, -1)
    assert names(tmp_path) == ["ckpt-10.safetensors"]


def test_temporary_files_of_a_killed_program_are_deleted(tmp_path):
    left = tmp_path / ".ckpt-3.safetensors.0f.partial"
    others = [
        tmp_path / f".{name}-3.safetensors.0f.partial" for name in ("best", "ckpt-best", "1ckpt")
    ]
    # Of another rank, which saves without a strategy.
    written_now = tmp_path / ".ckpt-1.safetensors.1f.partial"
    for each in (left, *others, written_now):
        each.write_bytes(b"half")
        if each is not written_now:
            os.utime(each, (1, 1))
    manager = CheckpointManager(Checkpoint(v=Variable(0)), tmp_path)
    assert manager.latest_checkpoint is None
    manager.save()
    kept = [each.name for each in (*others, written_now)]
    assert names(tmp_path) == sorted([*kept, "ckpt-1.safetensors"])


def test_the_latest_of_a_directory(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "lacking") is None
    for name in ("ckpt-9.safetensors", "plain.safetensors", "notes.txt", ".ckpt-99.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-9.safetensors")
    (tmp_path / "ckpt-10.safetensors").write_bytes(b"")
    os.utime(tmp_path / "ckpt-10.safetensors", (1, 1))
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-10.safetensors")


def test_directories_and_dangling_links_are_no_checkpoints(tmp_path):
    (tmp_path / "ckpt-9.safetensors").mkdir()
    (tmp_path / "ckpt-8.safetensors").symlink_to(tmp_path / "lacking")
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "ckpt-7.safetensors").symlink_to(__file__)
    assert latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-7.safetensors")


def test_among_files_without_numbers_the_last_one_written_is_the_latest(tmp_path):
    for seconds, name in enumerate("bca"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
        os.utime(tmp_path / f"{name}.safetensors", (seconds, seconds % 2))
    assert latest_checkpoint(tmp_path) == str(tmp_path / "c.safetensors")


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0s_directory_counts(size, tmp_path):
    """The other ranks may run on hosts without access to the directory."""

    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable = Variable(rank + 4.0)
        mine = tmp_path if rank == 0 else f"/nowhere/{rank}"
        manager = CheckpointManager(Checkpoint(v=variable), mine, 1)
        paths = [manager.save(), manager.save(8), manager.latest_checkpoint]
        variable.assign(0.0)
        again = CheckpointManager(Checkpoint(v=variable), mine)
        return [*paths, again.restore_or_initialize()], float(variable)

    expected = [str(tmp_path / f"ckpt-{step}.safetensors") for step in (1, 8, 8, 8)]
    assert on_ranks(size, body) == [(expected, 4.0)] * size
    assert names(tmp_path) == ["ckpt-8.safetensors"]


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0s_arguments_count(size, tmp_path):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            checkpoint = Checkpoint(v=Variable(0))
        name = f"of_{rank}"
        manager = CheckpointManager(checkpoint, tmp_path, 1 - 2 * rank, checkpoint_name=name)
        paths = [manager.save(7 - 4 * rank), manager.latest_checkpoint]
        refusal(ValueError, "step=6: must be at least 7", manager.save, 6 + rank)
        refusal(ValueError, "max_to_keep=-1", CheckpointManager, checkpoint, tmp_path, rank - 1)
        for lost in ("", ".run", "run/", "run/..", "a\nb"):
            make = partial(CheckpointManager, checkpoint, tmp_path, checkpoint_name=lost)
            refusal(ValueError, "must end in the name of a file", make)
        return [*paths, manager.save(8), *manager.checkpoints]

    expected = [str(tmp_path / f"of_0-{step}.safetensors") for step in (7, 7, 8, 8)]
    assert on_ranks(size, body) == [expected] * size
    assert names(tmp_path) == ["of_0-8.safetensors"]


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_between_ranks(comm, strategy, tmp_path):
    directory = comm.broadcast_object(str(tmp_path))
    with strategy.scope():
        variable = Variable(comm.rank + 1.0)
    manager = CheckpointManager(Checkpoint(v=variable), directory, 2)
    paths = [manager.save() for _ in range(3)]
    assert manager.checkpoints == paths[1:]
    with strategy.scope():
        # Each rank has a part of its value.
        rules = VariableSynchronization.ON_READ, VariableAggregation.SUM
        steps = Variable(2, synchronization=rules[0], aggregation=rules[1])
    paths.append(manager.save(steps))
    assert paths[-1].endswith(f"-{int(steps.numpy())}.safetensors")
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(directory)
        Path(directory).write_bytes(b"no directory any more")
    comm.barrier()
    same_refusal(comm, FileExistsError, "File exists", manager.save)
    assert manager.checkpoints == paths[2:]
