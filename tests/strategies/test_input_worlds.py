"""Distributed datasets between MPI ranks: the numbers of §2.4 and §2.5 at two and three ranks."""

import numpy as np
import pytest

from strategies.input import (
    AutoShardPolicy,
    DatasetError,
    FileDataset,
    InputContext,
    InputOptions,
    TensorSpec,
    make_numpy_dataset,
)
from tests.strategies.support import refusal, same_refusal

pytestmark = pytest.mark.mpi
two_ranks = pytest.mark.ranks(2)
three_ranks = pytest.mark.ranks(3)
several_ranks = pytest.mark.ranks(2, 3)


def ranks_lists(comm, strategy, dataset, policy=None, **options):
    """Every rank's batches, on all ranks."""
    given = InputOptions(auto_shard_policy=policy, **options)
    distributed = strategy.experimental_distribute_dataset(dataset, given)
    return comm.all_gather_object([batch.tolist() for batch in distributed])


@pytest.fixture
def files(tmp_path):
    """Three files of two rows, in a directory of this rank."""
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", 10 * number + np.arange(2))
    return FileDataset(sorted(tmp_path.glob("*.npy")), lambda path: [np.load(path)])


@three_ranks
@pytest.mark.parametrize("policy", [None, "AUTO", "DATA"])
def test_four_rows_over_three_ranks(comm, strategy, policy):
    assert ranks_lists(comm, strategy, [np.arange(4)], policy) == [[[0, 1]], [[2, 3]], [[]]]


@two_ranks
def test_the_last_batch_of_six_over_two_ranks(comm, strategy):
    batches = make_numpy_dataset(np.arange(14)).batch(8)
    assert ranks_lists(comm, strategy, batches) == [
        [[0, 1, 2, 3], [8, 9, 10]],
        [[4, 5, 6, 7], [11, 12, 13]],
    ]


@three_ranks
@pytest.mark.parametrize("policy", ["OFF", "HINT"])
def test_own_pipelines_of_three_ranks(comm, strategy, policy):
    batches = [np.arange(4)]
    expected = [[[0, 1], [2], [3]], [[0], [1], [2, 3]], [[0], [1, 2], [3]]]
    assert ranks_lists(comm, strategy, batches, policy) == expected


@two_ranks
def test_own_pipelines_of_two_ranks(comm, strategy):
    batches = make_numpy_dataset(np.arange(8)).batch(4)
    halves = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks_lists(comm, strategy, batches, AutoShardPolicy.OFF) == [halves, halves]


@several_ranks
@pytest.mark.parametrize("policy", [None, "FILE"])
def test_files_are_split_between_ranks(comm, strategy, files, policy):
    expected = {
        2: [[[0], [1], [20], [21]], [[10], [11], [], []]],
        3: [[[0], [1], []], [[10], [], [11]], [[], [20], [21]]],
    }
    assert ranks_lists(comm, strategy, files, policy) == expected[comm.size]


@three_ranks
def test_too_few_files(comm, strategy, files):
    few = FileDataset(files.files[:2], np.load)
    options = InputOptions(auto_shard_policy="FILE")
    distribute = strategy.experimental_distribute_dataset
    same_refusal(comm, ValueError, "2 files for 3 ranks", distribute, few, options)
    few = FileDataset(files.files[:2], lambda path: [np.load(path)])
    expected = [[[0], [10]], [[1], [11]], [[], []]]
    assert ranks_lists(comm, strategy, few) == expected


@several_ranks
def test_file_sharding_of_a_dataset_without_files(comm, strategy):
    options = InputOptions(auto_shard_policy="FILE")
    distribute = strategy.experimental_distribute_dataset
    match = "the dataset of rank 0, a list, isn't made of files"
    same_refusal(comm, ValueError, match, distribute, [np.arange(4)], options)
    assert strategy.reduce("sum", 1, axis=None) == comm.size


@several_ranks
@pytest.mark.parametrize("depth", [0, 2])
def test_a_source_that_raises_on_the_last_rank(comm, strategy, depth):
    bad = comm.size - 1

    def batches():
        yield np.zeros(2)
        if comm.rank == bad:
            raise OSError("disk is gone")
        yield np.zeros(2)

    class Source:
        def __iter__(self):
            return batches()

    dataset = strategy.distribute_datasets_from_function(
        lambda context: Source(), InputOptions(experimental_per_replica_buffer_size=depth)
    )
    iterator = iter(dataset)
    next(iterator)
    if comm.rank == bad:
        refusal(OSError, "disk is gone", next, iterator)
    else:
        told = f"the dataset of rank {bad} raised OSError: disk is gone"
        refusal(DatasetError, told, next, iterator)
    assert strategy.reduce("sum", 1, axis=None) == comm.size


@several_ranks
def test_shuffles_without_a_seed_and_seed_offsets(comm, strategy):
    dataset = make_numpy_dataset(np.arange(24)).shuffle(24).batch(12)
    parts = ranks_lists(comm, strategy, dataset, experimental_per_replica_buffer_size=1)
    assert sorted(row for rank in parts for batch in rank for row in batch) == list(range(24))
    whole = ranks_lists(comm, strategy, dataset, sharding="seed_offset")
    orders = [[row for batch in rank for row in batch] for rank in whole]
    assert [sorted(order) for order in orders] == [list(range(24))] * comm.size
    assert len({tuple(order) for order in orders}) == comm.size


@several_ranks
def test_the_context_of_a_rank(comm, strategy):
    contexts = []

    def dataset_of(context):
        contexts.append(context)
        return make_numpy_dataset(np.arange(3)).batch(1).repeat(context.input_pipeline_id)

    dataset = strategy.distribute_datasets_from_function(dataset_of)
    assert contexts == [InputContext(comm.size, comm.rank, comm.size)]
    assert contexts[0].get_per_replica_batch_size(0) == 0
    assert contexts[0].get_per_replica_batch_size(-2 * comm.size) == -2
    refusal(ValueError, "must be a multiple of", contexts[0].get_per_replica_batch_size, 7)
    assert [len(batch) for batch in dataset].count(1) == 3 * comm.rank
    assert dataset.element_spec == TensorSpec((None,), np.dtype("int64"))
    assert contexts == [InputContext(comm.size, comm.rank, comm.size)]
