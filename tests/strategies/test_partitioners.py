"""The number of parts of a variable, and their servers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import ClusterSpec
from strategies.cluster.spec import Task
from strategies.parameter_server import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    replica_device_setter,
)
from strategies.parameter_server.placement import RoundRobin, count_of_parts

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float64", "int8", "complex128"]).map(np.dtype)
sizes = st.integers(1, 3000)


# By the formulas of TensorFlow 2.21 (sharded_variable.py and partitioned_variables.py).
@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "parts"),
    [
        (FixedShardsPartitioner(2), (10, 3), np.float32, [2, 1]),
        (FixedShardsPartitioner(4), (3, 5), np.float32, [3, 1]),
        (FixedShardsPartitioner(2), (10,), np.int64, [2]),
        (MinSizePartitioner(4, 3), (6, 1), np.float32, [3, 1]),
        (MinSizePartitioner(4, 10), (6, 1), np.float32, [6, 1]),
        (MinSizePartitioner(7, 10), (6, 1), np.float32, [4, 1]),
        (MinSizePartitioner(), (1 << 20, 1), np.float32, [1, 1]),
        (MinSizePartitioner(max_shards=100), (1 << 18, 1), np.float32, [4, 1]),
        (MaxSizePartitioner(4), (6, 1), np.float32, [6, 1]),
        (MaxSizePartitioner(4, 2), (6, 1), np.float32, [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), np.float32, [1, 1]),
        (MaxSizePartitioner(4096), (10, 300), np.float32, [4, 1]),
        (MaxSizePartitioner(1), (6, 2), np.float64, [6, 1]),
        (MaxSizePartitioner(32, bytes_per_string=8), (8,), np.dtype("U5"), [2]),
        (MinSizePartitioner(32, 9), (8,), np.dtype("S3"), [4]),
    ],
)
def test_numbers_of_tensorflow(partitioner, shape, dtype, parts):
    assert partitioner(shape=shape, dtype=dtype) == parts


def test_another_axis():
    assert FixedShardsPartitioner(3)((10, 4), np.float32, axis=1) == [1, 3]
    assert MaxSizePartitioner(80)((10, 4), np.float32, axis=1) == [1, 2]
    with pytest.raises(ValueError, match="axis=2"):
        FixedShardsPartitioner(3)((10, 4), np.float32, axis=2)


def test_variables_without_elements():
    assert FixedShardsPartitioner(3)((0, 4), np.float32) == [0, 1]
    assert MinSizePartitioner(3, 3)((0, 4), np.float32) == [1, 1]
    assert MaxSizePartitioner(3)((5, 0), np.float32) == [1, 1]


@given(shape=shapes, dtype=dtypes, shards=st.integers(1, 50))
def test_fixed(shape, dtype, shards):
    first, *rest = FixedShardsPartitioner(shards)(shape, dtype)
    assert first == (shards if shards < shape[0] else shape[0])
    assert rest == [1] * (len(shape) - 1)


@given(shape=shapes, dtype=dtypes, least=sizes, most=st.integers(1, 50))
def test_min_size(shape, dtype, least, most):
    (first, *_) = MinSizePartitioner(least, most)(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    assert 1 <= first <= min(shape[0], most)
    # One part fewer would satisfy the minimum on average; one more would not.
    assert first == 1 or (first - 1) * least < nbytes
    assert first in (shape[0], most) or first * least >= nbytes


@given(shape=shapes, dtype=dtypes, most_bytes=sizes, most=st.none() | st.integers(1, 50))
def test_max_size(shape, dtype, most_bytes, most):
    (first, *_) = MaxSizePartitioner(most_bytes, most)(shape, dtype)
    row = math.prod(shape[1:]) * dtype.itemsize
    assert 1 <= first <= shape[0]
    if first != most:
        largest = -(-shape[0] // first) * row
        assert largest <= max(most_bytes, row)
        assert first == 1 or -(-shape[0] // (first - 1)) * row > most_bytes


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: FixedShardsPartitioner(0), ValueError, "num_shards=0"),
        (lambda: FixedShardsPartitioner(2.0), TypeError, "num_shards=2.0"),
        (lambda: MinSizePartitioner(0), ValueError, "min_shard_bytes=0"),
        (lambda: MinSizePartitioner(1, 0), ValueError, "max_shards=0"),
        (lambda: MaxSizePartitioner(-1), ValueError, "max_shard_bytes=-1"),
        (lambda: MaxSizePartitioner(1, True), TypeError, "max_shards=True"),
        (lambda: MaxSizePartitioner(1, bytes_per_string=0), ValueError, "bytes_per_string=0"),
    ],
)
def test_wrong_numbers(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_what_is_split():
    partitioner = FixedShardsPartitioner(5)
    assert count_of_parts(partitioner, (13, 2), np.float32) == 5
    assert count_of_parts(partitioner, (2, 9), np.float32) == 2
    assert count_of_parts(lambda shape, dtype: (99, 1), (3, 2), np.float32) == 3
    for shape in ((), (1, 7), (0, 3)):
        assert count_of_parts(partitioner, shape, np.float32) == 1
    assert count_of_parts(None, (13, 2), np.float32) == 1


@pytest.mark.parametrize("parts", [[1, 2], [0, 1], [2], [], None, 3])
def test_a_partitioner_with_an_impossible_result(parts):
    with pytest.raises(ValueError, match="variable_partitioner gave"):
        count_of_parts(lambda shape, dtype: parts, (4, 4), np.float32)


def test_servers_get_shards_in_turn():
    dealer = RoundRobin(3)
    assert [dealer.next() for _ in range(4)] == [0, 1, 2, 0]
    with dealer.colocate_with(2):
        assert [dealer.next() for _ in range(2)] == [2, 2]
        assert dealer.colocating
    assert not dealer.colocating
    assert dealer.next() == 1


def test_the_placement_helper():
    assert replica_device_setter() is None
    assert replica_device_setter(cluster={"worker": ["w"]}) is None
    setter = replica_device_setter(2)
    assert [setter() for _ in range(3)] == [Task("ps", 0), Task("ps", 1), Task("ps", 0)]
    sparse = replica_device_setter(cluster=ClusterSpec({"ps": {1: "a", 4: "b"}, "worker": ["w"]}))
    assert [sparse().index for _ in range(3)] == [1, 4, 1]
    with pytest.raises(ValueError, match="ps_tasks=-1"):
        replica_device_setter(-1)
