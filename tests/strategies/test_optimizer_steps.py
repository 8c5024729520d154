"""What ranks compare before each step of an optimizer."""

import numpy as np
import pytest

from collectives import MismatchError
from collectives.consistency.signature import fingerprint
from strategies import Variable, optimizers
from tests.strategies.support import on_ranks, refusal

STEP = "the ranks would take different steps"


def made(strategy, count=1, rate=1.0):
    with strategy.scope():
        return Variable(np.zeros(2)), [optimizers.SGD(rate) for _ in range(count)]


def take(strategy, optimizer, variable, steps=1):
    gradient = np.full(2, strategy.communicator.rank + 1.0)
    for _ in range(steps):
        strategy.run(optimizer.apply_gradients, [[(gradient, variable)]])


def test_the_text_of_a_series_of_steps_is_hashed_once():
    def body(strategy):
        variable, (optimizer,) = made(strategy)
        take(strategy, optimizer, variable, 3)
        strategy.communicator.barrier()
        before = fingerprint.cache_info().misses
        strategy.communicator.barrier()
        take(strategy, optimizer, variable, 5)
        strategy.communicator.barrier()
        return fingerprint.cache_info().misses - before, variable.numpy().tolist()

    assert on_ranks(2, body) == [(0, [-24.0, -24.0])] * 2


def test_ranks_that_use_optimizers_of_different_steps_all_raise_and_go_on():
    """Each rank's own series goes on without a gap: only its number differs."""

    def body(strategy):
        variable, pair = made(strategy, 2)
        take(strategy, pair[0], variable, 3)
        take(strategy, pair[1], variable, 2)
        wrong = pair[min(strategy.communicator.rank, 1)]
        text = refusal(MismatchError, STEP, take, strategy, wrong, variable)
        for optimizer in pair:
            take(strategy, optimizer, variable)
        return text, variable.numpy().tolist(), [each.iterations for each in pair]

    seen = on_ranks(3, body)
    assert len({text for text, _, _ in seen}) == 1
    assert "rank 0: step 4 of DescentRule" in seen[0][0]
    assert "rank 2: step 3 of DescentRule" in seen[0][0]
    assert [rest for _, *rest in seen] == [[[-42.0, -42.0], [4, 3]]] * 3


def test_ranks_that_use_twin_optimizers_all_raise_and_go_on():
    """Their settings and steps are the same: the state of one would be updated for the other."""

    def body(strategy):
        variable, pair = made(strategy, 2)
        for optimizer in pair:
            take(strategy, optimizer, variable, 2)
        wrong = pair[min(strategy.communicator.rank, 1)]
        text = refusal(MismatchError, STEP, take, strategy, wrong, variable)
        for optimizer in pair:
            take(strategy, optimizer, variable, 2)
        return text, variable.numpy().tolist(), [each.iterations for each in pair]

    seen = on_ranks(3, body)
    assert len({text for text, _, _ in seen}) == 1
    assert "(optimizer 0)" in seen[0][0]
    assert [rest for _, *rest in seen] == [[[-48.0, -48.0], [4, 4]]] * 3


@pytest.mark.parametrize("iterations", [1, 5])
def test_a_rank_that_counts_otherwise_is_found(iterations):
    def body(strategy):
        variable, (optimizer,) = made(strategy)
        take(strategy, optimizer, variable, 2)
        if strategy.communicator.rank == 1:
            optimizer.iterations = iterations
        text = refusal(MismatchError, STEP, take, strategy, optimizer, variable)
        optimizer.iterations = 7
        take(strategy, optimizer, variable, 2)
        return text, optimizer.iterations, variable.numpy().tolist()

    (text, *rest), other = on_ranks(2, body)
    assert other == (text, *rest) == (text, 9, [-12.0, -12.0])
    assert "rank 0: step 3 of" in text
    assert f"rank 1: step {iterations + 1} of" in text


def test_a_changed_number_of_one_rank_is_found_within_a_series():
    def body(strategy):
        variable, (optimizer,) = made(strategy)
        take(strategy, optimizer, variable, 2)
        if strategy.communicator.rank == 1:
            optimizer.learning_rate = 0.5
        text = refusal(MismatchError, STEP, take, strategy, optimizer, variable)
        return text, variable.numpy().tolist()

    first, second = on_ranks(2, body)
    assert first == second
    assert "learning_rate=1.0" in first[0]
    assert "learning_rate=0.5" in first[0]
    assert first[1] == [-6.0, -6.0]


@pytest.mark.parametrize("count", [1, 3])
def test_a_steady_step_is_one_call(count):
    """The step's text travels with the gradients, of one variable or of several."""

    def body(strategy):
        check = strategy.communicator._engine.call_check
        with strategy.scope():
            variables = [Variable(np.zeros(2)) for _ in range(count)]
            optimizer = optimizers.SGD(1.0)
        gradients = [np.full(2, strategy.communicator.rank + each + 1.0) for each in range(count)]
        pairs = list(zip(gradients, variables, strict=True))
        made = []
        for _ in range(6):
            before = check.sequence
            strategy.run(optimizer.apply_gradients, [pairs])
            made.append(check.sequence - before)
        return made, [each.numpy().tolist() for each in variables]

    values = [[-6.0 * (2 * each + 3)] * 2 for each in range(count)]
    assert on_ranks(2, body) == [([2, 2, 1, 1, 1, 1], values)] * 2


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_rank_that_has_forgotten_the_series_takes_part(steps):
    """As after a copy of the optimizer: the others give their gradients with the comparison."""

    def body(strategy):
        variable, (optimizer,) = made(strategy)
        take(strategy, optimizer, variable, steps)
        if strategy.communicator.rank == 1:
            optimizer.series = None
        take(strategy, optimizer, variable, 4)
        return variable.numpy().tolist(), optimizer.iterations

    expected = [-6.0 * (steps + 4)] * 2, steps + 4
    assert on_ranks(3, body) == [expected] * 3


def test_steps_of_which_one_rank_changes_a_number_are_found_in_a_steady_series():
    def body(strategy):
        variable, (optimizer,) = made(strategy)
        take(strategy, optimizer, variable, 5)
        kept = optimizer.learning_rate
        if strategy.communicator.rank == 0:
            optimizer.learning_rate = 0.25
        text = refusal(MismatchError, STEP, take, strategy, optimizer, variable)
        optimizer.learning_rate = kept
        take(strategy, optimizer, variable, 3)
        return "learning_rate=0.25" in text, variable.numpy().tolist()

    assert on_ranks(2, body) == [(True, [-24.0, -24.0])] * 2
