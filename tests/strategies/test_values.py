"""Containers of one value: created by users, unwrapped by the strategy."""

import numpy as np
import pytest

from strategies import get_replica_context
from strategies.core.values import DistributedValues, Mirrored, PerReplica, local
from tests.strategies.support import lone_strategy, refusal


@pytest.mark.parametrize("kind", [DistributedValues, PerReplica, Mirrored])
def test_a_container_holds_one_value(kind):
    value = object()
    made = kind([value])
    assert made.values == (value,)
    assert isinstance(made, DistributedValues)
    assert repr(kind((5,))) == f"{kind.__name__}(5)"
    refusal(ValueError, "values has 2 entries: must have one", kind, (1, 2))
    refusal(ValueError, "values has 0 entries", kind, ())


def test_local_values():
    given = {"a": PerReplica([1]), "b": [Mirrored([2]), (3, PerReplica([4]))]}
    assert local(given) == {"a": 1, "b": [2, (3, 4)]}
    assert local(PerReplica([[5]])) == [5]
    untouched = {"a": [1]}
    assert local(untouched) is untouched


def test_run_passes_the_values_themselves():
    strategy, shared = lone_strategy(), [1]
    result = strategy.run(
        lambda *args, **kwargs: (args, kwargs),
        (PerReplica([7]), {"x": PerReplica([8])}),
        {"named": PerReplica([9])},
    )
    assert result == ((7, {"x": 8}), {"named": 9})
    (args, _) = strategy.run(lambda *args, **kwargs: (args, kwargs), (shared,))
    assert args[0] is shared
    assert strategy.experimental_local_results(PerReplica([7])) == (7,)
    assert strategy.experimental_local_results([7]) == ([7],)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_reductions_and_gathers_take_them(comm, strategy):
    size, mine = comm.size, PerReplica([np.array([comm.rank, 1])])
    assert strategy.reduce("sum", mine, axis=None).tolist() == [sum(range(size)), size]
    result = strategy.reduce("mean", {"x": mine, "y": Mirrored([2.0])}, axis=None)
    assert result["x"].tolist() == [(size - 1) / 2, 1]
    assert result["y"] == 2
    assert strategy.gather(mine, axis=0).tolist()[::2] == list(range(size))

    def replica():
        context = get_replica_context()
        return context.all_reduce("sum", [mine]), context.all_gather(mine, axis=0)

    (total,), gathered = strategy.run(replica)
    assert total.tolist() == [sum(range(size)), size]
    assert gathered.tolist()[::2] == list(range(size))
