"""Scheduled functions that use variables and optimizers on parameter servers."""

import numpy as np
import pytest

import strategies
from strategies import (
    InputContext,
    ReduceOp,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    optimizers,
)
from strategies.coordinator import ClusterCoordinator
from strategies.parameter_server import FixedShardsPartitioner, ShardedVariable
from tests.strategies.parameter_servers import strategy_on
from tests.strategies.support import refusal

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4, 5)]


def coordinated(comm, chief, *, servers=1, **options):
    """Call `chief(strategy, coordinator)` on the chief while the others serve."""
    with strategy_on(comm, servers, chief=True, **options) as strategy:
        try:
            if strategy.is_chief:
                chief(strategy, ClusterCoordinator(strategy))
            else:
                strategy.serve()
        finally:
            strategy.shutdown()
        strategy.link.box.close()


def test_all_that_functions_push_is_applied_when_join_returns(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            total = Variable(np.zeros((50, 40)), name="total")

        def add(number):
            total.assign_add(np.full((50, 40), number))
            return (total.shape, total.dtype, total.name)

        for turn in range(1, 4):
            results = [coordinator.schedule(add, (float(number),)) for number in range(10)]
            coordinator.join()
            np.testing.assert_array_equal(total, 45.0 * turn)
        assert coordinator.fetch(results[0]) == ((50, 40), np.float64, "total")

    coordinated(comm, chief)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_updates_are_those_of_one_process(comm, momentum):
    """Functions that run one after the other: each reads the results of the one before."""
    start = np.linspace(-1, 1, 12).reshape(4, 3)

    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(start)
            optimizer = optimizers.SGD(0.1, momentum=momentum)

        def step(scale):
            def replica_step():
                optimizer.apply_gradients([(scale * weights.numpy(), weights)])

            strategy.run(replica_step)
            return optimizer.learning_rate

        for number in range(6):
            optimizer.learning_rate = 0.1 / (number + 1)
            assert coordinator.schedule(step, (number + 1.0,)).get() == 0.1 / (number + 1)
        expected, velocity = start.copy(), np.zeros_like(start)
        for _ in range(6):
            velocity = momentum * velocity - 0.1 * expected
            expected += velocity
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)
        saved = optimizer.saved_tensors()
        assert saved["iterations"] == 6
        if momentum:
            np.testing.assert_allclose(saved["slots/0/velocity"], velocity, rtol=1e-12)

    coordinated(comm, chief)


def test_a_restored_optimizer_continues(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(np.zeros(3))
            optimizer = optimizers.SGD(1.0, momentum=0.5)
        velocity = np.array([1.0, -2.0, 4.0])
        optimizer.restore_tensors(
            {
                "iterations": np.array(10),
                "learning_rate": np.array(1.0),
                "slots/0/velocity": velocity,
            }
        )

        def step():
            optimizer.apply_gradients([(np.ones(3), weights)])

        expected = np.zeros(3)
        for count in (11, 12):
            coordinator.schedule(step)
            coordinator.join()
            velocity = 0.5 * velocity - 1
            expected += velocity
            np.testing.assert_array_equal(weights.numpy(), expected)
            assert optimizer.saved_tensors()["iterations"] == count

    coordinated(comm, chief)


def test_workers_count_their_own_steps_until_the_chief_restores(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(np.zeros(2))
            optimizer = optimizers.SGD(lambda step: 1 / (step + 1))
        taken = dict.fromkeys(strategy.membership.ranks_of("worker"), 0)

        def step():
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weights)]))
            return strategy.membership.world.rank, optimizer.iterations

        expected = 0.0
        for number in range(12):
            if number == 8:
                optimizer.restore_tensors(
                    {"iterations": np.array(1), "learning_rate": np.array(1.0)}
                )
                taken = dict.fromkeys(taken, 1)
            rank, steps = coordinator.schedule(step).get()
            taken[rank] += 1
            assert steps == taken[rank]
            expected -= 1 / steps
        np.testing.assert_allclose(weights.numpy(), expected)

    coordinated(comm, chief)


