"""`strategy.extended`, and the methods that it shares with the replica context."""

from collections import namedtuple

import numpy as np
import pytest

from collectives import OpMismatchError, ShapeMismatchError
from strategies import Variable, get_replica_context, get_strategy, in_cross_replica_context
from strategies.core.options import CommunicationOptions
from strategies.core.values import PerReplica
from tests.strategies.support import lone_strategy, mirrored, recorded, refusal, same_refusal

in_a_world = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
Pair = namedtuple("Pair", "first second")
RING = CommunicationOptions(implementation="RING")


def world(function):
    for mark in in_a_world:
        function = mark(function)
    return function


# --- reductions ----------------------------------------------------------------------------------


@world
@pytest.mark.parametrize("options", [None, RING])
def test_reduce_to(comm, strategy, options):
    value = Pair(np.array([comm.rank, 1]), PerReplica([comm.rank + 0.5]))
    with recorded() as calls:
        total = strategy.extended.reduce_to("sum", value, "CPU:0", options)
        mean = strategy.extended.reduce_to("mean", value, value, options)
    assert total.first.tolist() == [sum(range(comm.size)), comm.size]
    assert total.second == sum(range(comm.size)) + comm.size / 2
    assert mean.first.tolist() == [(comm.size - 1) / 2, 1.0]
    assert {call.algorithm for call in calls} == {"ring" if options else None}


@world
@pytest.mark.parametrize("options", [None, RING])
def test_batch_reduce_to(comm, strategy, options):
    pairs = [(np.full(2, comm.rank), None), (PerReplica([np.float32(1)]), "CPU:0")]
    with recorded() as calls:
        first, second = strategy.extended.batch_reduce_to("SUM", iter(pairs), options)
    assert first.tolist() == [sum(range(comm.size))] * 2
    assert (second, second.dtype) == (comm.size, np.float32)
    assert {call.algorithm for call in calls} == {"ring" if options else None}
    assert strategy.extended.batch_reduce_to("SUM", []) == []


@world
def test_reductions_that_differ_are_refused_on_every_rank(comm, strategy):
    reduce_to = strategy.extended.reduce_to
    wrong = np.ones(2 + comm.rank)
    same_refusal(comm, ShapeMismatchError, r"\(2,\)", reduce_to, "sum", wrong, None)
    op = "mean" if comm.rank else "sum"
    same_refusal(comm, OpMismatchError, "MEAN", reduce_to, op, np.ones(2), None)
    refusal(ValueError, "reduce_op='max'", reduce_to, "max", 1.0, None)
    assert reduce_to("sum", 1.0, None) == comm.size


@world
def test_broadcast_to(comm, strategy):
    given = np.array([comm.rank, 5])
    assert strategy.extended.broadcast_to(given, None).tolist() == [0, 5]
    assert given[0] == comm.rank
    assert strategy.extended.broadcast_to(PerReplica([comm.rank + 2.5]), "CPU:0") == 2.5
    wrong = np.ones(1 + comm.rank)
    same_refusal(
        comm, ShapeMismatchError, r"float64\[1\]", strategy.extended.broadcast_to, wrong, None
    )


@world
def test_the_replicas_reduce_to(comm, strategy):
    def replica():
        value = {"x": float(comm.rank), "y": [np.ones(2)]}
        return get_replica_context().reduce_to("mean", value, "CPU:0", RING)

    with recorded() as calls:
        result = strategy.run(replica)
    assert result["x"] == (comm.size - 1) / 2
    assert result["y"][0].tolist() == [1, 1]
    assert [call.algorithm for call in calls] == ["ring"]


# --- merge_call ----------------------------------------------------------------------------------


@world
def test_a_merge_call_may_use_all_of_them(comm):
    seen = []

    def merge(merged, gradients, *, scale):
        seen.append((merged, in_cross_replica_context(), get_strategy()))
        total = merged.extended.batch_reduce_to("sum", [(each, None) for each in gradients.values])
        merged.extended.update(variable, Variable.assign_add, args=(total[0] * scale,))
        return Pair({"total": total[0]}, gradients)

    with mirrored(comm) as strategy:
        with strategy.scope():
            variable = Variable(1.0)
        mine = PerReplica([np.float64(comm.rank + 1)])

        def replica():
            result = get_replica_context().merge_call(merge, args=[mine], kwargs={"scale": 2})
            assert not in_cross_replica_context()
            return result

        result = strategy.run(replica)
        assert seen == [(strategy, True, strategy)]
    total = comm.size * (comm.size + 1) / 2
    assert result == Pair({"total": total}, mine)
    assert float(variable) == 1 + 2 * total


@world
def test_merge_calls_keep_the_order_of_collectives(comm, strategy):
    def replica():
        context, sums = get_replica_context(), []
        for step in range(3):
            sums.append(float(context.all_reduce("sum", comm.rank * 10.0**step)))
            merged = context.merge_call(lambda s, x: s.reduce("sum", x, axis=None), (step + 1.0,))
            sums.append(float(merged))
        return sums

    ranks = sum(range(comm.size))
    expected = [each for step in range(3) for each in (ranks * 10.0**step, comm.size * (step + 1))]
    assert strategy.run(replica) == expected


