"""Checkpoints between ranks: what is saved and restored, and the same error on all ranks."""

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from strategies import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    metrics,
    optimizers,
)
from strategies.checkpoint import Checkpoint, CheckpointError
from tests.strategies.support import lone_strategy, on_ranks, refusal, same_refusal


def on_read(value, aggregation="SUM"):
    return Variable(
        value,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation[aggregation],
    )


@pytest.fixture
def path(comm, tmp_path):
    """A path that is the same on all ranks."""
    return os.path.join(comm.broadcast_object(str(tmp_path)), "state.safetensors")


# --- between MPI ranks ---------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3, 5)
def test_saved_state_is_restored_on_every_rank(comm, strategy, path):
    with strategy.scope():
        weights = Variable(np.arange(6.0).reshape(2, 3) + comm.rank)
        bias = Variable(np.ones(3, ml_dtypes.bfloat16))
        own = Variable(100.0 + comm.rank)
    checkpoint = Checkpoint(model={"weights": weights, "bias": bias}, others=[own])
    assert checkpoint.save(path) == path
    saved = load_file_exactly(path)
    np.testing.assert_array_equal(saved["model/weights"], np.arange(6.0).reshape(2, 3))
    assert sorted(saved) == ["model/weights", "others/0"]
    for variable in (weights, bias, own):
        variable.assign(np.zeros(variable.shape))
    checkpoint.restore(path)
    np.testing.assert_array_equal(weights.numpy(), np.arange(6.0).reshape(2, 3))
    assert bias.numpy().tolist() == [1, 1, 1]
    assert (bias.dtype, float(own)) == (ml_dtypes.bfloat16, 100.0)


