"""Checkpoints under LocalSGDStrategy: of the averaged values, also within a round."""

import functools

import numpy as np
import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import Checkpoint, LocalSGDStrategy, Variable, metrics, optimizers
from tests.strategies.support import limited

EVERY = 5
ARGUMENTS = {
    "plain": lambda: (EVERY,),
    "seconds": lambda: (None, 1e9),
    "DiLoCo": lambda: (EVERY, None, optimizers.SGD(0.7, momentum=0.9, nesterov=True)),
}


class Program:
    """A model and its checkpoint's objects: an inner optimizer, the outer one, and a metric."""

    def __init__(self, comm, kind):
        arguments = ARGUMENTS[kind]()
        self.strategy = LocalSGDStrategy(*arguments, communicator=comm)
        with self.strategy.scope():
            self.value, self.still = Variable(np.full(2, 0.1)), Variable(0.1)
            self.inner, self.mean = optimizers.SGD(0.3, momentum=0.5), metrics.Mean()
        parts = {"value": self.value, "still": self.still, "inner": self.inner, "mean": self.mean}
        self.checkpoint = Checkpoint(**parts, outer=[*arguments, None, None][2] or {})

    def take(self, steps):
        """Steps that depend on the rank."""

        def step():
            gradient = np.array([1.0, -0.7]) * (1 + self.strategy.communicator.rank**2)
            self.inner.apply_gradients([(gradient, self.value)])
            self.mean.update_state(float(self.strategy.communicator.rank))

        for _ in range(steps):
            self.strategy.run(step)

    @property
    def own(self):
        """The bits of this rank's state."""
        slots = self.inner.saved_tensors().values()
        return [each.tobytes() for each in (self.value.numpy(), self.still.numpy(), *slots)]

    @property
    def rounds(self):
        """The position in the round."""
        return vars(self.strategy._rounds).copy()


def on_ranks(size, body, kind):
    """Call `body(program)` on threads, each a rank; the results in rank order."""

    def one_rank(transport):
        with limited(transport):
            return body(Program(Communicator(transport, deadline=25), kind))

    return local.run(size, one_rank)


def restored(path):
    """The values in a file."""
    value, still = Variable(np.zeros(2)), Variable(0.0)
    Checkpoint(value=value, still=still).restore(path, expect_partial=True)
    return value.numpy(), float(still)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_within_a_round_the_replicas_are_averaged_first(tmp_path, size, kind):
    """As by `synchronize`, which begins a new round."""

    def body(program, save):
        # Seconds: the first round has one step, the second one two.
        program.take(2 if kind == "seconds" else EVERY + 2)
        own = program.value.numpy()
        if save:
            program.checkpoint.save(tmp_path / "saved")
            held, still = restored(tmp_path / "saved.safetensors")
            np.testing.assert_array_equal(program.value.numpy(), held)
            assert still == np.float32(0.1)
        else:
            program.strategy.synchronize()
        assert (own != program.value.numpy()).all()
        values = [program.value.numpy().tobytes()]
        for _ in range(EVERY):
            program.take(1)
            values.append(program.value.numpy().tobytes())
        return values

    saved = on_ranks(size, functools.partial(body, save=True), kind)
    assert saved == on_ranks(size, functools.partial(body, save=False), kind)
    assert len({values[0] for values in saved}) == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_at_the_end_of_a_round_a_save_changes_nothing(tmp_path, size, kind):
    """Neither a value nor the end of the round changes; nor after a second save."""

    def body(program):
        program.take(1 if kind == "seconds" else EVERY)
        before = program.own, program.rounds
        program.checkpoint.save(tmp_path / "first")
        program.checkpoint.save(tmp_path / "second")
        assert (program.own, program.rounds) == before
        return program.value.numpy().tobytes()

    assert len(set(on_ranks(size, body, kind))) == 1
    first, second = (tmp_path / f"{name}.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("kind", ["plain", "DiLoCo"])
def test_one_rank_alone_within_a_round_is_enough(tmp_path, kind):
    """The other ranks have no information about it before they save."""

    def body(program):
        program.take(3 if program.strategy.communicator.rank == 1 else 0)
        program.checkpoint.save(tmp_path / "saved")
        return program.value.numpy().tobytes(), program.rounds["_taken"]

    (values, taken), *others = on_ranks(3, body, kind)
    assert others == [(values, taken)] * 2
    assert taken == 0
    assert restored(tmp_path / "saved.safetensors")[0].tobytes() == values
    assert values != np.full(2, 0.1).tobytes()


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_restored_within_a_round_the_replicas_agree_and_the_round_continues(tmp_path, kind):
    """A save right after a restore has the same values: there is no outer step between them."""

    def body(program):
        program.take(2 * EVERY)
        program.checkpoint.save(tmp_path / "first")
        program.take(1)
        within = program.rounds
        program.checkpoint.restore(tmp_path / "first")
        program.checkpoint.save(tmp_path / "second")
        assert program.rounds == within
        program.take(EVERY - 1)
        return program.value.numpy().tobytes()

    values = on_ranks(3, body, kind)
    first, second = (tmp_path / f"{name}.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert len(set(values)) == (3 if kind == "seconds" else 1)


@pytest.mark.parametrize("kind", ["plain", "DiLoCo"])
def test_another_program_continues_from_a_checkpoint_within_a_round(tmp_path, kind):
    """Includes the outer optimizer's state; all ranks get the chief's slots of the inner one."""

    def first(program):
        program.take(EVERY + 2)
        program.checkpoint.save(tmp_path / "saved")
        program.checkpoint.restore(tmp_path / "saved")
        program.take(EVERY)
        return program.own

    def second(program):
        program.checkpoint.restore(tmp_path / "saved")
        program.take(EVERY)
        return program.own

    assert on_ranks(2, first, kind) == on_ranks(2, second, kind)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_between_mpi_ranks(comm, tmp_path):
    path = comm.broadcast_object(str(tmp_path / "saved.safetensors"))
    program = Program(comm, "plain")
    program.take(2)
    own = comm.all_gather_object(program.value.numpy())
    program.checkpoint.save(path)
    np.testing.assert_allclose(restored(path)[0], np.mean(own, axis=0), rtol=1e-12)
    np.testing.assert_array_equal(restored(path)[0], program.value.numpy())
    program.strategy.communicator.close()
