"""LocalSGDStrategy against a simulation in NumPy with float64; what is averaged, and when."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import (
    AutoShardPolicy,
    InputOptions,
    LocalSGDStrategy,
    MultiWorkerMirroredStrategy,
    ReduceOp,
    ValueContext,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    compute_average_loss,
    get_replica_context,
    optimizers,
)
from strategies.core.indexed_slices import IndexedSlices
from strategies.synchronous.local_sgd import rounds as rounds_of_steps
from tests.slow import slow
from tests.strategies.support import limited, refusal, same_refusal

SHAPES = [(3, 2), (), (4,)]
STEPS = 7


def on_ranks(size, function, *arguments, **named):
    """Call `function(strategy)` on `size` threads, each a rank of a LocalSGDStrategy."""

    def one_rank(transport):
        with limited(transport):
            comm = Communicator(transport)
            return function(LocalSGDStrategy(*arguments, communicator=comm, **named))

    return local.run(size, one_rank)


def initial(rank):
    chance = np.random.default_rng([9, rank])
    return [chance.normal(size=shape) for shape in SHAPES]


def gradients_of(step, rank):
    chance = np.random.default_rng([step, rank])
    return [chance.normal(size=shape) for shape in SHAPES]


def train(strategy, make, steps=STEPS):
    """Each rank's own values after every step."""
    with strategy.scope():
        variables = [Variable(value) for value in initial(strategy.communicator.rank)]
        optimizer = make()
    history = []
    for step in range(steps):
        gradients = gradients_of(step, strategy.communicator.rank)
        strategy.run(optimizer.apply_gradients, (zip(gradients, variables, strict=True),))
        history.append([variable.numpy() for variable in variables])
    return history


class Momentum:
    """Gradient descent with momentum, as the Keras documentation writes it."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov, self.velocity = rate, momentum, nesterov, 0.0

    def step(self, weight, gradient):
        self.velocity = self.momentum * self.velocity - self.rate * gradient
        if self.nesterov:
            return weight + self.momentum * self.velocity - self.rate * gradient
        return weight + self.velocity


def simulated(size, every, inner, outer=None, steps=STEPS):
    """Every rank's values after every step: history[step][rank][variable]."""
    places = range(len(SHAPES))
    weights = [[np.array(each) for each in initial(0)] for _ in range(size)]
    inners = [[inner() for _ in places] for _ in range(size)]
    outers = [outer() for _ in places] if outer else None
    agreed, history = initial(0), []
    for step in range(steps):
        for rank in range(size):
            gradients = gradients_of(step, rank)
            weights[rank] = [
                inners[rank][place].step(weights[rank][place], gradients[place]) for place in places
            ]
        if (step + 1) % every == 0:
            means = [np.mean([weights[rank][place] for rank in range(size)], 0) for place in places]
            if outers is None:
                agreed = means
            else:
                agreed = [
                    outers[place].step(agreed[place], agreed[place] - means[place])
                    for place in places
                ]
            weights = [list(agreed) for _ in range(size)]
        history.append([list(each) for each in weights])
    return history


