"""AutoShardPolicy, file datasets and rebatching: §2.5 of tf_semantics.md."""

import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.input import (
    AutoShardPolicy,
    DatasetError,
    FileDataset,
    InputOptions,
    Options,
    batch_sizes_for_worker,
    make_numpy_dataset,
)
from strategies.input.rebatching import JoinedBatches, rebatched
from tests.strategies.support import lone_strategy, on_ranks, refusal

OWN_PIPELINE = ["OFF", "HINT"]


def shares(size, make, **options):
    """Each rank's batches of its `make(rank)`, as lists."""

    def body(strategy):
        dataset = make(strategy.communicator.rank)
        options_given = InputOptions(**options) if options else None
        distributed = strategy.experimental_distribute_dataset(dataset, options_given)
        first, second = ([batch.tolist() for batch in distributed] for _ in range(2))
        assert [len(batch) for batch in first] == [len(batch) for batch in second]
        return first

    return on_ranks(size, body)


def refusals(size, error, make, **options):
    """The text of the error that each rank raises; the ranks are usable afterwards."""

    def body(strategy):
        dataset = make(strategy.communicator.rank)
        distribute = strategy.experimental_distribute_dataset
        text = refusal(error, None, distribute, dataset, InputOptions(**options))
        assert strategy.reduce("sum", 1, axis=None) == size
        return text

    return on_ranks(size, body)


def eight_rows():
    """Two global batches of four."""
    return [np.arange(4), np.arange(4, 8)]


def files(count, rows=4):
    """A dataset of `count` files; file i is one batch, of rows 10i, 10i + 1, …"""
    names = [f"part-{number}" for number in range(count)]
    return FileDataset(names, lambda name: [10 * int(name[5:]) + np.arange(rows)])


# --- batch_sizes_for_worker ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "workers", "replicas", "sizes"),
    [
        (4, 3, 1, [[2, 1, 1], [1, 1, 2], [1, 2, 1]]),
        (4, 2, 1, [[2, 2], [2, 2]]),
        (5, 2, 1, [[3, 2], [2, 3]]),
        (1, 3, 1, [[1, 0, 0], [0, 0, 1], [0, 1, 0]]),
        (7, 2, 2, [[2, 2, 2, 1], [2, 1, 2, 2]]),
        (0, 2, 1, [[0, 0], [0, 0]]),
        (6, 1, 1, [[6]]),
    ],
)
def test_batch_sizes_of_the_workers(batch, workers, replicas, sizes):
    for worker in range(workers):
        assert batch_sizes_for_worker(batch, workers, replicas, worker) == sizes[worker]


@given(st.integers(0, 60), st.integers(1, 6), st.integers(1, 4))
def test_batch_sizes_are_tensorflows_four_conditions(batch, workers, replicas):
    sizes = [batch_sizes_for_worker(batch, workers, replicas, w) for w in range(workers)]
    assert all(len(each) == workers * replicas for each in sizes)
    assert all(sum(each) == batch for each in sizes)
    for step in range(workers):
        assert sum(sum(each[step * replicas :][:replicas]) for each in sizes) == batch
    assert max(map(max, sizes)) - min(map(min, sizes)) <= 1


# --- OFF and HINT: every rank's own pipeline -----------------------------------------------------


@pytest.mark.parametrize("policy", OWN_PIPELINE)
def test_three_ranks_take_four_rows_two_one_and_one_at_a_time(policy):
    assert shares(3, lambda rank: eight_rows(), auto_shard_policy=policy) == [
        [[0, 1], [2], [3], [4, 5], [6], [7]],
        [[0], [1], [2, 3], [4], [5], [6, 7]],
        [[0], [1, 2], [3], [4], [5, 6], [7]],
    ]


@pytest.mark.parametrize("policy", OWN_PIPELINE)
def test_two_ranks_take_twice_the_steps_over_the_same_data(policy):
    halves = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shares(2, lambda rank: eight_rows(), auto_shard_policy=policy) == [halves] * 2


def test_rebatching_crosses_the_limits_of_batches():
    batches = [np.arange(8), np.arange(8, 14)]
    own = shares(2, lambda rank: batches, auto_shard_policy="off")[0]
    assert own == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    own = shares(2, lambda rank: [np.arange(5), np.arange(5, 10)], auto_shard_policy="off")
    assert own == [[[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]], [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]]


