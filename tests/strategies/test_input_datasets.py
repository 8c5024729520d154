"""Datasets of arrays: batch, shuffle and repeat as in `tf.data`, and the same order on ranks."""

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import get_strategy
from strategies.input import ArraysDataset, FileDataset, InputOptions, make_numpy_dataset
from tests.strategies.support import lone_strategy, on_ranks, refusal

Example = namedtuple("Example", "image label")


def numbers(count):
    return make_numpy_dataset(np.arange(count))


def lists(dataset):
    return [batch.tolist() for batch in dataset]


def rows(batches):
    return [row for batch in batches for row in batch]


# --- arrays --------------------------------------------------------------------------------------


def test_rows_of_a_nest_of_arrays():
    images = np.arange(12, dtype=np.float32).reshape(3, 4)
    dataset = get_strategy().experimental_make_numpy_dataset(
        {"x": Example(images, np.array([5, 6, 7], np.int8)), "y": (np.zeros((3, 0)),)},
        session=None,
    )
    assert isinstance(dataset, ArraysDataset)
    for number, row in enumerate(dataset):
        assert type(row["x"]) is Example
        np.testing.assert_array_equal(row["x"].image, images[number])
        assert (row["x"].image.dtype, row["x"].label.dtype) == (np.float32, np.int8)
        assert row["x"].label == 5 + number
        assert row["y"][0].shape == (0,)
    assert number == 2


def test_batches_of_rows():
    batches = list(make_numpy_dataset((np.arange(10).reshape(5, 2), np.arange(5.0))).batch(2))
    assert [(x.shape, y.tolist()) for x, y in batches] == [
        ((2, 2), [0, 1]),
        ((2, 2), [2, 3]),
        ((1, 2), [4]),
    ]
    assert lists(numbers(5).batch(2, drop_remainder=True)) == [[0, 1], [2, 3]]
    assert lists(numbers(4).batch(2).batch(2)) == [[[0, 1], [2, 3]]]


def test_a_batch_is_no_view_of_the_arrays():
    array = np.arange(4)
    (batch,) = make_numpy_dataset(array).batch(4)
    batch[:] = 0
    assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ((np.zeros(3), np.zeros(2)), r"lengths \[2, 3\]: must be of one length on axis 0"),
        ((np.zeros(3), 5), "must be arrays with an axis 0"),
        ({}, r"lengths \[\]"),
    ],
)
def test_arrays_without_rows_in_common(arrays, match):
    refusal(ValueError, match, lone_strategy().experimental_make_numpy_dataset, arrays)


def test_repeat_before_batch_gives_no_short_batch():
    assert lists(numbers(3).repeat(2).batch(2)) == [[0, 1], [2, 0], [1, 2]]
    assert lists(numbers(3).batch(2).repeat(2)) == [[0, 1], [2], [0, 1], [2]]
    assert lists(numbers(3).repeat(0).batch(2)) == []


@pytest.mark.parametrize("count", [None, -1])
def test_repeat_without_end(count):
    endless = iter(numbers(3).repeat(count).batch(2))
    assert [next(endless).tolist() for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]


def test_nothing_repeated_without_end_is_nothing():
    assert lists(numbers(0).repeat().batch(2)) == []


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: numbers(3).batch(0), ValueError, "batch_size=0: must be an integer of at least 1"),
        (lambda: numbers(3).batch(2.0), TypeError, "batch_size=2.0: must be an integer"),
        (lambda: numbers(3).shuffle(0), ValueError, "buffer_size=0: must be an integer of at"),
        (lambda: numbers(3).shuffle(2.5), TypeError, "buffer_size=2.5: must be an integer"),
        (lambda: numbers(3).repeat(2.5), TypeError, "count=2.5: must be an integer of at least -1"),
        (lambda: numbers(3).repeat(-2), ValueError, "count=-2: must be an integer of at least -1"),
        (lambda: numbers(3).repeat().batch(2).shuffle(), ValueError, "buffer_size=None: must be a"),
        (lambda: InputOptions(experimental_per_replica_buffer_size=0.5), TypeError, "=0.5: "),
    ],
)
def test_invalid_numbers(call, error, match):
    refusal(error, match, call)


def test_elements_of_files_are_stacked():
    dataset = FileDataset([1, 2], lambda path: [(path, np.full(2, path))] * 2)
    batches = [(x.tolist(), y.tolist()) for x, y in dataset.batch(3)]
    assert batches == [([1, 1, 2], [[1, 1], [1, 1], [2, 2]]), ([2], [[2, 2]])]


