"""InputOptions, AutoShardPolicy and values per replica."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from strategies import get_strategy
from strategies.core.options import CommunicationOptions, RunOptions
from strategies.input import (
    AutoShardPolicy,
    InputOptions,
    InputReplicationMode,
    Options,
    ValueContext,
)
from strategies.input.options import DistributeOptions, as_policy
from tests.strategies.support import lone_strategy, on_ranks, refusal


def test_the_policies_are_tensorflows():
    numbers = {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert {policy.name: policy.value for policy in AutoShardPolicy} == numbers
    for name, number in numbers.items():
        expected = AutoShardPolicy[name]
        for given in (name, name.lower(), number, expected, SimpleNamespace(value=number)):
            assert as_policy(given) is expected
            assert InputOptions(auto_shard_policy=given).auto_shard_policy is expected


@pytest.mark.parametrize("wrong", ["FILES", 4, -2, None, "0"])
def test_other_policies(wrong):
    text = refusal(ValueError, "auto_shard_policy", as_policy, wrong)
    expected = f"auto_shard_policy={wrong!r}: must be one of OFF, AUTO, FILE, DATA, HINT"
    assert text == expected


def test_options_in_tensorflows_order():
    options = InputOptions(True, InputReplicationMode.PER_REPLICA, True, 3)
    assert options.experimental_fetch_to_device is True
    assert options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    assert options.experimental_place_dataset_on_device is True
    assert options.experimental_per_replica_buffer_size == 3
    assert InputOptions(experimental_prefetch_to_device=False).auto_shard_policy is None
    assert Options().experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO


def test_subclasses_of_options():
    """They have their base's attributes, and those that they declare themselves."""
    for base in (InputOptions, DistributeOptions, Options, CommunicationOptions, RunOptions):

        class Plain(base):
            pass

        class Own(base):
            mine: int

        assert repr(Plain()).partition("(")[2] == repr(base()).partition("(")[2]
        own = Own()
        own.mine = 3
        assert own.mine == 3
        for options in (Plain(), own):
            text = refusal(AttributeError, "no attribute 'mone'", setattr, options, "mone", 1)
            assert ("mine" in text) == (options is own)

    @dataclass(unsafe_hash=True)
    class Wide(InputOptions):
        mine: int = 7

    options = Wide(sharding="seed_offset", mine=8)
    assert (options.sharding, options.mine, Wide().mine) == ("seed_offset", 8, 7)
    refusal(AttributeError, "^Wide.mine can't be changed", setattr, options, "mine", 9)
    refusal(ValueError, "sharding='x'", Wide, sharding="x")


def test_attributes_that_there_are_not():
    """A policy that is assigned one level too high isn't silently ignored."""
    options = Options()
    refusal(
        AttributeError,
        "^Options has no attribute 'auto_shard_policy': it has experimental_distribute$",
        *(setattr, options, "auto_shard_policy", AutoShardPolicy.FILE),
    )
    nested = options.experimental_distribute
    text = "DistributeOptions has no attribute 'policy': it has auto_shard_policy"
    refusal(AttributeError, text, setattr, nested, "policy", AutoShardPolicy.FILE)
    refusal(ValueError, "must be one of OFF", setattr, nested, "auto_shard_policy", "FILES")
    text = "experimental_distribute is a AutoShardPolicy: must be DistributeOptions"
    refusal(TypeError, text, setattr, options, "experimental_distribute", AutoShardPolicy.FILE)
    assert nested.auto_shard_policy is AutoShardPolicy.AUTO
    nested.auto_shard_policy = "file"
    assert nested.auto_shard_policy is AutoShardPolicy.FILE
    assert nested == DistributeOptions(AutoShardPolicy.FILE) == DistributeOptions("FILE")


@pytest.mark.parametrize("kind", [InputOptions, RunOptions])
def test_options_that_can_not_be_changed(kind):
    (name, *_), given = kind.__annotations__, kind()
    text = f"^{kind.__name__} has no attribute 'auto_shard': it has {name}, "
    refusal(AttributeError, text, setattr, given, "auto_shard", "FILE")
    text = rf"{kind.__name__}\.{name} can't be changed: make a new one, {kind.__name__}\({name}=…\)"
    refusal(AttributeError, text, setattr, given, name, True)
    assert given == kind()
    assert len({given, kind()}) == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"experimental_per_replica_buffer_size": -1}, "=-1: must be an integer of at least 0"),
        ({"sharding": "seeds"}, "sharding='seeds': must be None or 'seed_offset'"),
        ({"sharding": "seed_offset", "auto_shard_policy": "OFF"}, "must be only one of them"),
    ],
)
def test_invalid_options(given, text):
    refusal(ValueError, text, InputOptions, **given)


@pytest.mark.parametrize("given", [{"auto_shard_policy": "AUTO"}, {"sharding": "seed_offset"}])
def test_a_dataset_function_shards_by_itself(given):
    def body(strategy):
        distribute = strategy.distribute_datasets_from_function
        return refusal(
            ValueError, None, distribute, lambda context: [np.zeros(1)], InputOptions(**given)
        )

    (text,) = set(on_ranks(2, body))
    assert text.startswith("options request sharding, but distribute_datasets_from_function")


@pytest.mark.parametrize("older", ["", "experimental_"])
def test_a_dataset_function_with_read_ahead(older):
    def body(strategy):
        dataset = getattr(strategy, f"{older}distribute_datasets_from_function")(
            lambda context: [np.full(2, context.input_pipeline_id)] * 3,
            InputOptions(experimental_per_replica_buffer_size=2),
        )
        return [batch.tolist() for batch in dataset]

    assert on_ranks(2, body) == [[[0, 0]] * 3, [[1, 1]] * 3]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_values_from_a_function(size):
    def body(strategy):
        seen = []

        def value_of(context):
            seen.append(context)
            return 10 * context.replica_id_in_sync_group + context.num_replicas_in_sync

        value = strategy.experimental_distribute_values_from_function(value_of)
        assert seen == [ValueContext(strategy.communicator.rank, size)]
        local = strategy.experimental_local_results(value)
        return local, strategy.run(lambda x: x + 1, (value,)), strategy.reduce("sum", value, None)

    total = sum(10 * rank + size for rank in range(size))
    assert on_ranks(size, body) == [
        ((10 * rank + size,), 10 * rank + size + 1, total) for rank in range(size)
    ]


def test_the_default_strategy_has_one_replica_and_returns_datasets_unchanged():
    strategy, dataset = get_strategy(), [np.zeros(1)]
    assert strategy.experimental_distribute_values_from_function(lambda c: c) == ValueContext(0, 1)
    options = InputOptions(experimental_per_replica_buffer_size=2)
    assert strategy.experimental_distribute_dataset(dataset, options) is dataset
    assert strategy.distribute_datasets_from_function(lambda c: dataset, options) is dataset


def test_a_lone_strategy_gives_its_rank():
    value = lone_strategy().experimental_distribute_values_from_function(lambda c: c)
    assert value == ValueContext(0, 1)
