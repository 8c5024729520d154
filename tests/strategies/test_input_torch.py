"""Batches of torch: a `DataLoader` is a dataset, and tensors stay tensors."""

import copy

import numpy as np
import pytest

from collectives import Communicator
from collectives.transports import local
from strategies import LocalSGDStrategy
from strategies.input import AutoShardPolicy, InputOptions, TensorSpec
from strategies.input.rebatching import JoinedBatches, rebatched
from strategies.input.sources import InOneOrder, shared_order
from tests.strategies.support import on_ranks, readers, refusal, until

torch = pytest.importorskip("torch", reason="torch isn't installed: DataLoader can't be tested")
data = torch.utils.data


def examples(count):
    inputs = torch.arange(2 * count, dtype=torch.float32).reshape(count, 2)
    return data.TensorDataset(inputs, torch.arange(count))


def distributed(size, make, **options):
    def body(strategy):
        given = InputOptions(**options)
        dataset = strategy.experimental_distribute_dataset(make(), given)
        epochs = [list(dataset), list(dataset)]
        for inputs, labels in epochs[0]:
            assert (type(inputs), type(labels)) == (torch.Tensor, torch.Tensor)
            assert (inputs.dtype, inputs.shape) == (torch.float32, (len(labels), 2))
            assert inputs[:, 0].tolist() == [2 * label for label in labels.tolist()]
        return dataset.element_spec, [[y.tolist() for _, y in epoch] for epoch in epochs]

    return on_ranks(size, body)


def test_a_loader_is_cut_into_parts():
    spec = [TensorSpec((None, 2), np.dtype("float32")), TensorSpec((None,), np.dtype("int64"))]
    ranks = distributed(2, lambda: data.DataLoader(examples(7), batch_size=4))
    assert ranks == [(spec, [[[0, 1], [4, 5]]] * 2), (spec, [[[2, 3], [6]]] * 2)]


@pytest.mark.parametrize("depth", [0, 2])
def test_every_epoch_is_reshuffled_equally(depth):
    def make():
        chance = torch.Generator().manual_seed(3)
        return data.DataLoader(examples(9), batch_size=4, shuffle=True, generator=chance)

    ranks = distributed(3, make, experimental_per_replica_buffer_size=depth)
    for epoch in range(2):
        rows = [row for _, epochs in ranks for batch in epochs[epoch] for row in batch]
        assert sorted(rows) == list(range(9))
    assert ranks[0][1][0] != ranks[0][1][1]


WEIGHTED = data.WeightedRandomSampler(torch.ones(9), 9, replacement=False)
RANDOM_ORDERS = [
    {"shuffle": True},
    {"sampler": data.SubsetRandomSampler(range(9))},
    {"sampler": WEIGHTED},
    {"batch_sampler": data.BatchSampler(data.RandomSampler(range(9)), 4, drop_last=False)},
]


@pytest.mark.parametrize("order", RANDOM_ORDERS, ids=["shuffled", "subset", "weighted", "batches"])
def test_a_random_order_is_the_chiefs(order):
    """Although ranks draw other random numbers, and iterate by themselves before and between."""

    def body(strategy):
        if "shuffle" in order:
            loader = data.DataLoader(examples(9), batch_size=4, **order)
        elif "sampler" in order:
            loader = data.DataLoader(examples(9), batch_size=4, sampler=copy.copy(order["sampler"]))
        else:
            loader = data.DataLoader(
                examples(9), batch_sampler=copy.deepcopy(order["batch_sampler"])
            )
        epochs = []
        for _ in range(2):
            dataset = strategy.experimental_distribute_dataset(loader)
            for _ in range(2):
                if strategy.communicator.rank:
                    torch.rand(3), next(iter(loader))
                epochs.append([int(row) for _, labels in dataset for row in labels])
        return epochs

    ranks = on_ranks(3, body)
    joined = [[row for part in parts for row in part] for parts in zip(*ranks, strict=True)]
    for rows in joined:
        assert sorted(rows) == list(range(9))
    assert len(set(map(tuple, joined))) > 1
    torch.manual_seed(5)
    first = on_ranks(1, body)
    torch.manual_seed(5)
    assert on_ranks(1, body) == first