INNER = {
    "sgd": (lambda: optimizers.SGD(0.1), lambda: Momentum(0.1)),
    "momentum": (lambda: optimizers.SGD(0.1, momentum=0.9), lambda: Momentum(0.1, 0.9)),
}
OUTER = {
    "plain": (lambda: None, None),
    "DiLoCo": (
        lambda: optimizers.SGD(0.7, momentum=0.9, nesterov=True),
        lambda: Momentum(0.7, 0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("size", [1, 3, *slow(2, 5)])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_every_rank_has_the_simulations_values_after_every_step(size, every, inner, outer):
    """Local values between averagings, and the same bits on all ranks after one."""
    make, expected_inner = INNER[inner]
    make_outer, expected_outer = OUTER[outer]

    def body(transport):
        with limited(transport):
            comm = Communicator(transport)
            return train(LocalSGDStrategy(every, None, make_outer(), communicator=comm), make)

    histories = local.run(size, body)
    expected = simulated(size, every, expected_inner, expected_outer)
    for step in range(STEPS):
        for rank in range(size):
            for place in range(len(SHAPES)):
                value = histories[rank][step][place]
                np.testing.assert_allclose(value, expected[step][rank][place], rtol=1e-12)
                alike = value.tobytes() == histories[0][step][place].tobytes()
                assert alike == ((step + 1) % every == 0 or rank == 0)


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_averaging_after_each_step_of_descent_is_training_in_step_by_the_mean(size):
    def in_step(transport):
        with limited(transport):
            strategy = MultiWorkerMirroredStrategy(communicator=Communicator(transport))
            return train(strategy, lambda: optimizers.SGD(0.1 / size))

    mirrored = local.run(size, in_step)
    averaged = on_ranks(size, lambda strategy: train(strategy, INNER["sgd"][0]), 1)
    for one, other in zip(averaged, mirrored, strict=True):
        for values, wanted in zip(one, other, strict=True):
            for value, expected in zip(values, wanted, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_between_mpi_ranks(comm):
    strategy = LocalSGDStrategy(3, None, OUTER["DiLoCo"][0](), communicator=comm)
    history = train(strategy, INNER["momentum"][0])
    strategy.communicator.close()
    expected = simulated(comm.size, 3, INNER["momentum"][1], OUTER["DiLoCo"][1])
    for values, wanted in zip(history, expected, strict=True):
        for value, each in zip(values, wanted[comm.rank], strict=True):
            np.testing.assert_allclose(value, each, rtol=1e-12)


# --- what is averaged ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_variables_without_updates_are_not_averaged(size):
    """The mean of equal numbers may be another number, and integers have none."""

    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            count = Variable(7, aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
            untouched, trained = Variable(np.float64(0.1)), Variable(np.float32(0))
            optimizer = optimizers.SGD(1.0)
        strategy.run(optimizer.apply_gradients, ([(float(rank), trained)],))
        return int(count), float(untouched), float(trained)

    mean = -np.float32(sum(range(size)) / size)
    assert on_ranks(size, body, 1) == [(7, 0.1, mean)] * size


@pytest.mark.parametrize("outer", OUTER)
def test_a_variable_that_only_one_rank_changed_is_averaged_on_all(outer):
    def body(strategy):
        with strategy.scope():
            first, second, optimizer = Variable(0.0), Variable(0.0), optimizers.SGD(1.0)
        wanted = second if strategy.communicator.rank == 2 else first
        strategy.run(optimizer.apply_gradients, ([(-3.0, wanted)],))
        return float(first), float(second)

    step = 1.0 if outer == "plain" else 0.7 * 1.9
    expected = (pytest.approx(2.0 * step), pytest.approx(1.0 * step))

    def one_rank(transport):
        with limited(transport):
            comm, make = Communicator(transport), OUTER[outer][0]
            return body(LocalSGDStrategy(1, None, make(), communicator=comm))

    assert local.run(3, one_rank) == [expected] * 3


def test_a_variable_without_an_update_on_one_rank_is_averaged_by_the_others():
    def body(strategy):
        with strategy.scope():
            kept, dropped, optimizer = Variable(0.0), Variable(0.0), optimizers.SGD(1.0)
        rank = strategy.communicator.rank
        if rank == 1:
            del dropped
            pairs = [(float(rank), kept)]
        else:
            pairs = [(float(rank), kept), (1.0, dropped)]
        for _ in range(2):
            strategy.run(optimizer.apply_gradients, (pairs,))
        return float(kept), None if rank == 1 else float(dropped)

    assert on_ranks(3, body, 1) == [(-2.0, -2.0), (-2.0, None), (-2.0, -2.0)]


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("size", [3, *slow(2)])
def test_an_assignment_for_all_moves_what_was_agreed_on_too(size, outer):
    """A checkpoint that is restored in the middle of a round isn't an outer gradient."""

    def body(transport):
        with limited(transport):
            comm = Communicator(transport)
            strategy = LocalSGDStrategy(2, None, OUTER[outer][0](), communicator=comm)
            with strategy.scope():
                variable, optimizer = Variable(5.0), optimizers.SGD(1.0)
            strategy.run(optimizer.apply_gradients, ([(float(comm.rank), variable)],))
            variable.assign(100.0)
            strategy.run(optimizer.apply_gradients, ([(0.0, variable)],))
            return float(variable)

    assert local.run(size, body) == [pytest.approx(100.0)] * size


@pytest.mark.parametrize("outer", OUTER)
def test_sparse_gradients_are_steps_of_a_replica(outer):
    def body(transport):
        with limited(transport):
            comm = Communicator(transport)
            strategy = LocalSGDStrategy(2, None, OUTER[outer][0](), communicator=comm)
            with strategy.scope():
                variable, optimizer = Variable(np.zeros((2, 1))), optimizers.SGD(1.0)
            for _ in range(2):
                slices = IndexedSlices([[-1.0]], [comm.rank])
                strategy.run(optimizer.apply_gradients, ([(slices, variable)],))
            return variable.numpy().ravel().tolist()

    step = 1.0 if outer == "plain" else 0.7 * 1.9
    assert local.run(2, body) == [pytest.approx([step, step])] * 2


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_the_callers_gradients_are_not_changed(size):
    def body(strategy):
        with strategy.scope():
            variable, optimizer = Variable(np.zeros(2)), optimizers.SGD(0.5)
        gradient = np.ones(2)
        strategy.run(optimizer.apply_gradients, ([(gradient, variable)],))
        return gradient.tolist()

    assert on_ranks(size, body, 1) == [[1.0, 1.0]] * size


# --- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, *slow(2)])
def test_synchronize_averages_at_once_and_begins_a_new_round(size):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
        seen = []
        for part in (2, 3):  # of rounds of three steps
            for _ in range(part):
                strategy.run(optimizer.apply_gradients, ([(float(rank), variable)],))
            seen.append(float(variable))
            strategy.synchronize()
            seen.append(float(variable))
        match = "LocalSGDStrategy.synchronize requires a cross-replica context"
        strategy.run(refusal, (RuntimeError, match, strategy.synchronize))
        return seen

    mean = sum(range(size)) / size
    expected = [[-2.0 * rank, -2 * mean, -5 * mean, -5 * mean] for rank in range(size)]
    for seen, wanted in zip(on_ranks(size, body, 3), expected, strict=True):
        assert seen == pytest.approx(wanted)


def test_ranks_with_unequal_steps_agree_again_after_synchronize():
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
        for _ in range(1 + rank):
            strategy.run(optimizer.apply_gradients, ([(1.0, variable)],))
        strategy.synchronize()
        values = [float(variable)]
        for _ in range(5):
            strategy.run(optimizer.apply_gradients, ([(float(rank), variable)],))
        return [*values, float(variable)]

    assert on_ranks(3, body, 5) == [[-2.0, -7.0]] * 3


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_about_every_so_many_seconds_all_ranks_average_at_the_same_steps(size, monkeypatch):
    """Follows the slowest rank's rate, on simulated clocks; rounds at most double."""
    clock = threading.local()
    monkeypatch.setattr(rounds_of_steps, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def body(transport):
        clock.now = 0.0
        with limited(transport):
            comm = Communicator(transport)
            strategy = LocalSGDStrategy(sync_seconds=10.0, communicator=comm)
            with strategy.scope():
                variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
            steps, value = [], 0.0
            for step in range(1, 60):
                # The last rank is the slowest: a second for a step, later two.
                clock.now += (1 if step <= 40 else 2) if comm.rank == size - 1 else 0.1
                strategy.run(optimizer.apply_gradients, ([(comm.rank**2, variable)],))
                value -= comm.rank**2
                if float(variable) != pytest.approx(value):
                    steps.append(step)
                    value = float(variable)
            return steps

    assert local.run(size, body) == [[1, 3, 7, 15, 25, 35, 45, 51, 56]] * size


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_with_a_slow_rank_ranks_wait_only_to_average(comm):
    strategy = LocalSGDStrategy(sync_seconds=0.2, communicator=comm)
    with strategy.scope():
        variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
    steps, value = [], 0.0
    for step in range(60):
        if comm.rank == 1:
            time.sleep(0.01)
        strategy.run(optimizer.apply_gradients, ([(comm.rank**2, variable)],))
        value -= comm.rank**2
        if float(variable) != pytest.approx(value):
            steps.append(step)
            value = float(variable)
    strategy.communicator.close()
    assert [steps] * comm.size == comm.all_gather_object(steps)
    # At most 20 steps in a round; a busy machine needs more time for each.
    assert all(0 < later - earlier <= 20 for earlier, later in itertools.pairwise(steps))
    assert len(steps) >= 4


def test_a_step_without_seconds_is_still_a_step():
    """A round of zero seconds, and one that took far longer than planned."""
    rounds = rounds_of_steps.Rounds(None, 1e-9)
    assert rounds.step()
    rounds.begin([rounds.proposal(), 0])
    assert rounds.step()
    assert rounds_of_steps.Rounds(4, None).proposal() == 4
    # No rank did a step: the round keeps its length.
    waiting = rounds_of_steps.Rounds(None, 5.0)
    assert waiting.proposal() == 0
    waiting.begin([0, 0])
    assert waiting.step()


# --- losses and data -----------------------------------------------------------------------------


def batches(count, length):
    return [
        (np.arange(length) + 100.0 * number, np.full(length, number)) for number in range(count)
    ]


@pytest.mark.parametrize("size", [1, 3, *slow(2)])
def test_a_script_for_another_strategy_gets_the_mean_over_its_own_batch(size):
    """As in the tutorial on custom training loops: by batch size times replicas in sync."""

    def body(strategy):
        assert strategy.num_replicas_in_sync == 1
        batch_size = 4 * strategy.num_replicas_in_sync
        data = strategy.experimental_distribute_dataset(batches(3 * size, batch_size))

        def step(batch):
            inputs, numbers = batch
            context = get_replica_context()
            assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (0, 1)
            total = compute_average_loss(inputs, global_batch_size=batch_size)
            assert total == compute_average_loss(inputs)
            return total, numbers[0], len(numbers)

        told = []
        strategy.experimental_distribute_values_from_function(told.append)
        assert told == [ValueContext(replica_id_in_sync_group=0, num_replicas_in_sync=1)]
        return [strategy.run(step, (batch,)) for batch in data]

    for rank, seen in enumerate(on_ranks(size, body, 1)):
        numbers = [step * size + rank for step in range(3)]
        assert seen == [(100.0 * number + 1.5, number, 4) for number in numbers]


@pytest.mark.parametrize(("size", "count"), [(2, 3), (3, 4), (3, 5), (2, 1)])
def test_all_ranks_do_equally_many_steps_with_unequal_batches(size, count):
    def body(strategy):
        with strategy.scope():
            variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
        data, seen = strategy.experimental_distribute_dataset(batches(count, 5)), []
        for epoch in range(2):
            for inputs, _ in data:
                gradient = (inputs.sum() / 5, variable)
                strategy.run(optimizer.apply_gradients, ([gradient],))
                seen += [(epoch, each) for each in inputs.tolist()]
        strategy.synchronize()
        return optimizer.iterations, float(variable), seen

    results = on_ranks(size, body, 2)
    assert len({(steps, value) for steps, value, _ in results}) == 1
    assert results[0][0] == 2 * -(-count // size)
    seen = sorted(each for _, _, part in results for each in part)
    whole = [each for inputs, _ in batches(count, 5) for each in inputs.tolist()]
    assert seen == sorted((epoch, each) for epoch in range(2) for each in whole)


def test_datasets_of_each_ranks_own_may_differ_in_length():
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable, optimizer = Variable(0.0), optimizers.SGD(1.0)

        def make(context):
            assert (context.num_input_pipelines, context.input_pipeline_id) == (3, rank)
            assert context.get_per_replica_batch_size(7) == 7
            return [np.ones(2)] * (1 + rank)

        lengths = []
        for batch in strategy.distribute_datasets_from_function(make):
            strategy.run(optimizer.apply_gradients, ([(batch.sum(), variable)],))
            lengths.append(len(batch))
        strategy.synchronize()
        return lengths, float(variable)

    mean = pytest.approx(-4.0)
    expected = [([2, 0, 0], mean), ([2, 2, 0], mean), ([2, 2, 2], mean)]
    assert on_ranks(3, body, 2) == expected


def test_what_can_be_iterated_only_once_is_refused():
    match = "can be iterated only once"
    for result in on_ranks(
        2,
        lambda strategy: refusal(
            TypeError, match, strategy.experimental_distribute_dataset, iter([np.ones(3)])
        ),
        1,
    ):
        assert result


@pytest.mark.parametrize("size", [1, 3, *slow(2)])
@pytest.mark.parametrize("policy", ["AUTO", "DATA", "OFF"])
def test_a_shuffled_dataset_is_split_by_its_policy(size, policy):
    """The same order on all ranks where they share batches; under OFF each rank reads all."""
    numbers = np.arange(12 * size)

    def body(strategy):
        data = strategy.experimental_make_numpy_dataset(numbers).shuffle(len(numbers)).batch(4)
        options = InputOptions(auto_shard_policy=AutoShardPolicy[policy])
        batches = list(strategy.experimental_distribute_dataset(data, options))
        return [len(batch) for batch in batches], np.concatenate(batches).tolist()

    results = on_ranks(size, body, 1)
    seen = sorted(number for _, part in results for number in part)
    copies = size if policy == "OFF" else 1
    assert seen == sorted(numbers.tolist() * copies)
    assert {tuple(lengths) for lengths, _ in results} == {(4,) * 3 * copies}


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_reductions_and_metrics_are_over_all_ranks(size):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            total = Variable(
                0.0,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
        total.assign(6.0)
        spread = strategy.run(total.read_value), float(total)
        strategy.run(total.assign_add, (rank,))
        reduced = strategy.reduce(ReduceOp.MEAN, np.float64(rank), axis=None)
        return *map(float, spread), float(total), float(reduced)

    ranks = sum(range(size))
    expected = pytest.approx((6.0 / size, 6.0, 6.0 + ranks, ranks / size))
    assert on_ranks(size, body, 1) == [expected] * size


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "sync_every=None, sync_seconds=None: exactly one of them"),
        ({"sync_every": 2, "sync_seconds": 1.0}, ValueError, "exactly one of them must be given"),
        ({"sync_every": 0}, ValueError, "sync_every=0: must be an integer of at least 1"),
        ({"sync_every": 1.5}, TypeError, "sync_every=1.5: must be an integer"),
        ({"sync_seconds": 0}, ValueError, "sync_seconds=0: must be above 0, and finite"),
        ({"sync_seconds": float("nan")}, ValueError, "must be above 0, and finite"),
        ({"sync_seconds": float("inf")}, ValueError, "must be above 0, and finite"),
        ({"sync_every": 1, "outer_optimizer": 0.7}, TypeError, "outer_optimizer is a float"),
        ({"sync_every": 1, "outer_optimizer": optimizers.SGD}, TypeError, "is the class SGD"),
    ],
)
def test_what_is_refused(arguments, error, match):
    comm = Communicator(local.alone())
    refusal(error, match, LocalSGDStrategy, **arguments, communicator=comm)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("what", ["sync_every", "outer_optimizer", "nothing"])
def test_ranks_that_were_given_different_ones_all_raise(comm, what):
    """Also where one of the arguments would be refused on its own."""
    rate = 0.5 if what == "outer_optimizer" and comm.rank == 1 else 0.7
    every = {"sync_every": 5, "nothing": None}.get(what, 3) if comm.rank == 1 else 3
    arguments = (every, None, optimizers.SGD(rate))
    match = "LocalSGDStrategy: the ranks' arguments differ"
    text = same_refusal(comm, ValueError, match, LocalSGDStrategy, *arguments, communicator=comm)
    assert f"rank 1: sync_every={every}, " in text or comm.rank != 1
    assert ("rate=0.5" in text) == (what == "outer_optimizer")
