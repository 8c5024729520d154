"""Checkpoints saved by some number of ranks and restored by another, in programs under mpirun.

Also of optimizers, whose slots may not exist yet when they are restored.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from strategies import Variable, optimizers
from strategies.checkpoint import Checkpoint, CheckpointError
from tests.slow import slow
from tests.strategies.support import lone_strategy, on_ranks, refusal
from tests.worlds.programs import ROOT, run_program

PROGRAM = [sys.executable, str(Path(__file__).with_name("checkpoint_program.py"))]


def ended(mode, path, ranks):
    """The program's final values on so many ranks; None: without mpirun and without a strategy."""
    if ranks is None:
        done = subprocess.run(
            [*PROGRAM, mode, path, "none"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": str(ROOT)},
        )
    else:
        done = run_program(ranks, [*PROGRAM, mode, path], timeout=90)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(line)


def assert_close(one, other):
    assert one["steps"] == other["steps"]
    assert one["seen"] == other["seen"] == 60
    for key in ("restored", "layers"):
        for array, wanted in zip(one[key], other[key], strict=True):
            np.testing.assert_allclose(array, wanted, rtol=0, atol=1e-12)
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)


@pytest.mark.parametrize("saved_by", [2, *slow(4, None)])
def test_any_number_of_ranks_restores_what_any_other_saved(saved_by, tmp_path):
    path = str(tmp_path / "state.safetensors")
    uninterrupted = ended("save", path, saved_by)
    assert uninterrupted["steps"] == [5, 5]
    for ranks in {4: (1, 3, None), 2: (2, 3), None: (None, 2)}[saved_by]:
        restarted = ended("restore", path, ranks)
        assert_close(restarted, uninterrupted)
        if ranks == saved_by:
            assert restarted == uninterrupted


# --- optimizers ----------------------------------------------------------------------------------

NOT_TAKEN = "is in the file, but not in the program"

MAKERS = {
    "sgd": lambda: optimizers.SGD(0.5),
    "momentum": lambda: optimizers.SGD(0.5, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.5),
}


class Training:
    """Two variables and an optimizer of one strategy."""

    def __init__(self, strategy, make, start=0.0):
        self.strategy = strategy
        with strategy.scope():
            self.variables = [Variable(np.full(2, start)), Variable(start + 1)]
            self.optimizer = make()
        self.checkpoint = Checkpoint(variables=self.variables, optimizer=self.optimizer)

    def train(self, *numbers):
        def step(number):
            share = self.strategy.communicator.rank + 1.0
            gradients = [np.array([1.0, number]) * share, number * share]
            self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

        for number in numbers:
            self.strategy.run(step, (number,))
        return [each.numpy().tobytes() for each in self.variables]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_continues_bit_for_bit(name, stepped, size, tmp_path):
    def body(strategy):
        first = Training(strategy, MAKERS[name])
        first.train(1, 2, 3)
        path = first.checkpoint.save(tmp_path / "state")
        expected = first.train(4, 5)
        second = Training(strategy, MAKERS[name], start=9.0)
        if stepped:
            second.train(7, 8)
        second.checkpoint.restore(path)
        return second.train(4, 5) == expected, second.optimizer.iterations

    assert on_ranks(size, body) == [(True, 5)] * size


@pytest.mark.parametrize("name", MAKERS)
def test_what_was_restored_can_be_saved_before_the_first_step(name, tmp_path):
    strategy = lone_strategy()
    first = Training(strategy, MAKERS[name])
    first.train(1, 2)
    path = first.checkpoint.save(tmp_path / "state")
    second = Training(strategy, MAKERS[name])
    second.checkpoint.restore(path)
    again = second.checkpoint.save(tmp_path / "again")
    assert Path(again).read_bytes() == Path(path).read_bytes()
    assert second.train(3) == first.train(3)


@pytest.mark.parametrize("name", MAKERS)
def test_slots_are_reset_where_none_were_saved(name, tmp_path):
    strategy = lone_strategy()
    path = Training(strategy, MAKERS[name]).checkpoint.save(tmp_path / "state")
    stepped = Training(strategy, MAKERS[name])
    stepped.train(5, 6)
    stepped.checkpoint.restore(path)
    assert stepped.optimizer.iterations == 0
    assert stepped.train(1, 2) == Training(strategy, MAKERS[name]).train(1, 2)


@pytest.mark.parametrize(
    ("saved", "restored", "line"),
    [
        (
            "adam",
            "momentum",
            "optimizer/slots_of/variables/0/mean: is in the file, but not in the program",
        ),
        ("momentum", "sgd", "optimizer/slots_of/variables/1/velocity: is in the file"),
    ],
)
@pytest.mark.parametrize("stepped", [False, True])
def test_another_optimizers_slots_are_refused(saved, restored, line, stepped, tmp_path):
    strategy = lone_strategy()
    first = Training(strategy, MAKERS[saved])
    first.train(1)
    path = first.checkpoint.save(tmp_path / "state")
    second = Training(strategy, MAKERS[restored])
    if stepped:
        second.train(1)
    before = second.train()
    text = refusal(CheckpointError, "does not fit", second.checkpoint.restore, path)
    assert line in text
    assert second.train() == before


def test_slots_of_another_shape_are_refused(tmp_path):
    strategy = lone_strategy()
    with strategy.scope():
        variables = [Variable(np.zeros(2)), Variable(np.zeros(3))]
        forth, back = optimizers.Adam(), optimizers.Adam()
    pairs = [(np.ones(each.shape), each) for each in variables]
    strategy.run(forth.apply_gradients, (pairs,))
    strategy.run(back.apply_gradients, (pairs[::-1],))
    path = Checkpoint(optimizer=forth).save(tmp_path / "state")
    text = refusal(CheckpointError, "does not fit", Checkpoint(optimizer=back).restore, path)
    assert "optimizer/slots/0/mean: float64 of shape (2,), wanted float64 of shape (3,)" in text


