"""A warning where ranks take parts of different global batches; the end as an optional."""

import logging

import numpy as np
import pytest

from strategies import AutoShardPolicy, InputOptions
from tests.slow import slow
from tests.strategies.support import on_ranks

WARNING = "the ranks' global batches differ"


class Shuffled:
    """Ten examples in batches of four, in an order given by the seed; with names."""

    def __init__(self, seed):
        self._seed = seed

    def __iter__(self):
        order = np.random.default_rng(self._seed).permutation(10).astype(np.float32)
        for start in range(0, 10, 4):
            part = order[start : start + 4]
            yield {"x": part, "name": np.array([f"{each}" for each in part], object)}


def rows_seen(strategy, seed, policy=None):
    """This rank's examples in two epochs."""
    data = strategy.experimental_distribute_dataset(
        Shuffled(seed), InputOptions(auto_shard_policy=policy)
    )
    return [float(each) for _ in range(2) for batch in data for each in batch["x"]]


@pytest.mark.parametrize("size", [3, *slow(2)])
@pytest.mark.parametrize("policy", [None, "DATA"])
def test_ranks_that_shuffle_each_by_itself_are_warned_once(size, policy, caplog):
    def body(strategy):
        return rows_seen(strategy, strategy.communicator.rank, policy)

    with caplog.at_level(logging.WARNING, "strategies"):
        seen = np.concatenate(on_ranks(size, body)).tolist()
    assert sorted(seen) != sorted(2 * list(range(10)))  # some are lost, and some are repeated
    assert [WARNING in record.getMessage() for record in caplog.records] == [True]


def test_ranks_whose_orders_differ_later_are_warned(caplog):
    class Later(Shuffled):
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter(Shuffled(self._seed * (self.epochs == 3)))

    def body(strategy):
        data = strategy.experimental_distribute_dataset(Later(strategy.communicator.rank))
        counts = []
        for _ in range(4):
            assert len([batch["x"] for batch in data]) == 3
            strategy.communicator.barrier()
            counts.append(len(caplog.records))
            strategy.communicator.barrier()
        return counts

    with caplog.at_level(logging.WARNING, "strategies"):
        assert on_ranks(3, body) == [[0, 0, 1, 1]] * 3
    assert WARNING in caplog.records[0].getMessage()


def test_ranks_whose_batches_differ_in_number_are_warned(caplog):
    """One has none at all of the second dataset."""

    def body(strategy):
        for most in (2, 0):
            rows = np.arange(10.0)[: None if strategy.communicator.rank else 4 * most]
            batches = [rows[start : start + 4] for start in range(0, len(rows), 4)]
            list(strategy.experimental_distribute_dataset(batches))

    with caplog.at_level(logging.WARNING, "strategies"):
        on_ranks(3, body)
    assert [WARNING in record.getMessage() for record in caplog.records] == [True, True]


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_ranks_that_read_the_same_are_not_warned(size, caplog):
    with caplog.at_level(logging.WARNING, "strategies"):
        seen = np.concatenate(on_ranks(size, lambda strategy: rows_seen(strategy, 5))).tolist()
    assert sorted(seen) == sorted(2 * list(range(10)))
    assert not caplog.records


@pytest.mark.parametrize("size", [3, *slow(2)])
@pytest.mark.parametrize("policy", [AutoShardPolicy.OFF, AutoShardPolicy.HINT])
def test_ranks_that_read_each_for_itself_are_not_warned(size, policy, caplog):
    def body(strategy):
        return rows_seen(strategy, strategy.communicator.rank, policy)

    with caplog.at_level(logging.WARNING, "strategies"):
        for seen in on_ranks(size, body):
            assert sorted(seen) == sorted(2 * list(range(10)))
    assert not caplog.records


@pytest.mark.parametrize("size", [3, *slow(2)])
def test_the_end_as_an_optional_is_at_the_same_step_on_all_ranks(size):
    def body(strategy):
        rank = strategy.communicator.rank
        data = strategy.distribute_datasets_from_function(
            lambda context: [np.full((2, 1), float(rank))] * (rank + 1)
        )
        iterator, lengths = iter(data), []
        while (batch := iterator.get_next_as_optional()).has_value():
            lengths.append(len(batch.get_value()))
        with pytest.raises(ValueError, match="no rank has another batch"):
            batch.get_value()
        assert not iterator.get_next_as_optional().has_value()
        return lengths

    expected = [[2] * (rank + 1) + [0] * (size - rank - 1) for rank in range(size)]
    assert on_ranks(size, body) == expected