def test_what_is_restored_travels_once(comm):
    """Functions that are scheduled at once don't each send or restore the optimizer."""

    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(np.zeros(10_000))
            optimizer = optimizers.SGD(1.0, momentum=0.5)
        slot = {"slots/0/velocity": np.ones(10_000)}
        optimizer.restore_tensors(
            {"iterations": np.array(1), "learning_rate": np.array(1.0), **slot}
        )

        def step():
            optimizer.apply_gradients([(np.zeros(10_000), weights)])

        assert sum(part.nbytes for part in coordinator._packed(step)) < 10_000
        for _ in range(4):
            coordinator.schedule(step)
        coordinator.join()
        np.testing.assert_array_equal(weights.numpy(), 0.5 + 0.25 + 0.125 + 0.0625)

    coordinated(comm, chief)


def test_two_optimizers_are_kept_separate(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            first, second = Variable(np.ones(2)), Variable(np.ones(2))
            adam, descent = optimizers.Adam(0.5), optimizers.SGD(0.25, momentum=1.0)

        def step():
            adam.apply_gradients([(np.ones(2), first)])
            descent.apply_gradients([(np.ones(2), second)])

        for _ in range(2):
            coordinator.schedule(step)
            coordinator.join()
        np.testing.assert_allclose(first, 0.0, atol=1e-5)
        np.testing.assert_allclose(second, 1 - 0.25 - 0.5)

    coordinated(comm, chief)


def test_the_chief_assigns_slots_to_their_variables(comm):
    """Functions use the optimizers in another order than they are sent in."""

    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(np.zeros(2))
            first = optimizers.SGD(1.0, momentum=0.5)
            second = optimizers.SGD(0.125, momentum=0.5)

        def step(one, other):
            other.apply_gradients([(np.ones(2), weights)])
            one.apply_gradients([(np.ones(2), weights)])

        for _ in range(3):
            coordinator.schedule(step, (first, second))
        coordinator.join()
        for optimizer, rate in ((first, 1.0), (second, 0.125)):
            saved = optimizer.saved_tensors()
            np.testing.assert_array_equal(saved["slots/0/velocity"], [-1.75 * rate] * 2)
            assert saved["iterations"] == 3

    coordinated(comm, chief)


@pytest.mark.ranks(5, 4)
def test_sharded_variables(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            table = Variable(np.arange(20.0).reshape(10, 2), name="table")
        assert isinstance(table, ShardedVariable)

        def look(rows):
            assert isinstance(table, ShardedVariable)
            table.assign_add(np.ones((10, 2)))
            return table[rows], [part.numpy() for part in table.variables]

        for turn in range(1, 3):
            rows, parts = coordinator.schedule(look, (slice(2, 8, 3),)).get()
            np.testing.assert_array_equal(rows, np.arange(20.0).reshape(10, 2)[2:8:3] + turn)
            np.testing.assert_array_equal(
                np.concatenate(parts), np.arange(20.0).reshape(10, 2) + turn
            )
            np.testing.assert_array_equal(table.variables[1].numpy(), parts[1])

    coordinated(comm, chief, servers=2, variable_partitioner=FixedShardsPartitioner(2))


def test_on_read_variables_are_shared_by_all_workers(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            count = Variable(
                5,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )

        def add(number):
            count.assign_add(number)

        for number in range(20):
            coordinator.schedule(add, (number,))
        coordinator.join()
        assert count.numpy() == 195
        count.assign(0)
        coordinator.schedule(add, (3,))
        coordinator.join()
        assert count.numpy() == 3

    coordinated(comm, chief)


def test_variables_are_returned_as_the_chiefs(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            one = Variable(np.arange(3.0))
        result = coordinator.schedule(lambda: {"one": one, "two": (one + 1,)})
        value = result.get()
        assert isinstance(value["one"], Variable)
        assert value["one"].strategy is strategy
        one.assign_add(np.ones(3))
        np.testing.assert_array_equal(value["one"], [1, 2, 3])
        np.testing.assert_array_equal(value["two"][0], [1, 2, 3])
        assert isinstance(result.fetch()["one"], np.ndarray)

    coordinated(comm, chief)


def test_per_worker_datasets_of_the_strategy(comm):
    def chief(strategy, coordinator):
        def dataset_of(context):
            assert context == InputContext(1, 0, 1)
            size = context.get_per_replica_batch_size(6)
            return [np.full(size, number) for number in range(3)]

        def per_worker():
            return strategy.distribute_datasets_from_function(dataset_of)

        def step(iterator):
            def replica_step(batch):
                context = strategies.get_replica_context()
                assert context.num_replicas_in_sync == 1
                return context.all_reduce(ReduceOp.SUM, batch.sum())

            return strategy.reduce(
                ReduceOp.SUM, strategy.run(replica_step, args=(next(iterator),)), axis=None
            )

        iterator = iter(coordinator.create_per_worker_dataset(per_worker))
        sums = coordinator.fetch([coordinator.schedule(step, (iterator,)) for _ in range(3)])
        sums = [int(each) for each in sums]
        assert set(sums) <= {0, 6, 12}
        assert min(sums) == 0

    coordinated(comm, chief)


def test_an_optimizer_that_a_function_makes_is_refused(comm):
    """Its number, and so its slots, would be those of the chief's."""

    def chief(strategy, coordinator):
        with strategy.scope():
            weights, optimizer = Variable(np.zeros(3)), optimizers.SGD(0.1, momentum=0.5)

        def step(used):
            own = optimizers.SGD(0.1, momentum=0.5) if used is None else used
            own.apply_gradients([(np.ones(3), weights)])

        coordinator.schedule(step, (optimizer,))
        coordinator.join()
        coordinator.schedule(step, (None,))
        with pytest.raises(RuntimeError, match="SGD was made by a function that the chief"):
            coordinator.join()

    coordinated(comm, chief)


def test_an_error_of_a_push_is_the_functions_own(comm):
    def chief(strategy, coordinator):
        with strategy.scope():
            weights = Variable(np.zeros(3))
        wrong = coordinator.schedule(push_nonsense, (weights,))
        with pytest.raises(ZeroDivisionError, match="nonsense"):
            coordinator.join()
        with pytest.raises(ZeroDivisionError, match="nonsense"):
            wrong.get()
        coordinator.join()

    coordinated(comm, chief)


def nonsense(array):
    raise ZeroDivisionError("nonsense")


def push_nonsense(variable):
    variable.storage.change(nonsense)


def test_a_scheduled_function_neither_serves_nor_leaves(comm):
    def chief(strategy, coordinator):
        for name, match in {
            "serve": "serves the chief already",
            "shutdown": "inside `run`",
        }.items():
            refused = coordinator.schedule(call_on_strategy, (name,))
            with pytest.raises(RuntimeError, match=match):
                coordinator.join()
            with pytest.raises(RuntimeError, match=match):
                refused.get()
        assert coordinator.schedule(abs, (-3,)).get() == 3

    coordinated(comm, chief)


def call_on_strategy(name):
    getattr(strategies.get_strategy(), name)()


def test_no_coordinator_is_made_after_the_end(comm):
    with strategy_on(comm, 1, chief=True) as strategy:
        if strategy.is_chief:
            strategy.shutdown()
            refusal(RuntimeError, "the chief has called shutdown", ClusterCoordinator, strategy)
        else:
            strategy.serve()
        strategy.link.box.close()


def test_who_can_serve(comm):
    with strategy_on(comm, 1, chief=True) as strategy:
        if strategy.is_chief:
            with pytest.raises(RuntimeError, match=r"chief 0 .* can't serve"):
                strategy.serve()
            assert ClusterCoordinator(strategy) is ClusterCoordinator(strategy)
            strategy.shutdown()
        else:
            strategy.serve()
        strategy.link.box.close()
    with strategy_on(comm, 1) as strategy:
        if strategy._server is None:
            with pytest.raises(RuntimeError, match="can't serve"):
                strategy.serve()
            with pytest.raises(ValueError, match='the jobs "chief" and "worker"'):
                ClusterCoordinator(strategy)
            strategy.shutdown()
        else:
            strategy.serve()