def load_file_exactly(path):
    """The content for another safetensors reader, without bfloat16, which it doesn't support."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys() if "bias" not in name}  # noqa: SIM118


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_on_read_saves_the_aggregate_once(comm, strategy, path, aggregation):
    with strategy.scope():
        variable = on_read(0.0, aggregation)
    strategy.run(variable.assign, (comm.rank + 1.0,))
    aggregate = float(variable)
    Checkpoint(v=variable).save(path)
    assert load_file(path)["v"] == aggregate
    strategy.run(variable.assign, (50.0 + comm.rank,))
    Checkpoint(v=variable).restore(path)
    assert float(variable) == pytest.approx(aggregate)
    share = aggregate / comm.size if aggregation == "SUM" else aggregate
    assert float(strategy.run(variable.read_value)) == pytest.approx(share)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_restored_metrics_continue(comm, strategy, path):
    with strategy.scope():
        mean, other = metrics.Mean(), metrics.Mean()
    strategy.run(mean.update_state, (np.arange(comm.rank + 1.0),))
    before = mean.result()
    Checkpoint(mean=mean).save(path)
    assert sorted(load_file(path)) == ["mean/count", "mean/total"]
    Checkpoint(mean=other).restore(path)
    assert other.result() == pytest.approx(before)
    for each in (mean, other):
        strategy.run(each.update_state, (100.0 * comm.rank,))
    assert other.result() == pytest.approx(mean.result())


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_rank_0s_path_counts(comm, strategy, path):
    with strategy.scope():
        variable = Variable(1.5)
    mine = path if comm.rank == 0 else f"/nowhere/{comm.rank}"
    assert Checkpoint(v=variable).save(mine) == path
    variable.assign(0.0)
    Checkpoint(v=variable).restore(mine)
    assert float(variable) == 1.5


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_rank_0s_failure_to_write_is_every_ranks(comm, strategy, path):
    with strategy.scope():
        checkpoint = Checkpoint(v=Variable(float(comm.rank)))
    if comm.rank == 0:
        Path(path).mkdir()
    comm.barrier()
    text = same_refusal(comm, IsADirectoryError, "Is a directory", checkpoint.save, path)
    assert path in text
    assert os.listdir(os.path.dirname(path)) == ["state.safetensors"]
    comm.barrier()
    assert checkpoint.save(path + "2") == path + "2.safetensors"


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_missing_file_is_missed_on_every_rank(comm, strategy, path):
    with strategy.scope():
        variable = Variable(2.5)
    text = same_refusal(
        comm, FileNotFoundError, "No such file", Checkpoint(v=variable).restore, path
    )
    assert path in text
    assert float(variable) == 2.5


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("content", ["half", "foreign", "flipped"])
def test_a_bad_file_is_refused_on_every_rank(comm, strategy, path, content):
    with strategy.scope():
        variable, other = Variable(1.5), Variable([1.0, 2.0])
    checkpoint = Checkpoint(v=variable, w=other)
    checkpoint.save(path)
    if comm.rank == 0:
        whole = Path(path).read_bytes()
        flipped = whole[:-1] + bytes([whole[-1] ^ 1])
        Path(path).write_bytes(
            {"half": whole[:-8], "foreign": b"text", "flipped": flipped}[content]
        )
    variable.assign(7.0)
    text = same_refusal(comm, CheckpointError, "incomplete|checksum", checkpoint.restore, path)
    assert text.startswith(path)
    assert float(variable) == 7.0
    checkpoint.save(path)
    checkpoint.restore(path)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_nothing_is_changed_where_one_tensor_does_not_fit(comm, strategy, path):
    with strategy.scope():
        Checkpoint(a=Variable(1.0), b=Variable([1.0, 2.0])).save(path)
        first, second = Variable(7.0), Variable([7.0, 7.0, 7.0])
    checkpoint = Checkpoint(a=first, b=second)
    text = same_refusal(comm, CheckpointError, "does not fit", checkpoint.restore, path)
    assert text == f"{path} does not fit:\n  b: float32 of shape (2,), wanted float32 of shape (3,)"
    assert (float(first), second.numpy().tolist()) == (7.0, [7.0] * 3)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_with_different_objects_raise_the_same_error(comm, strategy, path):
    with strategy.scope():
        things = {"a": Variable(1.0), "b": Variable(2.0)}
    if comm.rank == 1:
        things["c"] = things.pop("b")
    checkpoint = Checkpoint(**things)
    for call in (checkpoint.save, checkpoint.restore):
        text = same_refusal(comm, ValueError, "some ranks have states that others lack", call, path)
        assert "rank 0: b (variable 1)\n  rank 1: c (variable 1)" in text
    with strategy.scope():
        pair = [optimizers.SGD(0.1) for _ in range(2)]
    for each in pair:
        strategy.run(each.apply_gradients, args=([(np.ones(()), things["a"])],))
    other = Checkpoint(a=things["a"], o=pair[comm.rank == 1])
    text = same_refusal(comm, ValueError, "states that others lack", other.save, path)
    assert "rank 0: o (optimizer 0)\n  rank 1: o (optimizer 1)" in text
    names = ["a", "b"] if comm.rank == 1 else ["b", "a"]
    swapped = Checkpoint(**dict(zip(names, things.values(), strict=True)))
    for call in (swapped.save, swapped.restore):
        text = same_refusal(comm, ValueError, "some ranks have states that others lack", call, path)
        assert "rank 0: a (variable 1), b (variable 0)\n  rank 1: a (variable 0)" in text
    assert not os.path.exists(path)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_only_one_ranks_shape_does_not_fit(comm, strategy, path):
    """Variables of the default strategy belong to each process, and may differ."""
    with strategy.scope():
        common = Variable(1.0)
    own = Variable(np.zeros(2 if comm.rank == 1 else 3))
    Checkpoint(a=common, own=own).save(path)
    common.assign(5.0)
    text = same_refusal(comm, CheckpointError, "own: ", Checkpoint(a=common, own=own).restore, path)
    assert text.endswith("own: float64 of shape (3,), wanted float64 of shape (2,)")
    assert float(common) == 5.0


class Doubled:
    """A user's own state, of which every rank has a part."""

    def __init__(self, comm, length):
        self.comm, self.part = comm, np.array_split(np.arange(float(length)), comm.size)[comm.rank]

    def saved_tensors(self):
        return {"": self.comm.all_gather(self.part), "sizes/all": np.array([self.comm.size])}

    def restore_tensors(self, tensors):
        self.part = np.array_split(tensors[""], self.comm.size)[self.comm.rank]

    def check_tensors(self, tensors):
        if "" not in tensors:
            raise ValueError("has no whole")


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_the_protocol_saves_the_whole_of_what_is_split(comm, strategy, path):
    with strategy.scope():
        variable = Variable(1.0)
    split = Doubled(comm, 7)
    Checkpoint(split=split, v=variable).save(path)
    saved = load_file(path)
    assert sorted(saved) == ["split", "split/sizes/all", "v"]
    assert saved["split"].tolist() == list(range(7))
    own, split.part = split.part, None
    Checkpoint(split=split, v=variable).restore(path)
    assert split.part.tolist() == own.tolist()
    Checkpoint(v=variable).save(path)
    text = same_refusal(
        comm, CheckpointError, "does not fit", Checkpoint(split=split, v=variable).restore, path
    )
    assert text.endswith("split: has no whole")