CALLS = {
    "all_reduce": lambda context: context.all_reduce("sum", 1.0),
    "reduce_to": lambda context: context.reduce_to("sum", 1.0, None),
    "all_gather": lambda context: context.all_gather(np.ones(1), 0),
    "merge_call": lambda context: context.merge_call(lambda strategy: None),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_context_is_used_where_it_is_in_force(name):
    strategy, other = lone_strategy(), lone_strategy()
    context = strategy.run(get_replica_context)
    call = CALLS[name]
    strategy.run(call, (context,))
    refusal(RuntimeError, "inside `run`, but the context is another", call, context)
    with strategy.scope():
        refusal(RuntimeError, "the context is cross-replica", call, context)
    other.run(lambda: refusal(RuntimeError, "the context is another", call, context))
    merge = get_replica_context
    strategy.run(
        lambda: merge().merge_call(
            lambda _: refusal(RuntimeError, "context is cross-replica", call, context)
        )
    )


# --- updates -------------------------------------------------------------------------------------


@world
@pytest.mark.parametrize("group", [True, False])
def test_update_changes_this_replicas_copy(comm, strategy, group):
    with strategy.scope():
        variable = Variable(np.zeros(2))

    def fn(var, value, *, twice):
        assert in_cross_replica_context()
        var.assign_add(value * 2 if twice else value)
        return float(var[0])

    args, kwargs = (PerReplica([np.array([3.0, 4.0])]),), {"twice": True}
    result = strategy.extended.update(variable, fn, args, kwargs, group=group)
    assert result == (6.0 if group else (6.0,))
    assert variable.numpy().tolist() == [6, 8]
    with strategy.scope():
        strategy.extended.update(variable, fn, args=(np.ones(2),), kwargs={"twice": False})
    assert variable.numpy().tolist() == [7, 9]


def test_update_of_something_else():
    strategy, kept = lone_strategy(), []
    result = strategy.extended.update_non_slot(kept, list.append, (PerReplica([5]),), group=False)
    assert (kept, result) == ([5], (None,))


# --- variables and properties --------------------------------------------------------------------


def test_variables_have_their_strategy():
    strategy, other = lone_strategy(), lone_strategy()
    with strategy.scope():
        variable = Variable(1.0)
    assert strategy.extended.variable_created_in_scope(variable)
    assert not other.extended.variable_created_in_scope(variable)
    assert not strategy.extended.variable_created_in_scope(5)
    assert not strategy.extended.variable_created_in_scope(Variable(1.0))
    assert strategy.extended.value_container(variable) is variable
    match = "was not created in the scope of"
    refusal(ValueError, match, other.extended.update, variable, print)
    refusal(ValueError, match, other.extended.colocate_vars_with(variable).__enter__)


def test_colocated_variables_are_the_strategys():
    strategy = lone_strategy()
    with strategy.scope():
        variable = Variable(1.0)
        with strategy.extended.colocate_vars_with(variable):
            assert Variable(2.0).strategy is strategy
    with strategy.extended.colocate_vars_with(variable):
        assert Variable(2.0).strategy is strategy


@world
def test_answers(comm, strategy):
    extended = strategy.extended
    assert extended.should_checkpoint is extended.should_save_summary is (comm.rank == 0)
    assert extended.worker_devices == extended.parameter_devices == ("/device:CPU:0",)
    assert extended.non_slot_devices([]) == extended.parameter_devices
    assert extended.experimental_between_graph is extended.experimental_should_init is True
    assert extended.experimental_require_static_shapes is False
    assert get_strategy().extended.should_checkpoint is True


def test_call_for_each_replica_runs():
    strategy = lone_strategy()

    def fn(a, b):
        return get_replica_context().strategy, a, b

    assert strategy.extended.call_for_each_replica(fn, (1,), {"b": 2}) == (strategy, 1, 2)


CROSS = {
    "call_for_each_replica": lambda extended: extended.call_for_each_replica(print),
    "reduce_to": lambda extended: extended.reduce_to("sum", 1.0, None),
    "batch_reduce_to": lambda extended: extended.batch_reduce_to("sum", [(1.0, None)]),
    "broadcast_to": lambda extended: extended.broadcast_to(1.0, None),
    "update": lambda extended: extended.update(None, print),
    "update_non_slot": lambda extended: extended.update_non_slot(None, print),
}


@pytest.mark.parametrize("name", CROSS)
def test_what_needs_a_cross_replica_context(name):
    strategy, other = lone_strategy(), lone_strategy()
    call = (CROSS[name], strategy.extended)
    strategy.run(lambda: refusal(RuntimeError, "requires a cross-replica context", *call))
    with other.scope():
        refusal(RuntimeError, "Mixing different", *call)


def test_the_default_strategys_methods():
    extended = get_strategy().extended
    assert extended.reduce_to("mean", [1, 2], None) == [1, 2]
    assert extended.broadcast_to(3.0, None) == 3
    assert extended.update_non_slot([1], len) == 1
    assert extended.call_for_each_replica(lambda a: a, (4,)) == 4
