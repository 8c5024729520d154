"""Sharded variables, and sparse reads and updates."""

import numpy as np
import pytest

import strategies
from strategies import Variable, optimizers
from strategies.core.indexed_slices import IndexedSlices, embedding_lookup
from strategies.parameter_server import FixedShardsPartitioner, MinSizePartitioner, ShardedVariable
from tests.strategies.parameter_servers import number_of, run_workers, together, worlds
from tests.strategies.support import refusal

pytestmark = [pytest.mark.mpi, worlds]


def table(rows=13, columns=3):
    return np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)


def servers_in(comm):
    return 2 if comm.size > 2 else 1


def on_far_servers(strategy):
    """Force reads by messages, as from another node."""
    strategy.worker.client._same_node = lambda number: False


places = pytest.mark.parametrize("server", ["near", "far"])


def test_placement_and_lengths(comm):
    """Shards are placed one by one, over all variables; scalars and slots aren't split."""
    servers = servers_in(comm)

    def work(strategy):
        whole = Variable(5.0)
        split = Variable(table())
        assert isinstance(split, ShardedVariable)
        with strategy.extended.colocate_vars_with(split):
            beside = Variable(table())
        after = Variable(np.ones(4))
        assert type(whole) is type(beside) is Variable
        return [
            [(shard.server, shard.shape) for shard in each.storage.info.shards]
            for each in (whole, split, beside, after)
        ]

    partitioner = FixedShardsPartitioner(5)
    for whole, split, beside, after in run_workers(
        comm, servers, work, variable_partitioner=partitioner
    ):
        assert whole == [(0, ())]
        lengths = [(3, 3), (3, 3), (3, 3), (2, 3), (2, 3)]
        assert split == [((1 + n) % servers, shape) for n, shape in enumerate(lengths)]
        assert beside == [(1 % servers, (13, 3))]
        assert after == [((6 + n) % servers, (1,)) for n in range(4)]


@places
def test_it_reads_and_computes_as_a_whole(comm, server):
    def work(strategy):
        if server == "far":
            on_far_servers(strategy)
        variable, right = Variable(table(), name="table"), table()
        assert len(variable.variables) == 5
        assert [part.name for part in variable.variables][:2] == ["table/part_0", "table/part_1"]
        parts = np.concatenate([part.numpy() for part in variable.variables])
        same = np.testing.assert_array_equal
        same(parts, right)
        same(variable.numpy(), right)
        same(np.asarray(variable), right)
        same(np.asarray(variable, np.float32), right.astype(np.float32))
        same(variable * 2 + 1, right * 2 + 1)
        same(right.T @ variable, right.T @ right)
        for index in (
            slice(2, 9),
            slice(None, None, -3),
            slice(20, 30),
            -1,
            0,
            (slice(1, 12, 5), 2),
            (4, slice(None, 2)),
            (7, 1),
            np.array([1, 12, 1]),
            (4, None, [0, 2]),
            ...,
            (),
            None,
            (..., 1),
        ):
            same(variable[index], right[index], err_msg=str(index))
        refusal(IndexError, "row 13", lambda: variable[13])
        assert len(variable) == 13
        assert variable.shape == (13, 3)
        assert repr(variable) == "<ShardedVariable 'table' float64[13, 3] in 5 parts>"
        return True

    partitioner = FixedShardsPartitioner(5)
    assert all(run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner))


@places
def test_it_is_assigned_as_a_whole_and_in_parts(comm, server):
    def work(strategy):
        if server == "far":
            on_far_servers(strategy)
        number, variable, right = number_of(strategy), Variable(table()), table()
        variable.assign_add(table() + number)
        together_after(strategy)
        right = right + sum(table() + each for each in range(len(strategy.roles.workers)))
        np.testing.assert_array_equal(variable.numpy(), right)
        together(strategy)
        if strategy.is_chief:
            variable.variables[1].assign(np.full((3, 3), -1.0))
            right[3:6] = -1
            np.testing.assert_array_equal(variable.numpy(), right)
            variable.assign(2 * table())
        together_after(strategy)
        return variable.numpy()

    partitioner = FixedShardsPartitioner(5)
    for value in run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner):
        np.testing.assert_array_equal(value, 2 * table())


def together_after(strategy):
    """Synchronize the workers when their pushes are applied."""
    strategy.worker.client.fence()
    together(strategy)


@places
@pytest.mark.parametrize("shards", [1, 4])
def test_only_the_requested_rows_are_sent(comm, server, shards):
    def work(strategy):
        if server == "far":
            on_far_servers(strategy)
        variable = Variable(table(1000, 5))
        moved = []
        pull = strategy.worker.client.pull
        strategy.worker.client.pull = lambda wanted: (
            moved.extend(out.nbytes for _, out, _ in wanted) or pull(wanted)
        )
        ids = np.array([[3, 999, 3], [500, 250, 0]])
        rows = embedding_lookup(variable, ids)
        np.testing.assert_array_equal(rows, table(1000, 5)[ids])
        assert sum(moved) == rows.nbytes
        none = embedding_lookup(variable, np.zeros((0, 2), np.int64))
        assert none.shape == (0, 2, 5)
        refusal(ValueError, "row 1000", embedding_lookup, variable, [1000])
        refusal(ValueError, "row -1", embedding_lookup, variable, [-1])
        refusal(TypeError, "must be integers", embedding_lookup, variable, [0.5])
        return True

    partitioner = FixedShardsPartitioner(shards)
    assert all(run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner))