# --- orders --------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.one_of(st.none(), st.integers(1, 50)), st.integers(-3, 3))
def test_a_shuffle_is_a_permutation_within_its_buffer(count, size, seed):
    order = [int(row) for row in numbers(count).shuffle(size, seed=seed)]
    assert sorted(order) == list(range(count))
    assert all(row <= place + (size or count) - 1 for place, row in enumerate(order))


def test_a_shuffle_shuffles():
    order = [int(row) for row in numbers(50).shuffle(seed=1)]
    assert order != sorted(order)
    assert order != [int(row) for row in numbers(50).shuffle(seed=2)]
    assert order == [int(row) for row in numbers(50).shuffle(1000, seed=np.int64(1))]


def test_each_iteration_and_each_repeat_has_another_order():
    dataset = numbers(20).shuffle(seed=1).repeat(2).batch(20)
    orders = [tuple(order) for order in [*lists(dataset), *lists(dataset)]]
    assert len(set(orders)) == 4
    still = numbers(20).shuffle(seed=1, reshuffle_each_iteration=False).repeat(2).batch(20)
    assert len({tuple(order) for order in [*lists(still), *lists(still)]}) == 1


def test_without_a_seed_the_order_is_by_chance():
    orders = {tuple(lists(numbers(30).shuffle().batch(30))[0]) for _ in range(3)}
    assert len(orders) == 3


def distributed(size, make, **options):
    """Each rank's batches in two epochs, after one that ended early."""

    def body(strategy):
        given = InputOptions(**options)
        dataset = strategy.experimental_distribute_dataset(make(), given)
        next(iter(dataset))  # ended early: read-ahead threads have then read differently far
        return [lists(dataset), lists(dataset)]

    return on_ranks(size, body)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("repeats", [1, 3])
def test_ranks_that_split_batches_shuffle_equally_without_a_seed(size, depth, repeats):
    def make():
        return numbers(20).shuffle().repeat(repeats).batch(5)

    ranks = distributed(size, make, experimental_per_replica_buffer_size=depth)
    for epoch in range(2):
        seen = sorted(row for rank in ranks for row in rows(rank[epoch]))
        assert seen == sorted(list(range(20)) * repeats)
    assert ranks[0][0] != ranks[0][1]


@pytest.mark.parametrize("seed", [None, 5])
def test_seed_offsets_give_every_rank_a_different_order(seed):
    def make():
        return numbers(12).shuffle(seed=seed).batch(6)

    ranks = distributed(3, make, sharding="seed_offset")
    for epoch in range(2):
        orders = [rows(rank[epoch]) for rank in ranks]
        assert [sorted(order) for order in orders] == [list(range(12))] * 3
        assert len(set(map(tuple, orders))) == 3
        assert all(len(batch) == 2 for rank in ranks for batch in rank[epoch])


def test_a_seed_offset_is_the_rank():
    ranks = distributed(2, lambda: numbers(12).shuffle(seed=5).batch(2), sharding="seed_offset")
    alone = numbers(12).shuffle(seed=6).batch(1)
    lists(alone)  # the iteration that ended early
    assert ranks[1][0] == lists(alone)


@pytest.mark.parametrize("make", [lambda: numbers(4).batch(2), lambda: [np.arange(2)]])
def test_seed_offsets_need_a_shuffle(make):
    def body(strategy):
        distribute, options = strategy.experimental_distribute_dataset, InputOptions
        return refusal(ValueError, None, distribute, make(), options(sharding="seed_offset"))

    first, second = on_ranks(2, body)
    assert first == second
    assert first.startswith("sharding='seed_offset': the dataset of rank 0, a ")
    assert "has no shuffle that takes a seed: must have a method with_seed(seed, offset)" in first


def test_any_dataset_may_take_a_seed():
    class Seeded(list):
        def with_seed(self, seed, offset):
            return [batch + 100 * offset for batch in self]

    ranks = distributed(2, lambda: Seeded([np.arange(2)]), sharding="seed_offset")
    assert ranks == [[[[0], [1]]] * 2, [[[100], [101]]] * 2]


def test_separate_pipelines_are_shuffled_independently():
    ranks = distributed(2, lambda: numbers(30).shuffle().batch(30), auto_shard_policy="OFF")
    first, second = (rows(rank[0]) for rank in ranks)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