def test_with_a_batch_smaller_than_the_world_ranks_have_no_rows_in_turn():
    assert shares(3, lambda rank: [np.array([7])], auto_shard_policy="off") == [
        [[7], [], []],
        [[], [], [7]],
        [[], [7], []],
    ]


def test_the_declared_batch_size_counts_not_the_first_batch():
    class Declared(list):
        batch_size = 6

    first_is_short = Declared([np.arange(2), np.arange(2, 8)])
    assert [len(batch) for batch in rebatched(first_is_short, 0, 3, 6)] == [2, 2, 2, 2]
    own = shares(3, lambda rank: first_is_short, auto_shard_policy="off")[0]
    assert own == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rank_whose_data_end_early_gets_empty_batches():
    own = shares(2, lambda rank: eight_rows()[rank:], auto_shard_policy="off")
    assert own == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[4, 5], [6, 7], [], []]]


def test_batches_without_rows_are_passed_over():
    batches = [np.arange(0), np.arange(2), np.arange(0), np.arange(2, 4)]
    assert shares(2, lambda rank: batches, auto_shard_policy="off") == [[[0], [1], [2], [3]]] * 2
    assert shares(2, lambda rank: [np.arange(0)], auto_shard_policy="off") == [[], []]


@given(
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(1, 9)),
    st.data(),
)
def test_rebatching_covers_the_pipeline_exactly_once(lengths, workers, batch_size, data):
    worker = data.draw(st.integers(0, workers - 1))
    starts = np.cumsum([0, *lengths])
    batches = [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=False)]
    parts = [
        (part["x"].tolist(), part["y"][0].tolist())
        for part in rebatched([{"x": b, "y": [-b]} for b in batches], worker, workers, batch_size)
    ]
    rows = [row for part, _ in parts for row in part]
    assert rows == list(range(starts[-1]))
    assert [row for _, part in parts for row in part] == [-row for row in rows]
    of_all = batch_size or next(filter(None, lengths), 0)
    sizes = batch_sizes_for_worker(of_all, workers, 1, worker)
    for step, (part, _) in enumerate(parts[:-1]):
        assert len(part) == sizes[step % workers]


# --- FILE ----------------------------------------------------------------------------------------


def test_file_i_goes_to_rank_i_modulo_the_world():
    assert shares(2, lambda rank: files(3), auto_shard_policy="file") == [
        [[0, 1], [2, 3], [20, 21], [22, 23]],
        [[10, 11], [12, 13], [], []],
    ]
    assert shares(3, lambda rank: files(3), auto_shard_policy="FILE") == [
        [[0, 1], [2], [3]],
        [[10], [11], [12, 13]],
        [[20], [21, 22], [23]],
    ]


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 5))
def test_every_row_of_every_file_goes_to_exactly_one_rank(size, more, rows):
    ranks = shares(size, lambda rank: files(size + more, rows), auto_shard_policy="file")
    for rank, batches in enumerate(ranks):
        own = [row for batch in batches for row in batch]
        expected = range(rank, size + more, size)
        assert own == [10 * file + row for file in expected for row in range(rows)]


def test_too_few_files_are_the_same_error_on_every_rank():
    (text,) = set(refusals(3, ValueError, lambda rank: files(2), auto_shard_policy="FILE"))
    expected = "auto_shard_policy=FILE: 2 files for 3 ranks: each rank needs at least one file"
    assert text == expected


def test_what_isnt_made_of_files_is_the_same_error_on_every_rank():
    def make(rank):
        return files(3) if rank == 0 else eight_rows()

    (text,) = set(refusals(3, ValueError, make, auto_shard_policy="FILE"))
    expected = "auto_shard_policy=FILE: the dataset of rank 1, a list, isn't made of files"
    assert text == expected


def test_ranks_that_list_their_files_in_another_order():
    def make(rank):
        names = ["a", "b"] if rank == 0 else ["b", "a"]
        return FileDataset(names, lambda name: eight_rows())

    (text,) = set(refusals(2, ValueError, make, auto_shard_policy="FILE"))
    assert "the ranks' files, [2, 2] of them, differ in number, name or order" in text


def test_the_folder_of_a_file_may_differ():
    def make(rank):
        return FileDataset([f"/node{rank}/a", f"/node{rank}/b"], lambda path: [np.arange(2)])

    assert shares(2, make, auto_shard_policy="FILE") == [[[0], [1]]] * 2


