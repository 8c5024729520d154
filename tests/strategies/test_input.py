"""Distributed datasets: §2.4 and §2.5 of tf_semantics.md."""

from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import InputContext
from tests.strategies.support import lone_strategy, on_ranks, refusal

Example = namedtuple("Example", "image label")


def distributed(size, batches_of):
    """Each rank's batches of its `batches_of(rank)`, as a list; two iterations."""

    def body(strategy):
        dataset = strategy.experimental_distribute_dataset(batches_of(strategy.communicator.rank))
        first, second = list(dataset), list(dataset)
        assert len(first) == len(second)
        return first

    return on_ranks(size, body)


def as_lists(ranks):
    return [[batch.tolist() for batch in batches] for batches in ranks]


# --- InputContext --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "batch", "expected"), [(2, 0, 0), (2, -4, -2), (4, 64, 16), (1, 7, 7), (3, 9, 3)]
)
def test_the_batch_size_of_a_replica(replicas, batch, expected):
    context = InputContext(num_replicas_in_sync=replicas)
    assert context.get_per_replica_batch_size(batch) == expected


@pytest.mark.parametrize(("replicas", "batch"), [(2, 5), (3, 4), (4, 2), (2, -3)])
def test_a_batch_size_that_leaves_a_remainder(replicas, batch):
    context = InputContext(num_replicas_in_sync=replicas)
    text = refusal(ValueError, "global_batch_size", context.get_per_replica_batch_size, batch)
    expected = f"global_batch_size={batch}: must be a multiple of the {replicas} replicas"
    assert text == expected


def test_an_input_context_is_one_pipeline_by_default():
    assert InputContext() == InputContext(1, 0, 1)


# --- global batches ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "length", "lengths"),
    [
        (3, 4, [2, 2, 0]),
        (2, 10, [5, 5]),
        (2, 6, [3, 3]),
        (2, 5, [3, 2]),
        (4, 5, [2, 2, 1, 0]),
        (4, 1, [1, 0, 0, 0]),
        (3, 0, [0, 0, 0]),
        (1, 3, [3]),
    ],
)
def test_a_batch_is_cut_into_contiguous_parts_of_equal_length(size, length, lengths):
    batch = np.arange(100, 100 + length)
    parts = distributed(size, lambda rank: [batch])
    assert [[len(part) for part in each] for each in parts] == [[each] for each in lengths]
    np.testing.assert_array_equal(np.concatenate([each[0] for each in parts]), batch)


def test_the_last_batch_of_six_is_not_four_and_two():
    batches = [np.arange(8), np.arange(8, 14)]
    assert as_lists(distributed(2, lambda rank: batches)) == [
        [[0, 1, 2, 3], [8, 9, 10]],
        [[4, 5, 6, 7], [11, 12, 13]],
    ]


def test_batches_keep_structure_dtype_and_trailing_shape():
    images = np.zeros((3, 2, 5), np.float32)
    batch = {"a": Example(images, np.arange(3, dtype=np.int8)), "b": [np.zeros((3, 0), bool)]}
    for rank, (part,) in enumerate(distributed(4, lambda rank: [batch])):
        assert list(part) == ["a", "b"]
        assert type(part["a"]) is Example
        image, label = part["a"]
        rows = [1, 1, 1, 0][rank]
        assert (image.shape, image.dtype) == ((rows, 2, 5), np.float32)
        assert (label.tolist(), label.dtype) == ([rank][:rows], np.int8)
        assert (part["b"][0].shape, part["b"][0].dtype) == ((rows, 0), np.bool_)