class Alternating:
    """Two variables of one shape, trained in turn; `named`: the checkpoint includes them."""

    def __init__(self, make, named):
        self.strategy = lone_strategy()
        with self.strategy.scope():
            self.variables, self.optimizer = [Variable([0.0]), Variable([0.0])], make()
        held = {"variables": self.variables} if named else {}
        self.checkpoint = Checkpoint(optimizer=self.optimizer, **held)

    def train(self, *steps):
        for step in steps:
            pairs = [(np.array([1.0 + step]), self.variables[step % 2])]
            self.strategy.run(self.optimizer.apply_gradients, (pairs,))
        return [float(each[0]) for each in self.variables]


@pytest.mark.parametrize("name", ["momentum", "adam"])
@pytest.mark.parametrize("stepped", [(), (1,), (0, 1)])
def test_slots_are_restored_to_their_variables_in_any_order_of_updates(name, stepped, tmp_path):
    first = Alternating(MAKERS[name], named=True)
    first.train(0, 1, 2)
    path = first.checkpoint.save(tmp_path / "state")
    second = Alternating(MAKERS[name], named=True)
    second.train(*stepped)
    second.checkpoint.restore(path)
    again = second.checkpoint.save(tmp_path / "again")
    assert Path(again).read_bytes() == Path(path).read_bytes()
    assert second.train(3, 4, 5) == first.train(3, 4, 5)


def test_slots_of_variables_that_are_not_named_are_numbered_among_themselves(tmp_path):
    strategy = lone_strategy()

    def made():
        with strategy.scope():
            named, other = Variable([0.0]), Variable([0.0])
            optimizer = optimizers.SGD(1.0, momentum=0.5)
        return named, other, optimizer, Checkpoint(**{"a\nname": named}, optimizer=optimizer)

    def step(optimizer, *pairs):
        strategy.run(optimizer.apply_gradients, ([(np.array([g]), v) for g, v in pairs],))

    named, other, optimizer, checkpoint = made()
    step(optimizer, (1.0, named), (10.0, other))
    path = checkpoint.save(tmp_path / "state")
    assert sorted(load_file(path))[-2:] == [
        "optimizer/slots/0/velocity",
        "optimizer/slots_of/a\nname/velocity",
    ]
    named, other, optimizer, checkpoint = made()
    checkpoint.restore(path)
    step(optimizer, (0.0, other), (0.0, named))
    assert (float(named[0]), float(other[0])) == (-1.5, -5.0)

    # The named one is updated for the first time after the restore, before the other.
    named, other, optimizer, checkpoint = made()
    step(optimizer, (10.0, other))
    path = checkpoint.save(tmp_path / "state")
    named, other, optimizer, checkpoint = made()
    checkpoint.restore(path)
    step(optimizer, (1.0, named), (0.0, other))
    assert (float(named[0]), float(other[0])) == (-1.0, -5.0)


def test_slots_of_a_variable_that_is_not_here_are_refused(tmp_path):
    path = Alternating(MAKERS["momentum"], named=True)
    path.train(0)
    path = path.checkpoint.save(tmp_path / "state")
    lone = Checkpoint(optimizer=MAKERS["momentum"]())
    text = refusal(CheckpointError, "does not fit", lone.restore, path, expect_partial=True)
    assert text.endswith("optimizer/slots_of/variables/0/velocity: " + NOT_TAKEN)


@pytest.mark.parametrize("stepped", [False, True])
def test_slots_of_another_shape_than_the_named_variables_are_refused(stepped, tmp_path):
    strategy = lone_strategy()
    with strategy.scope():
        narrow, wide = Variable(np.zeros((1, 3))), Variable(np.zeros((2, 3)))
    forth, back = optimizers.Adam(), optimizers.Adam()
    strategy.run(forth.apply_gradients, ([(np.ones((1, 3)), narrow)],))
    if stepped:
        strategy.run(back.apply_gradients, ([(np.ones((2, 3)), wide)],))
    path = Checkpoint(v=narrow, optimizer=forth).save(tmp_path / "state")
    checkpoint = Checkpoint(v=wide, optimizer=back)
    text = refusal(CheckpointError, "does not fit", checkpoint.restore, path)
    line = "optimizer/slots_of/v/mean: float64 of shape (1, 3), wanted float64 of shape (2, 3)"
    assert line in text
    assert back.iterations == stepped


@pytest.mark.parametrize("array", [np.zeros((2, 3)), np.zeros((1, 3), np.float32)])
def test_numbered_slots_of_another_shape_or_dtype_are_refused_when_they_are_made(array, tmp_path):
    strategy = lone_strategy()
    with strategy.scope():
        first, saved, other = Variable(np.zeros(2)), Variable(np.zeros((1, 3))), Variable(array)
        forth, back = optimizers.Adam(), optimizers.Adam()
    pairs = [(np.ones(each.shape), each) for each in (first, saved)]
    strategy.run(forth.apply_gradients, (pairs,))
    before = first.numpy().copy()
    path = Checkpoint(optimizer=forth).save(tmp_path / "state")
    Checkpoint(optimizer=back).restore(path)
    pairs[1] = np.ones(other.shape), other
    match = r"mean was restored as float64 of shape \(1, 3\)"
    refusal(ValueError, match, strategy.run, back.apply_gradients, (pairs,))
    # Nothing of the step was taken.
    assert back.iterations == 1
    np.testing.assert_array_equal(first.numpy(), before)