def test_a_file_dataset_takes_paths_and_a_function():
    refusal(
        TypeError, "files='a.txt' is one path: must be a list of paths", FileDataset, "a.txt", list
    )
    refusal(TypeError, "files=b'ab' is one path", FileDataset, b"ab", list)
    refusal(TypeError, "read=5: must be a function of a path", FileDataset, ["a.txt"], 5)
    odd = [os.fsdecode(b"a\xff"), os.fsdecode(b"b\xff")]

    def make(rank):
        return FileDataset(odd, lambda name: [np.array([ord(name[0])])])

    assert shares(2, make, auto_shard_policy="FILE") == [[[97], []], [[], [98]]]


class Reusing:
    """Batches of four examples, all in the same array."""

    batch_size = 6

    def __iter__(self):
        array = np.empty(4)
        for number in range(4):
            array[:] = 4 * number + np.arange(4)
            yield array


def test_a_dataset_may_use_one_array_for_all_batches():
    rows = list(range(16))
    for batches in (JoinedBatches(Reusing(), 2), rebatched(Reusing(), 0, 1, 6)):
        assert np.concatenate(list(batches)).tolist() == rows

    def ahead(strategy):
        options = InputOptions(experimental_per_replica_buffer_size=3)
        data = strategy.experimental_distribute_dataset(Reusing(), options)
        return [int(row) for batch in data for row in batch]

    assert sorted(row for part in on_ranks(2, ahead) for row in part) == rows


def test_joined_batches_keep_masks_and_must_be_of_one_structure():
    masked = [np.ma.masked_array([1.0, 2.0], [False, True]), np.array([3.0])]
    (joined,) = JoinedBatches(masked, 2)
    assert joined.mask.tolist() == [False, True, False]
    apart = [{"x": np.ones(2), "y": np.ones(2)}, {"x": np.ones(2), "z": np.ones(2)}]
    text = r"batches have different keys: \['x', 'y'\] and \['x', 'z'\]"
    refusal(ValueError, text, list, JoinedBatches(apart, 2))
    rows = FileDataset(["a"], lambda name: [{"x": 1.0, "y": 2.0}, {"x": 1.0, "z": 2.0}])
    refusal(ValueError, "elements have different keys", list, rows.batch(2))


def test_transformations_keep_the_files():
    def make(rank):
        rows = FileDataset(["a0", "a1", "a2"], lambda name: int(name[1]) * 10 + np.arange(3))
        return rows.repeat(2).batch(3)

    assert shares(3, make, auto_shard_policy="FILE")[1] == [[10], [11], [12], [10], [11], [12]]


# --- AUTO ----------------------------------------------------------------------------------------


def records_of(caplog):
    return [(r.levelno, r.getMessage()) for r in caplog.records if r.name == "strategies"]


def test_auto_splits_files(caplog):
    caplog.set_level(logging.INFO, "strategies")
    assert shares(2, lambda rank: files(2)) == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    text = "AutoShardPolicy.AUTO chose FILE: there is at least one file for each rank"
    assert records_of(caplog) == [(logging.INFO, text)]


def test_auto_falls_back_where_files_are_too_few(caplog):
    ranks = shares(3, lambda rank: files(2))
    assert ranks == [[[0, 1], [10, 11]], [[2, 3], [12, 13]], [[], []]]
    text = (
        "AutoShardPolicy.AUTO chose DATA, every rank reads everything: 2 files for 3 ranks:"
        " each rank needs at least one file"
    )
    assert records_of(caplog) == [(logging.WARNING, text)]


def test_auto_cuts_batches_of_anything_else(caplog):
    caplog.set_level(logging.INFO, "strategies")
    assert shares(3, lambda rank: [np.arange(4)]) == [[[0, 1]], [[2, 3]], [[]]]
    text = (
        "AutoShardPolicy.AUTO chose DATA, every rank reads everything: the dataset of rank 0,"
        " a list, isn't made of files"
    )
    assert records_of(caplog) == [(logging.INFO, text)]


def test_auto_falls_back_where_the_ranks_files_differ():
    ranks = shares(2, lambda rank: files(2 + rank))
    assert [len(batches) for batches in ranks] == [3, 3]