# --- on threads, or alone ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads_as_ranks(size, tmp_path):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable, total = Variable([rank + 1.0, 2.0]), on_read(0)
        strategy.run(total.assign, (rank + 5,))
        checkpoint = Checkpoint(v=variable, total=total)
        path = checkpoint.save(tmp_path / "state")
        variable.assign([0.0, 0.0])
        checkpoint.restore(path)
        return path, variable.numpy().tolist()

    expected = (str(tmp_path / "state.safetensors"), [1.0, 2.0])
    assert on_ranks(size, body) == [expected] * size
    assert load_file(expected[0])["total"] == sum(range(5, 5 + size))


def test_without_any_strategy(tmp_path):
    variable = Variable([1, 2])
    path = Checkpoint(v=variable).save(str(tmp_path / "new" / "state"))
    variable.assign([0, 0])
    Checkpoint(v=variable).restore(tmp_path / "new" / "state")
    assert variable.numpy().tolist() == [1, 2]
    assert Path(path).parent == tmp_path / "new"


def test_a_path_names_a_file(tmp_path):
    number = Variable(1.0)
    written = Checkpoint(number=number).save(os.fsencode(tmp_path / "bytes"))
    assert written == f"{tmp_path}/bytes.safetensors"
    number.assign(2.0)
    Checkpoint(number=number).restore(os.fsencode(tmp_path / "bytes"))
    assert number.numpy() == 1.0
    for path in ("", f"{tmp_path}/"):
        refusal(ValueError, "must end in the name of a file", Checkpoint(number=number).save, path)


def test_a_renamed_file_without_the_suffix_is_found(tmp_path):
    variable = Variable(3.0)
    path = Checkpoint(v=variable).save(tmp_path / "state")
    os.rename(path, tmp_path / "best")
    variable.assign(0.0)
    Checkpoint(v=variable).restore(tmp_path / "best")
    assert float(variable) == 3.0


@pytest.mark.parametrize("size", [1, 2])
def test_where_there_is_no_checkpoint_nothing_changes(size, tmp_path):
    """The idiom `checkpoint.restore(latest_checkpoint(directory))`; rank 0's path is used."""

    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable = Variable(2.5)
        Checkpoint(v=variable).restore(None if rank == 0 else tmp_path / "other")
        return float(variable)

    assert on_ranks(size, body) == [2.5] * size


