"""A wrong TF_CONFIG on any rank is the same error on all ranks, without effects: §2.6, §2.7."""

import json

import numpy as np
import pytest

from strategies import ClusterSpec, CommunicationOptions, MultiWorkerMirroredStrategy
from strategies.cluster_resolver import SimpleClusterResolver
from tests.strategies.support import same_refusal, strategy_of, tf_config

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


def workers(size):
    return {"worker": [f"w{index}" for index in range(size)]}


def right(rank, size):
    return tf_config(workers(size), "worker", rank)


def only_rank_1(text):
    """Wrong on rank 1 only."""
    return lambda rank, size: text if rank == 1 else right(rank, size)


def every_rank(cluster_of, task_type="worker", index=None):
    """Wrong on all ranks: another cluster, or another task in it."""
    return lambda rank, size: tf_config(
        cluster_of(size), task_type, rank if index is None else index
    )


def with_jobs(first, **jobs):
    """A task type for rank 0 in a cluster of the jobs and workers; the others are workers."""

    def text_of(rank, size):
        cluster = jobs | workers(size - 1)
        return tf_config(cluster, first if rank == 0 else "worker", max(rank - 1, 0))

    return text_of


def task_of_rank_1(**task):
    """Rank 1's task in a cluster of workers."""

    def text_of(rank, size):
        wrong = json.dumps({"cluster": workers(size), "task": task})
        return wrong if rank == 1 else right(rank, size)

    return text_of


WRONG = {
    "no JSON": (only_rank_1("{'task'"), ["rank 1 on", "JSONDecodeError"]),
    "an empty text": (lambda rank, size: "", ["rank 0 on", "rank 1 on", "JSONDecodeError"]),
    "null": (only_rank_1("null"), ["rank 1 on", "TF_CONFIG is None; it must be a dictionary"]),
    "a list": (only_rank_1("[]"), ["rank 1 on", "TF_CONFIG is []"]),
    "unset on one": (only_rank_1(None), ["rank 1 on", "saw TF_CONFIG unset", "as on rank 0"]),
    "empty on one": (only_rank_1("{}"), ["rank 1 on", "unset or without a cluster"]),
    "set on one": (
        lambda rank, size: right(0, size) if rank == 0 else None,
        ["rank 1 on", "saw TF_CONFIG unset", "as on rank 0"],
    ),
    "another address": (
        lambda rank, size: (
            tf_config({"worker": ["x", *workers(size)["worker"][1:]]}, "worker", rank)
            if rank == 1
            else right(rank, size)
        ),
        ["saw another cluster", "worker 0 at ", "expected at "],
    ),
    "too large a cluster": (
        every_rank(lambda size: workers(size + 1)),
        ["world's size is ", "tasks without a rank: ['worker "],
    ),
    "too small a cluster": (
        every_rank(lambda size: workers(size - 1), index=0),
        ["world's size is ", "rank 0 on", "rank 1 on", "has worker 0"],
    ),
    "one task twice": (
        every_rank(workers, index=0),
        ["worker 0 is claimed by rank 0 on", " and rank 1 on", "worker 1 is claimed by no rank"],
    ),
    "a parameter server": (with_jobs("ps", ps=["p"]), ["use ParameterServerStrategy", "['p']"]),
    "a master": (with_jobs("master", master=["m"]), ["jobs ['master']; a strategy without"]),
    "an unknown job": (
        with_jobs("gpu", gpu=["g"]),
        ["jobs ['gpu']; a strategy without", "'evaluator'"],
    ),
    "two chiefs": (with_jobs("chief", chief=["a", "b"]), ["rank 0 on", "one chief is allowed"]),
    "two evaluators": (
        with_jobs("evaluator", evaluator=["a", "b"]),
        ["rank 1 on", "one evaluator is allowed"],
    ),
    "no index": (task_of_rank_1(type="worker"), ["rank 1 on", "'worker' and index None"]),
    "no type": (task_of_rank_1(index=1), ["rank 1 on", "type None and index 1"]),
    "no task": (task_of_rank_1(), ["rank 1 on", "type None and index None"]),
    "an absent type": (task_of_rank_1(type="chief", index=0), ["rank 1 on", "saw chief 0"]),
    "an absent index": (task_of_rank_1(type="worker", index=9), ["rank 1 on", "is 9", "[0, 1"]),
    "a negative index": (task_of_rank_1(type="worker", index=-1), ["rank 1 on", "is -1"]),
    "an index of null": (task_of_rank_1(type="worker", index=None), ["rank 1 on", "is None"]),
    "an index of 1.7": (task_of_rank_1(type="worker", index=1.7), ["rank 1 on", "is 1.7"]),
    "an index of true": (task_of_rank_1(type="worker", index=True), ["rank 1 on", "is True"]),
    "an index of x": (task_of_rank_1(type="worker", index="x"), ["rank 1 on", "is 'x'"]),
    "a type of null": (task_of_rank_1(type=None, index=1), ["rank 1 on", "saw None 1"]),
    "a task that is a list": (
        lambda rank, size: json.dumps({"cluster": workers(size), "task": ["worker", rank]}),
        ["rank 0 on", "rank 1 on", "['worker', 0]", "['worker', 1]"],
    ),
    "a cluster that is a list": (
        lambda rank, size: '{"cluster": ["a", "b"]}',
        ["rank 0 on", "rank 1 on", "it must be a dictionary"],
    ),
    "an address that is a number": (
        every_rank(lambda size: {"worker": [5] * size}),
        ["rank 0 on", "rank 1 on", "an address must be a string"],
    ),
    "two evaluators outside": (
        lambda rank, size: (
            tf_config(workers(size - 1), "evaluator", 0)
            if rank < 2
            else tf_config(workers(size - 1), "worker", rank - 1)
        ),
        ["evaluator 0 is claimed by rank 0 on", " and rank 1 on"],
    ),
}