# --- sources of the policy -----------------------------------------------------------------------


def with_policy(dataset, policy):
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def test_the_datasets_own_options_are_used():
    def make(rank):
        return with_policy(make_numpy_dataset(np.arange(4)).batch(4), AutoShardPolicy.OFF)

    assert shares(2, make) == [[[0, 1], [2, 3]]] * 2
    assert shares(2, lambda rank: make(rank).repeat(1)) == [[[0, 1], [2, 3]]] * 2
    assert shares(2, make, auto_shard_policy="DATA") == [[[0, 1]], [[2, 3]]]


def test_data_can_be_requested_where_there_are_files():
    assert shares(2, lambda rank: files(2), auto_shard_policy="DATA")[1] == [[2, 3], [12, 13]]


class AsTensorFlow:
    """Has the attributes of a `tf.data.Dataset`, whose own iterator would yield tensors."""

    element_spec = "TensorSpec(shape=(None,), dtype=tf.int64)"

    def __init__(self, policy):
        self.policy = policy

    def __iter__(self):
        raise AssertionError("iterated for tensors")

    def as_numpy_iterator(self):
        return iter(eight_rows())

    def options(self):
        # The members of TensorFlow's enum aren't of this project's class.
        distribute = SimpleNamespace(auto_shard_policy=SimpleNamespace(value=self.policy))
        return SimpleNamespace(experimental_distribute=distribute)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(0, [[2, 3], [6, 7]]), (2, [[2, 3], [6, 7]]), (-1, [[0, 1], [2, 3], [4, 5], [6, 7]])],
)
def test_a_dataset_of_tensorflows(policy, expected):
    assert shares(2, lambda rank: AsTensorFlow(policy))[1] == expected


def test_a_tensorflow_dataset_has_no_files_to_split():
    (text,) = set(refusals(2, ValueError, lambda rank: AsTensorFlow(1)))
    assert text.endswith("the dataset of rank 0, a AsTensorFlow, isn't made of files")


def test_ranks_that_request_different_policies():
    def body(strategy):
        options = InputOptions(auto_shard_policy=["OFF", "DATA"][strategy.communicator.rank])
        distribute = strategy.experimental_distribute_dataset
        return refusal(ValueError, None, distribute, eight_rows(), options)

    expected = "the ranks request different sharding: rank 0: OFF, rank 1: DATA"
    assert on_ranks(2, body) == [expected] * 2


def test_one_rank_with_a_dataset_that_cant_be_iterated_twice():
    def make(rank):
        return iter(eight_rows()) if rank == 1 else eight_rows()

    (text,) = set(refusals(3, TypeError, make))
    assert text.startswith("rank 1: dataset is a list_iterator, which can be iterated only once")


def test_options_must_be_input_options():
    distribute = lone_strategy().experimental_distribute_dataset
    refusal(TypeError, "options is a dict: must be None or InputOp", distribute, [], {})


def test_a_dataset_that_cant_be_split_on_one_rank():
    class Broken(FileDataset):
        def auto_shard(self, num_shards, index):
            if index == 1:
                raise OSError("no such disk")
            return super().auto_shard(num_shards, index)

    def body(strategy):
        dataset = Broken(["a", "b"], lambda name: eight_rows())
        error = OSError if strategy.communicator.rank == 1 else DatasetError
        return refusal(error, "no such disk", strategy.experimental_distribute_dataset, dataset)

    told = "the dataset of rank 1 raised OSError: no such disk"
    assert on_ranks(2, body) == [told, "no such disk"]


# --- DATA ----------------------------------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 9), max_size=4),
    st.sampled_from(["AUTO", "DATA"]),
    st.integers(0, 2),
)
def test_the_shares_of_all_ranks_are_the_batch(size, lengths, policy, depth):
    batches = [np.arange(length) + 100 * step for step, length in enumerate(lengths)]
    ranks = shares(
        size,
        lambda rank: batches,
        auto_shard_policy=policy,
        experimental_per_replica_buffer_size=depth,
    )
    for step, batch in enumerate(batches):
        assert [row for rank in ranks for row in rank[step]] == batch.tolist()
        longest = -(-len(batch) // size)
        full = len(batch) // longest if longest else size
        assert [len(rank[step]) for rank in ranks[:full]] == [longest] * full
    assert {len(rank) for rank in ranks} == {len(batches)}
