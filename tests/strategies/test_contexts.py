"""Scopes, `run` and the current strategy: §2.3 of tf_semantics.md."""

import threading

import numpy as np
import pytest

import strategies
from strategies import (
    PerReplica,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from tests.strategies.support import lone_strategy, on_ranks, refusal

CROSS_REPLICA = r"Strategy\.\w+(\(\))? requires a cross-replica context.*inside `run`"


@pytest.fixture
def one():
    return lone_strategy()


@pytest.fixture
def other():
    return lone_strategy()


@pytest.fixture(autouse=True)
def stack_is_left_clean():
    yield
    left = has_strategy()
    strategies.experimental_set_strategy(None)
    assert not left


def here():
    """The results of all functions that return the current context."""
    return get_strategy(), get_replica_context(), in_cross_replica_context(), has_strategy()


# --- the default strategy ------------------------------------------------------------------------


def test_outside_of_every_scope_the_default_strategy_is_one_replica():
    default, replica, crossing, has = here()
    assert (crossing, has) == (False, False)
    assert get_strategy() is default
    assert replica.strategy is default
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)
    assert (default.num_replicas_in_sync, default.is_chief) == (1, True)
    assert default.cluster_resolver is None


def test_the_default_strategy_distributes_nothing():
    default, value, dataset = get_strategy(), object(), (batch for batch in [1])
    assert default.reduce("mean", value, axis=None) is value
    assert default.experimental_distribute_dataset(dataset) is dataset
    assert default.distribute_datasets_from_function(lambda context: [context]) == [
        strategies.InputContext(1, 0, 1)
    ]
    assert default.reduce("mean", [1, 2, 6], axis=()) == [1, 2, 6]


def test_the_default_strategy_refuses_ops_and_arguments_as_the_others_do():
    default = get_strategy()
    refusal(ValueError, "reduce_op='max': must be ReduceOp.SUM", default.reduce, "max", 1, None)
    refusal(ValueError, "args=5: must be a tuple or list", default.run, print, 5)


def test_the_default_strategys_scope_and_run_stay_in_the_default_context():
    default = get_strategy()
    outside = (default, False, False)
    with default.scope(), default.scope():
        strategy, replica, *rest = here()
        assert (strategy, *rest) == outside
        assert replica is not None
        strategy, replica, *rest = default.run(here)
        assert (strategy, *rest) == outside
        assert default.run(default.run, (lambda *a, **k: (a, k), [1], {"b": 2})) == ((1,), {"b": 2})


def test_the_merge_call_of_the_default_strategy_is_no_other_strategy():
    merged = get_replica_context().merge_call(lambda strategy, *_: (strategy, *here()), (1,))
    assert merged == (get_strategy(), get_strategy(), None, True, False)


def test_the_default_scope_must_not_nest(one):
    default = get_strategy()
    with one.scope():
        refusal(RuntimeError, "Must not nest", default.scope)
    with default.scope(), one.scope():
        assert get_strategy() is one


# --- scope and run -------------------------------------------------------------------------------


def test_a_scope_is_cross_replica_and_nests_in_itself(one):
    with one.scope() as entered:
        assert entered is None
        with one.scope():
            assert here() == (one, None, True, True)
        assert here() == (one, None, True, True)
    assert not has_strategy()