def test_a_dataset_can_be_iterated_again():
    class Counting:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            yield np.array([self.epochs])

    dataset = lone_strategy().experimental_distribute_dataset(Counting())
    assert [next(iter(dataset)).tolist() for _ in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("once", [(b for b in []), iter([]), zip([]), map(len, [])])
def test_what_can_be_iterated_only_once_is_refused(once):
    strategy = lone_strategy()
    match = f"dataset is a {type(once).__name__}, which can be iterated only once: must give a new"
    refusal(TypeError, match, strategy.experimental_distribute_dataset, once)
    refusal(TypeError, match, strategy.distribute_datasets_from_function, lambda context: once)


def test_a_dataset_is_not_divided_twice():
    distribute = lone_strategy().experimental_distribute_dataset
    refusal(TypeError, "must be one that is not distributed yet", distribute, distribute([]))


def test_a_dataset_must_be_iterable():
    refusal(TypeError, "int", lone_strategy().experimental_distribute_dataset, 5)


def test_arrays_of_unequal_lengths_are_no_batch():
    dataset = lone_strategy().experimental_distribute_dataset([(np.zeros(3), np.zeros((2, 3)))])
    match = r"a batch has arrays of lengths \[2, 3\]: must be of one length on axis 0"
    refusal(ValueError, match, list, dataset)


@pytest.mark.parametrize("leaf", [np.array(3.0), 5, None])
def test_what_has_no_axis_is_no_batch(leaf):
    dataset = lone_strategy().experimental_distribute_dataset([(np.zeros(3), leaf)])
    refusal(ValueError, "a batch has .* must be arrays with an axis 0", list, dataset)


# --- one end on all ranks ------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[3, 1], [1, 3], [0, 2], [2, 0], [0, 0], [1, 0, 2], [0, 0, 1]])
def test_ranks_whose_data_ends_early_get_empty_batches(counts):
    def batches_of(rank):
        return [{"x": np.full((2, 3), rank, np.int16)} for _ in range(counts[rank])]

    def body(strategy):
        rank = strategy.communicator.rank
        dataset = strategy.distribute_datasets_from_function(lambda context: batches_of(rank))
        return list(dataset)

    for rank, batches in enumerate(on_ranks(len(counts), body)):
        assert len(batches) == max(counts)
        for step, batch in enumerate(batches):
            rows = 2 if step < counts[rank] else 0
            assert (batch["x"].shape, batch["x"].dtype) == ((rows, 3), np.int16)
            assert (batch["x"] == rank).all()


def test_global_batches_may_end_early_on_a_rank_too():
    batches = [np.arange(4.0), np.arange(4.0, 8.0)]
    parts = as_lists(distributed(2, lambda rank: batches[: rank + 1]))
    assert parts == [[[0.0, 1.0], []], [[2.0, 3.0], [6.0, 7.0]]]


def test_after_an_end_the_ranks_are_still_in_step():
    def body(strategy):
        rank = strategy.communicator.rank
        list(strategy.experimental_distribute_dataset([np.zeros(1)] * rank))
        return float(strategy.reduce("sum", rank, axis=None))

    assert on_ranks(3, body) == [3.0] * 3


def test_two_datasets_may_be_iterated_together():
    def body(strategy):
        rank = strategy.communicator.rank
        short = strategy.experimental_distribute_dataset([np.arange(3)] * 2)
        long = strategy.distribute_datasets_from_function(lambda context: [np.full(1, rank)] * 3)
        return [(len(one), other.tolist()) for one, other in zip(short, long, strict=False)]

    assert on_ranks(3, body) == [[(1, [rank])] * 2 for rank in range(3)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_function_is_called_once_with_this_ranks_context(size):
    def body(strategy):
        contexts = []

        def dataset_of(context):
            contexts.append(context)
            return [np.arange(context.get_per_replica_batch_size(6)) + context.input_pipeline_id]

        dataset = strategy.distribute_datasets_from_function(dataset_of)
        batches = [batch.tolist() for batch in (*dataset, *dataset)]
        return contexts, batches

    for rank, (contexts, batches) in enumerate(on_ranks(size, body)):
        assert contexts == [InputContext(size, rank, size)]
        assert batches == [list(range(rank, rank + 6 // size))] * 2


# --- any lengths ---------------------------------------------------------------------------------


@given(st.integers(1, 6), st.lists(st.integers(0, 12), max_size=4))
def test_the_parts_of_all_ranks_are_the_batch(size, lengths):
    starts = np.cumsum([0, *lengths])
    batches = [np.arange(start, start + n) for start, n in zip(starts, lengths, strict=False)]
    ranks = distributed(size, lambda rank: [(batch, -batch) for batch in batches])
    for step, batch in enumerate(batches):
        parts = [rank[step] for rank in ranks]
        np.testing.assert_array_equal(np.concatenate([part for part, _ in parts]), batch)
        assert all((part == -other).all() for part, other in parts)
        longest = -(-len(batch) // size)
        assert all(
            len(part) in (longest, len(batch) - rank * longest, 0)
            for rank, (part, _) in enumerate(parts)
        )
    assert all(len(rank) == len(batches) for rank in ranks)


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
def test_nothing_of_the_ranks_own_datasets_is_lost(lengths):
    def body(strategy):
        rank = strategy.communicator.rank
        own = [np.full(length, rank) for length in lengths[rank]]
        return list(strategy.distribute_datasets_from_function(lambda context: own))

    for rank, batches in enumerate(on_ranks(len(lengths), body)):
        steps = max(map(len, lengths))
        padded = [*lengths[rank], *[0] * steps][:steps]
        assert [batch.tolist() for batch in batches] == [[rank] * length for length in padded]