SCATTERED = ["add", "sub", "mul", "div", "min", "max", "update"]


@pytest.mark.parametrize("shards", [1, 4])
def test_sparse_changes_are_those_of_one_array(comm, shards):
    slices = IndexedSlices(np.arange(1.0, 16.0).reshape(5, 3), [12, 4, 12, 0, 7])
    right = Variable(table())
    for kind in SCATTERED:
        getattr(right, f"scatter_{kind}")(slices)

    def work(strategy):
        variable = Variable(table())
        if strategy.is_chief:
            pushed = []
            push = strategy.worker.client._rpc.push
            strategy.worker.client._rpc.push = lambda server, request, arrays: (
                pushed.extend(arrays) or push(server, request, arrays)
            )
            for kind in SCATTERED:
                getattr(variable, f"scatter_{kind}")(slices)
            rows = sum(len(array) for array in pushed if array.dtype == np.float64)
            assert rows == 5 * len(SCATTERED)
        together_after(strategy)
        return variable.numpy()

    partitioner = FixedShardsPartitioner(shards)
    for value in run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner):
        np.testing.assert_array_equal(value, right.numpy())


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(
    "make", [optimizers.SGD, lambda: optimizers.SGD(0.1, 0.9), optimizers.Adam]
)
def test_sparse_gradients_give_the_numbers_of_the_default_strategy(comm, make, shards):
    def train(run):
        variable, optimizer = Variable(table()), make()
        for step in range(6):
            rows = np.array([step, 12, step, 2 * step])
            slices = IndexedSlices(variable.numpy()[rows] + step, rows)
            run(lambda given: optimizer.apply_gradients([(given, variable)]), args=(slices,))
        return variable.numpy()

    right = train(strategies.get_strategy().run)

    def work(strategy):
        if strategy.is_chief:
            value = train(strategy.run)
            together(strategy)
            return value
        together(strategy)
        variable = Variable(table())
        return variable.numpy()

    partitioner = FixedShardsPartitioner(shards)
    for value in run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner):
        assert value.tobytes() == right.tobytes()


@pytest.mark.parametrize("shards", [None, 4])
def test_optimizers_are_saved_and_restored_whole(comm, shards):
    """Slots are stored on the servers: the chief pulls them, and restores them for all workers."""
    kept = Variable(table())
    reference = optimizers.Adam(0.1)
    for step in range(5):
        reference.apply_gradients([(table() + step, kept)])
    saved, value = reference.saved_tensors(), kept.numpy()
    for step in range(3):
        reference.apply_gradients([(table() - step, kept)])

    def work(strategy):
        variable, fresh = Variable(value), optimizers.Adam(0.5)
        fresh.restore_tensors(saved)
        together(strategy)
        workers = len(strategy.roles.workers)
        for step in range(3):
            if step % workers == number_of(strategy):
                pairs = [(table() - step, variable)]
                strategy.run(fresh.apply_gradients, args=(pairs,))
            together_after(strategy)
        ended, tensors = variable.numpy(), fresh.saved_tensors()
        together(strategy)
        # Existing slots are replaced.
        fresh.restore_tensors(saved)
        together_after(strategy)
        return ended, tensors, fresh.saved_tensors()

    partitioner = shards and FixedShardsPartitioner(shards)
    wanted = reference.saved_tensors()
    results = run_workers(comm, servers_in(comm), work, variable_partitioner=partitioner)
    for ended, tensors, again in results[:3]:
        assert ended.tobytes() == kept.numpy().tobytes()
        for name in wanted:
            np.testing.assert_array_equal(tensors[name], wanted[name], err_msg=name)
            np.testing.assert_array_equal(again[name], saved[name], err_msg=name)


def test_a_partitioner_that_cannot_be_followed(comm):
    def work(strategy):
        refusal(ValueError, "variable_partitioner gave", Variable, table())
        return Variable(1.0).numpy()

    results = run_workers(comm, 1, work, variable_partitioner=lambda shape, dtype: [1, 3])
    assert results == [1.0] * (comm.size - 1)


@pytest.mark.ranks(2)
def test_small_variables_stay_whole(comm):
    def work(strategy):
        return type(Variable(table())), type(Variable(table(1 << 12, 8)))

    partitioner = MinSizePartitioner(64 << 10, max_shards=3)
    results = run_workers(comm, 1, work, variable_partitioner=partitioner)
    assert results == [(Variable, ShardedVariable)]