@pytest.mark.parametrize(
    ("things", "line"),
    [
        ({"a": Variable(1.0)}, "b/0: is in the file, but not in this Checkpoint"),
        (
            {"a": Variable(1.0), "b": [Variable(1)], "c": Variable(0)},
            "c: is missing",
        ),
        ({"a": Variable(1.0), "b": Variable(1)}, "b: is missing"),
        (
            {"a": Variable(1), "b": [Variable(1)]},
            "a: float32 of shape (), wanted int32 of shape ()",
        ),
        (
            {"a": Variable([1.0]), "b": [Variable(1)]},
            "a: float32 of shape (), wanted float32 of shape (1,)",
        ),
        (
            {"a": Variable(np.float64(1)), "b": [Variable(1)]},
            "a: float32 of shape (), wanted float64 of shape ()",
        ),
    ],
)
def test_what_does_not_fit_is_named(things, line, tmp_path):
    path = Checkpoint(a=Variable(2.5), b=[Variable(3)]).save(tmp_path / "state")
    text = refusal(CheckpointError, "does not fit", Checkpoint(**things).restore, path)
    assert text.startswith(f"{path} does not fit:\n  ")
    assert f"\n  {line}" in text


def test_a_part_can_be_expected(tmp_path):
    path = Checkpoint(a=Variable(2.5), b=[Variable(3)]).save(tmp_path / "state")
    variable = Variable(0.0)
    Checkpoint(a=variable).restore(path, expect_partial=True)
    assert float(variable) == 2.5
    missing = Checkpoint(a=variable, c=Variable(1))
    refusal(CheckpointError, "c: is missing", missing.restore, path, expect_partial=True)


def test_what_is_named_later_is_saved_too(tmp_path):
    checkpoint = Checkpoint(a=Variable(1.0))
    checkpoint.b, checkpoint.a = [Variable(2.0)], Variable(5.0)
    saved = load_file(checkpoint.save(tmp_path / "state"))
    assert {name: float(array) for name, array in saved.items()} == {"a": 5.0, "b/0": 2.0}
    refusal(TypeError, "c is a float: must be a Variable", setattr, checkpoint, "c", 1.5)
    assert not hasattr(checkpoint, "c")


@pytest.mark.parametrize("thing", [{"w": np.ones(3)}, object.__new__(type("Net", (), {})), [[]]])
def test_of_what_holds_no_state_nothing_would_be_saved(thing, tmp_path):
    checkpoint = Checkpoint(v=Variable(1.0), thing=thing)
    refusal(
        ValueError, "thing is a .* without state: must contain", checkpoint.save, tmp_path / "state"
    )
    assert not list(tmp_path.iterdir())


def test_what_is_shared_holds_state_and_what_is_empty_may(tmp_path):
    variable = Variable(1.0)
    path = Checkpoint(v=variable, also={"w": variable}, none=[]).save(tmp_path / "state")
    assert list(load_file(path)) == ["v"]


def test_without_a_way_to_aggregate_nothing_can_be_saved(tmp_path):
    strategy = lone_strategy()
    with strategy.scope():
        checkpoint = Checkpoint(v=on_read(1.0, "NONE"))
    refusal(ValueError, "aggregation NONE", checkpoint.save, tmp_path / "state")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["save", "restore"])
def test_inside_run_it_is_refused(call, tmp_path):
    strategy = lone_strategy()
    with strategy.scope():
        checkpoint = Checkpoint(v=Variable(1.0))
    match = f"Checkpoint.{call} requires a cross-replica context"
    refusal(RuntimeError, match, strategy.run, getattr(checkpoint, call), (tmp_path / "state",))


def test_variables_of_two_strategies_are_refused(tmp_path):
    variables = []
    for strategy in (lone_strategy(), lone_strategy()):
        with strategy.scope():
            variables.append(Variable(1.0))
    checkpoint = Checkpoint(v=variables)
    refusal(ValueError, "variables of several strategies", checkpoint.save, tmp_path / "state")
    mixed = Checkpoint(v=variables[0], own=Variable(2.0))
    assert mixed.communicator is variables[0].strategy.communicator


def test_what_can_not_be_written_is_refused_everywhere(tmp_path):
    class Text:
        def saved_tensors(self):
            return {"": np.array("text")}

        def restore_tensors(self, tensors):
            raise AssertionError

    def body(strategy):
        with strategy.scope():
            checkpoint = Checkpoint(v=Variable(1.0), t=Text())
        return refusal(TypeError, "t has dtype <U4", checkpoint.save, tmp_path / "state")

    assert len(set(on_ranks(2, body))) == 1