def assert_usable(comm, monkeypatch):
    """The world, and a strategy of it that has a valid TF_CONFIG."""
    monkeypatch.setenv("TF_CONFIG", right(comm.size - 1 - comm.rank, comm.size))
    with strategy_of(comm) as strategy:
        ranks = strategy.gather(np.array([comm.rank]), axis=0)
        assert ranks.tolist() == list(range(comm.size))[::-1]


@pytest.mark.parametrize("case", WRONG)
def test_every_rank_raises_the_same_error_and_can_continue(comm, monkeypatch, case):
    text_of, parts = WRONG[case]
    text = text_of(comm.rank, comm.size)
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)
    arguments = (MultiWorkerMirroredStrategy, None)
    said = same_refusal(comm, ValueError, "TF_CONFIG|cluster", *arguments, communicator=comm)
    for part in parts:
        assert part in said
    assert_usable(comm, monkeypatch)


RESOLVERS = {
    "without a task": (lambda rank: {}, "type None and index None"),
    "one task twice": (lambda rank: {"task_type": "worker", "task_id": 0}, "is claimed by"),
    "an absent task": (lambda rank: {"task_type": "worker", "task_id": rank + 1}, "is claimed|is "),
}


@pytest.mark.parametrize("case", RESOLVERS)
def test_resolvers_are_compared_as_well(comm, monkeypatch, case):
    named, match = RESOLVERS[case]
    resolver = SimpleClusterResolver(ClusterSpec(workers(comm.size)), **named(comm.rank))
    arguments = (MultiWorkerMirroredStrategy, resolver)
    said = same_refusal(comm, ValueError, match, *arguments, communicator=comm)
    assert "rank 0 on" in said or case == "an absent task"
    assert_usable(comm, monkeypatch)


def test_what_is_no_resolver(comm, monkeypatch):
    said = "cluster_resolver is a CommunicationOptions: must be a ClusterResolver"
    arguments = MultiWorkerMirroredStrategy, CommunicationOptions()
    same_refusal(comm, TypeError, said, *arguments, communicator=comm)
    assert_usable(comm, monkeypatch)


def test_a_resolver_on_one_rank_only_must_agree_with_the_others(comm, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", right(comm.rank, comm.size))
    other = ClusterSpec({"worker": ["x"] * comm.size})
    resolver = SimpleClusterResolver(other, task_type="worker", task_id=1)
    resolver = resolver if comm.rank == 1 else None
    arguments = (MultiWorkerMirroredStrategy, resolver)
    said = same_refusal(comm, ValueError, "another cluster", *arguments, communicator=comm)
    assert "worker 0 at 'x', expected at 'w0'" in said
    assert_usable(comm, monkeypatch)
