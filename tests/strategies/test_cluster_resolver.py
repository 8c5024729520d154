"""The sources of a cluster: `TF_CONFIG`, the caller, or the ranks of a communicator."""

import json
import socket

import numpy as np
import pytest

from strategies.cluster.ranks import assign_ranks
from strategies.cluster.spec import ClusterSpec
from strategies.cluster.tf_config import TFConfig, parse_tf_config
from strategies.cluster_resolver import (
    ClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)

TWO = {"worker": ["a:1", "b:1"]}


class FakeCommunicator:
    """One rank of a world with given hosts."""

    def __init__(self, rank, hosts):
        self.rank, self.size, self.hosts, self.sent = rank, len(hosts), hosts, []

    def all_gather_object(self, obj):
        self.sent.append(obj)
        return list(self.hosts)


@pytest.fixture
def set_tf_config(monkeypatch):
    def set_to(value):
        if value is None:
            monkeypatch.delenv("TF_CONFIG", raising=False)
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            monkeypatch.setenv("TF_CONFIG", text)

    return set_to


def test_tf_config(set_tf_config):
    set_tf_config({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec(TWO)
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")


def test_tf_config_is_read_once(set_tf_config):
    set_tf_config({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver()
    set_tf_config("{")
    assert resolver.cluster_spec() == ClusterSpec(TWO)
    assert resolver.task_id == 1


@pytest.mark.parametrize("text", [None, "{}"])
def test_without_tf_config_the_cluster_is_empty(set_tf_config, text):
    set_tf_config(text)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.tf_config() == TFConfig()


def test_a_cluster_without_a_task(set_tf_config):
    set_tf_config({"cluster": TWO})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == (None, None)
    set_tf_config({"cluster": TWO, "task": {"type": "worker"}})
    assert TFConfigClusterResolver().task_type == "worker"


def test_arguments_go_before_tf_config(set_tf_config):
    set_tf_config({"cluster": TWO, "task": {"type": "worker", "index": 1}})
    resolver = TFConfigClusterResolver("evaluator", 0, rpc_layer="grpc", environment="cloud")
    assert resolver.tf_config() == TFConfig(ClusterSpec(TWO), "evaluator", 0)
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")


@pytest.mark.parametrize(
    ("text", "error"),
    [("", json.JSONDecodeError), ("null", TypeError), ('{"task": {"index": -1}}', ValueError)],
)
def test_a_refused_tf_config(set_tf_config, text, error):
    set_tf_config(text)
    with pytest.raises(error, match="TF_CONFIG"):
        TFConfigClusterResolver()


def test_a_simple_resolver():
    resolver = SimpleClusterResolver(ClusterSpec(TWO), task_type="worker", task_id=0)
    assert resolver.cluster_spec() == ClusterSpec(TWO)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")
    assert SimpleClusterResolver(ClusterSpec(TWO)).task_type is None


def test_a_simple_resolver_wants_a_cluster_spec():
    with pytest.raises(TypeError, match=r"cluster_spec is .*; it must be a ClusterSpec"):
        SimpleClusterResolver(TWO)


@pytest.mark.parametrize(("task_id", "error"), [(-1, ValueError), (1.7, TypeError)])
def test_a_bad_task_id(set_tf_config, task_id, error):
    set_tf_config(None)
    with pytest.raises(error, match=r"task_id is .*; allowed are integers"):
        SimpleClusterResolver(ClusterSpec(TWO), task_type="worker", task_id=task_id)
    with pytest.raises(error, match=r"task_id is .*; allowed are integers"):
        TFConfigClusterResolver(task_id=task_id)


def test_the_ranks_of_a_world_are_its_workers():
    communicator = FakeCommunicator(2, ["x", "x", "y"])
    resolver = MPIClusterResolver(communicator)
    assert resolver.cluster_spec().as_dict() == {"worker": ["x:0", "x:1", "y:2"]}
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert communicator.sent == [socket.gethostname()]


def test_the_world_is_the_default_communicator(monkeypatch):
    import collectives

    monkeypatch.setattr(collectives, "world", lambda: FakeCommunicator(0, ["x"]), raising=False)
    assert MPIClusterResolver().cluster_spec() == ClusterSpec({"worker": ["x:0"]})


def test_a_resolver_of_any_kind_feeds_the_assignment():
    worlds = [MPIClusterResolver(FakeCommunicator(rank, ["x", "y"])) for rank in (1, 0)]
    reports = [(resolver.tf_config().to_text(), "h") for resolver in worlds]
    assert [place.id for place in assign_ranks(reports)] == [1, 0]
    for resolver in worlds:
        assert parse_tf_config(resolver.tf_config().to_text()) == resolver.tf_config()


class Resolver(ClusterResolver):
    def __init__(self, cluster, task_type, task_id):
        self._cluster, self.task_type, self.task_id = cluster, task_type, task_id

    def cluster_spec(self):
        return self._cluster


def test_what_a_resolver_of_ones_own_may_answer():
    config = Resolver({"worker": ["a:1", "b:1"]}, "worker", np.int64(1)).tf_config()
    assert parse_tf_config(config.to_text()) == config
    assert config == TFConfig(ClusterSpec({"worker": ["a:1", "b:1"]}), "worker", 1)
    for answers, text in [
        ((7, "worker", 0), r"cluster_spec\(\) is 7; it must be a dictionary"),
        (({"worker": ["a:1"]}, b"worker", 0), "task_type is b'worker'; it must be a string"),
        (({"worker": ["a:1"]}, "worker", 0.5), "task_id is 0.5; allowed are integers"),
    ]:
        with pytest.raises(TypeError, match=text):
            Resolver(*answers).tf_config()


def test_a_resolver_must_name_a_cluster():
    class Incomplete(ClusterResolver):
        pass

    with pytest.raises(TypeError, match="cluster_spec"):
        Incomplete()
