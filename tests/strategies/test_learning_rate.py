"""A learning rate that is a function of the step."""

import numpy as np
import pytest

from collectives import MismatchError
from strategies import Checkpoint, LocalSGDStrategy, Variable, optimizers
from tests.strategies.parameter_servers import number_of, run_workers, together
from tests.strategies.support import lone_strategy, refusal


class Schedule:
    """Records the steps that it is called with."""

    def __init__(self, scale=1.0):
        self.scale, self.steps = scale, []

    def __call__(self, step):
        self.steps.append(step)
        return np.float32(self.scale / (step + 1))


def steps_of(strategy, optimizer, variable, count):
    for _ in range(count):
        strategy.run(optimizer.apply_gradients, [[(np.ones(1), variable)]])


def test_it_gets_the_step_from_0_and_is_called_once_for_each():
    strategy, schedule = lone_strategy(), Schedule()
    with strategy.scope():
        variable, optimizer = Variable(np.zeros(1)), optimizers.SGD(schedule)
    steps_of(strategy, optimizer, variable, 3)
    assert schedule.steps == [0, 1, 2]
    np.testing.assert_allclose(variable, [-(1 + 1 / 2 + 1 / 3)], rtol=1e-7)
    # As in Keras, the attribute is the current number.
    assert optimizer.learning_rate == optimizer.learning_rate == pytest.approx(1 / 4)
    assert schedule.steps == [0, 1, 2, 3]
    optimizer.learning_rate = 0.5
    assert (optimizer.learning_rate, optimizer.iterations) == (0.5, 3)
    optimizer.learning_rate = lambda step: step
    assert optimizer.learning_rate == 3.0


def test_adam_follows_it_as_numbers_that_are_assigned():
    strategy = lone_strategy()
    with strategy.scope():
        pair = [Variable(np.zeros(3)) for _ in range(2)]
    by_function, by_hand = optimizers.Adam(lambda step: 0.1 / (step + 1)), optimizers.Adam(0.0)
    for step in range(4):
        gradient = np.arange(3.0) - step
        by_hand.learning_rate = 0.1 / (step + 1)
        for optimizer, variable in zip((by_function, by_hand), pair, strict=True):
            strategy.run(optimizer.apply_gradients, [[(gradient, variable)]])
    np.testing.assert_array_equal(*pair)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_ranks_compare_its_value_and_not_its_address(comm, strategy):
    with strategy.scope():
        variable = Variable(np.zeros(1))
    schedule = Schedule()
    optimizer = optimizers.SGD(lambda step: schedule(step))
    steps_of(strategy, optimizer, variable, 2)
    np.testing.assert_allclose(variable, [-1.5 * comm.size])
    if comm.size > 1:
        schedule.scale = 1.0 + min(comm.rank, 1)
        text = refusal(MismatchError, None, steps_of, strategy, optimizer, variable, 1)
        assert "step 3 of DescentRule(learning_rate=0.3333" in text.splitlines()[1]
        assert "rank 1: step 3 of DescentRule(learning_rate=0.6666" in text
        assert set(comm.all_gather_object(text)) == {text}
        schedule.scale = "x" if comm.rank == 1 else 1.0
        text = refusal(MismatchError, None, steps_of, strategy, optimizer, variable, 1)
        assert "rank 1: barrier(apply_gradients refused by TypeError" in text
    schedule.scale = 1.0
    steps_of(strategy, optimizer, variable, 1)
    np.testing.assert_allclose(variable, [-(1.5 + 1 / 3) * comm.size], rtol=1e-6)


def test_what_is_no_number_is_refused():
    strategy = lone_strategy()
    with strategy.scope():
        variable, optimizer = Variable(np.zeros(1)), optimizers.SGD(lambda step: None)
    text = "learning_rate gave a NoneType for step 0: must be a number"
    refusal(TypeError, text, steps_of, strategy, optimizer, variable, 1)
    assert (optimizer.iterations, float(variable[0])) == (0, 0.0)


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_restored_checkpoint_continues_from_its_step(strategy, tmp_path):
    path = strategy.communicator.broadcast_object(str(tmp_path / "saved"))

    def made(rate):
        with strategy.scope():
            variable, optimizer = Variable(np.zeros(1)), optimizers.SGD(rate)
        return variable, optimizer, Checkpoint(variable=variable, optimizer=optimizer)

    variable, optimizer, checkpoint = made(Schedule())
    steps_of(strategy, optimizer, variable, 2)
    written = checkpoint.save(path)
    schedule = Schedule(3.0)
    again, other, restored = made(schedule)
    restored.restore(written)
    np.testing.assert_array_equal(again, variable)
    steps_of(strategy, other, again, 1)
    assert schedule.steps[-1] == 2
    np.testing.assert_allclose(again, variable.numpy() - 2 * 1.0, rtol=1e-6)
    # A number is the rate that the step had.
    _, number, restored = made(7.0)
    restored.restore(written)
    assert number.learning_rate == pytest.approx(1 / 3)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_replicas_that_train_alone_count_their_own_steps(comm):
    outer = optimizers.SGD(lambda step: 1.0 / (step + 1))
    strategy = LocalSGDStrategy(sync_every=1, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        variable = Variable(np.zeros(1))
    own = optimizers.SGD(lambda step: (comm.rank + 1.0) / (step + 1))
    steps_of(strategy, own, variable, 2)
    mean = (comm.size + 1) / 2
    np.testing.assert_allclose(variable, [-mean * (1 + 0.5 * 0.5)], rtol=1e-6)
    if comm.size > 1:
        outer.learning_rate = lambda step: step + min(comm.rank, 1)
        text = refusal(MismatchError, "outer step 3", steps_of, strategy, own, variable, 1)
        assert "rank 1: barrier(outer step 3 of DescentRule(learning_rate=3.0" in text
        assert set(comm.all_gather_object(text)) == {text}
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_workers_of_parameter_servers_count_their_own_steps(comm):
    def work(strategy):
        variable = Variable(np.zeros(1))
        schedule = Schedule()
        optimizer = optimizers.SGD(schedule)
        together(strategy)
        steps_of(strategy, optimizer, variable, 1 + number_of(strategy))
        strategy.worker.client.fence()
        together(strategy)
        return schedule.steps, variable.numpy().tolist()

    results = run_workers(comm, 1, work)
    assert [steps for steps, _ in results] == [[0], [0, 1]]
    for _, value in results:
        np.testing.assert_allclose(value, [-2.5])