def test_scopes_of_different_strategies_do_not_mix(one, other):
    with one.scope():
        text = refusal(RuntimeError, "Mixing different", other.scope)
        assert repr(other) in text
        assert repr(one) in text
        assert here() == (one, None, True, True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_run_is_one_replica_with_or_without_a_scope(size):
    def body(strategy):
        def ids():
            replica = get_replica_context()
            assert here() == (strategy, replica, False, True)
            return replica.replica_id_in_sync_group, replica.num_replicas_in_sync

        without = strategy.run(ids)
        with strategy.scope():
            within = strategy.run(ids)
            assert here() == (strategy, None, True, True)
        return without, within

    assert on_ranks(size, body) == [((rank, size),) * 2 for rank in range(size)]


@pytest.mark.parametrize("args", [(1, 2), [1, 2]])
def test_run_passes_its_arguments_and_returns_what_the_function_does(one, args):
    result = object()
    assert one.run(lambda a, b, c: (a, b, c, result), args, {"c": 3}) == (1, 2, 3, result)
    assert one.run(lambda: result) is result


@pytest.mark.parametrize("args", [5, "ab", {1}, {"a": 1}, None, iter([1])])
def test_run_takes_a_tuple_or_a_list(one, args):
    refusal(ValueError, r"args=.*: must be a tuple or list", one.run, print, args)
    assert not has_strategy()


CALLS = {
    "scope": lambda strategy: strategy.scope(),
    "run": lambda strategy: strategy.run(here),
    "reduce": lambda strategy: strategy.reduce("sum", 1, axis=None),
    "gather": lambda strategy: strategy.gather([np.ones(1)], axis=0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("inner", ["same", "other"])
def test_what_is_refused_inside_run(one, other, name, inner):
    strategy = one if inner == "same" else other

    def replica():
        text = refusal(RuntimeError, CROSS_REPLICA, CALLS[name], strategy)
        assert f"Strategy.{name}" in text
        return get_replica_context() is not None

    assert one.run(replica)


MIXING = {name: call for name, call in CALLS.items() if name != "scope"}


@pytest.mark.parametrize("name", MIXING)
def test_a_strategy_is_not_used_in_the_scope_of_another(one, other, name):
    with one.scope():
        text = refusal(RuntimeError, "Mixing different strategies", MIXING[name], other)
        assert f"Strategy.{name} of {other!r}" in text
        assert repr(one) in text
        MIXING[name](one)
        assert here() == (one, None, True, True)
    MIXING[name](other)


def test_a_strategy_is_not_used_in_the_merge_call_of_another(one, other):
    def merged(strategy):
        refusal(RuntimeError, "Mixing different", other.reduce, "sum", 1, None)
        return strategy.reduce("sum", 2, axis=None)

    assert one.run(lambda: get_replica_context().merge_call(merged)) == 2


def test_a_scope_made_before_is_refused_inside_run_as_well(one, other):
    early, foreign = one.scope(), other.scope()
    one.run(lambda: refusal(RuntimeError, CROSS_REPLICA, early.__enter__))
    with one.scope():
        refusal(RuntimeError, "Mixing different", foreign.__enter__)


def test_the_default_strategy_inside_run(one):
    default = get_strategy()
    one.run(lambda: refusal(RuntimeError, CROSS_REPLICA, default.reduce, "sum", [1], 0))
    one.run(lambda: refusal(RuntimeError, "Must not nest", default.scope))


def test_a_replica_reduces_and_gathers_nests_of_containers(one):
    value = PerReplica([(np.ones(2), {"a": np.ones((3, 1))})])

    def program():
        context = get_replica_context()
        return context.all_reduce("sum", value), context.all_gather(value, axis=0)

    for pair, named in one.run(program):
        np.testing.assert_array_equal(pair, np.ones(2))
        np.testing.assert_array_equal(named["a"], np.ones((3, 1)))


def test_a_merge_call_is_cross_replica(one):
    def merged(strategy, *arguments, **named):
        assert here() == (one, None, True, True)
        return strategy.reduce("sum", 4.0, axis=None), arguments, named

    def replica():
        result = get_replica_context().merge_call(merged, args=(1,), kwargs={"b": 2})
        assert get_replica_context() is not None
        return result

    assert one.run(replica) == (4.0, (1,), {"b": 2})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_exceptions_restore_the_stack(one, error):
    def fail(*_):
        raise error("inside")

    def failing_merge():
        with pytest.raises(error):
            get_replica_context().merge_call(fail)
        return in_cross_replica_context()

    with one.scope():
        with pytest.raises(error), one.scope():
            fail()
        assert here() == (one, None, True, True)
        with pytest.raises(error):
            one.run(fail)
        assert here() == (one, None, True, True)
        assert one.run(failing_merge) is False


def test_each_thread_has_a_stack_of_its_own(one):
    seen = []
    with one.scope():
        thread = threading.Thread(target=lambda: seen.append(has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


# --- experimental_set_strategy -------------------------------------------------------------------


def test_a_set_strategy_stays_until_it_is_replaced(one, other):
    for strategy in (one, other):
        strategies.experimental_set_strategy(strategy)
        assert here() == (strategy, None, True, True)
        with strategy.scope():
            assert here() == (strategy, None, True, True)
        assert strategy.run(in_cross_replica_context) is False
    refusal(RuntimeError, "Mixing different", one.scope)
    strategies.experimental_set_strategy(None)
    assert not has_strategy()


def test_setting_the_default_strategy_is_setting_none(one):
    default = get_strategy()
    strategies.experimental_set_strategy(one)
    strategies.experimental_set_strategy(default)
    assert (get_strategy(), has_strategy(), in_cross_replica_context()) == (default, False, False)


@pytest.mark.parametrize("before", [False, True])
def test_a_strategy_is_not_set_inside_a_scope_or_run(one, other, before):
    if before:
        strategies.experimental_set_strategy(one)
    for wanted in (one, other, None):
        expected = (RuntimeError, "inside a strategy's scope", strategies.experimental_set_strategy)
        with one.scope():
            refusal(*expected, wanted)
        one.run(refusal, (*expected, wanted))
    assert has_strategy() is before
    strategies.experimental_set_strategy(None)