def test_batches_of_worker_processes_must_come_in_order():
    loader = data.DataLoader(examples(9), batch_size=2, num_workers=1, in_order=False)

    def body(strategy):
        distribute = strategy.experimental_distribute_dataset
        off = InputOptions(auto_shard_policy=AutoShardPolicy.OFF)
        assert distribute(loader, off) is not None
        return refusal(
            ValueError, "in_order=False gives each rank another order", distribute, loader
        )

    on_ranks(2, body)
    on_ranks(1, lambda strategy: strategy.experimental_distribute_dataset(loader))
    with pytest.raises(ValueError, match="in_order=False"):
        InOneOrder(JoinedBatches(loader, 2), 0)
    # A generator may give one tensor for all batches.
    tensor = torch.zeros(2)
    (joined,) = JoinedBatches((tensor.fill_(number) for number in (1, 2)), 2)
    assert joined.tolist() == [1, 1, 2, 2]


def test_a_random_order_is_the_chiefs_under_local_sgd():
    def body(transport):
        with Communicator(transport, deadline=20) as comm:
            strategy = LocalSGDStrategy(2, communicator=comm)
            loader = data.DataLoader(examples(9), batch_size=2, shuffle=True)
            dataset = strategy.experimental_distribute_dataset(loader)
            return [int(row) for _, labels in dataset for row in labels]

    assert sorted(row for rows in local.run(3, body) for row in rows) == list(range(9))


def test_orders_that_are_not_shared():
    """Of loaders that each rank reads for itself, and of the program's generators."""

    def order(seed, **how):
        torch.manual_seed(seed)
        loader = data.DataLoader(examples(20), batch_size=4, **{"shuffle": True} | how)
        options = InputOptions(auto_shard_policy=-1)

        def body(strategy):
            dataset = strategy.experimental_distribute_dataset(loader, options)
            return [int(row) for _, labels in dataset for row in labels]

        return on_ranks(1, body)

    assert order(1) == order(1) != order(2)
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    assert order(1, generator=generators[0]) == order(2, generator=generators[1])
    assert shared_order(data.DataLoader(range(9), 3, shuffle=True, generator=generators[0])) is None
    assert shared_order(data.DataLoader(range(9), 3)) is None


@pytest.mark.parametrize("given", [True, False], ids=["a generator", "none"])
def test_an_iteration_that_was_left_leaves_the_order_as_without_reading_ahead(given):
    class Examples(data.Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            read.append(index)
            return index

    read = []

    def orders(depth):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(3) if given else None
        loader = data.DataLoader(Examples(), batch_size=3, shuffle=True, generator=generator)
        options = InputOptions(experimental_per_replica_buffer_size=depth)

        def body(strategy):
            dataset = strategy.experimental_distribute_dataset(loader, options)
            read.clear()
            first = next(iterator := iter(dataset)).tolist()
            # The sampler draws once more at its end.
            until(lambda: len(read) == (9 if depth else 3))
            del iterator
            assert not readers()
            return [first, *(batch.tolist() for _ in range(2) for batch in dataset)]

        return on_ranks(1, body)

    assert orders(0) == orders(5)


def test_the_order_of_a_loader_without_batches():
    loader = data.DataLoader(range(9), batch_size=None, shuffle=True)
    orders = []
    for seed in (1, 1, 2):
        shared_order(loader)(seed)
        orders.append(list(loader))
    assert orders[0] == orders[1] != orders[2]


def test_whole_loaders_are_rebatched():
    ranks = distributed(3, lambda: data.DataLoader(examples(7), batch_size=4), auto_shard_policy=-1)
    assert [epochs[0] for _, epochs in ranks] == [
        [[0, 1], [2], [3], [4, 5], [6], []],
        [[0], [1], [2, 3], [4], [5], [6]],
        [[0], [1, 2], [3], [4], [5, 6], []],
    ]


def test_a_rank_without_batches_gets_tensors_without_rows():
    def body(strategy):
        rank = strategy.communicator.rank
        batches = [{"x": torch.ones((2, 3), dtype=torch.bfloat16)}] if rank else []
        (batch,) = strategy.distribute_datasets_from_function(lambda context: batches)
        return type(batch["x"]), batch["x"].dtype, tuple(batch["x"].shape)

    shapes = [(0, 3), (2, 3)]
    assert on_ranks(2, body) == [(torch.Tensor, torch.bfloat16, shape) for shape in shapes]


def test_tensors_of_two_batches_are_joined_to_a_tensor():
    batches = [(torch.arange(2), torch.zeros(2, 1)), (torch.arange(2, 4), torch.zeros(2, 1))]
    parts = list(rebatched(batches, 0, 1, batch_size=3))
    assert [type(leaf) for part in parts for leaf in part] == [torch.Tensor] * 4
    assert [x.tolist() for x, _ in parts] == [[0, 1, 2], [3]]
    assert [tuple(y.shape) for _, y in parts] == [(3, 1), (1, 1)]
