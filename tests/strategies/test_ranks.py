"""Which rank has which task, and the errors where the ranks don't agree (§2.7)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.cluster.ranks import assign_ranks
from strategies.cluster.spec import ClusterSpec, Task, ordered_tasks, worker_cluster

FULL = ClusterSpec(
    {
        "data": ["d:1"],
        "evaluator": ["e:1"],
        "ps": ["p:1", "q:1"],
        "worker": ["v:1", "w:1"],
        "chief": ["c:1"],
    }
)
ROOT = Path(__file__).parents[2]
TWO = ClusterSpec({"worker": ["a:1", "b:1"]})


def report(cluster, task=None, host="h"):
    parts = {"cluster": cluster.as_dict() if cluster else {}}
    if task:
        parts["task"] = {"type": task.type, "index": task.index}
    return json.dumps(parts), host


def worker(index, cluster=TWO, host=None):
    return report(cluster, Task("worker", index), host or f"host{index}")


def places_of(cluster, *others):
    """The place of each task of a cluster, and of others."""
    tasks = [*ordered_tasks(cluster), *others]
    return dict(zip(tasks, assign_ranks([report(cluster, task) for task in tasks]), strict=True))


def ids_of(cluster, *others):
    return [place.id for place in places_of(cluster, *others).values()]


def chiefs_of(cluster, *others):
    return [str(task) for task, place in places_of(cluster, *others).items() if place.is_chief]


def refusal(*reports):
    with pytest.raises(ValueError, match="TF_CONFIG") as caught:
        assign_ranks(reports)
    return str(caught.value)


# --- ids and chief -------------------------------------------------------------------------------


def test_the_order_is_chief_workers_ps_evaluator_then_other_jobs():
    ids = ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1", "evaluator 0", "data 0"]
    assert [str(task) for task in ordered_tasks(FULL)] == ids
    assert ids_of(FULL) == list(range(7))


def test_workers_go_by_index_and_gaps_give_no_ids():
    cluster = ClusterSpec({"worker": {"10": "c", "9": "b", "2": "a"}})
    assert [task.index for task in ordered_tasks(cluster)] == [2, 9, 10]
    assert places_of(cluster)[Task("worker", 10)].id == 2


def test_without_a_chief_worker_i_has_id_i():
    assert ids_of(TWO) == [0, 1]


def test_an_evaluator_outside_of_the_cluster_comes_last():
    evaluator = Task("evaluator", 0)
    assert ids_of(TWO, evaluator) == [0, 1, 2]
    assert chiefs_of(TWO, evaluator) == ["worker 0", "evaluator 0"]


def test_a_task_outside_of_the_cluster_has_no_id():
    with pytest.raises(ValueError, match=r'\["index"\] is 2; job \'worker\' has .* \[0, 1\]'):
        assign_ranks([worker(0), worker(2)])
    with pytest.raises(ValueError, match=r"\[\"type\"\] is 'ps'"):
        assign_ranks([worker(0), report(TWO, Task("ps", 0))])


def test_the_chief_is_the_chief_and_so_is_the_evaluator():
    assert chiefs_of(FULL) == ["chief 0", "evaluator 0"]


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ({"worker": ["a", "b"]}, "worker 0"),
        ({"worker": {"3": "d", "1": "b"}, "ps": ["p"]}, "worker 1"),
        ({"chief": [], "worker": ["a"]}, "worker 0"),
    ],
)
def test_without_a_chief_the_first_worker_is_it(jobs, expected):
    assert chiefs_of(ClusterSpec(jobs)) == [expected]


# --- assignments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "{}", '{"task": {"type": "worker", "index": 0}}'])
def test_without_a_cluster_all_are_workers_in_rank_order(text):
    places = assign_ranks([(text, "x"), (None, "y"), (text, "x")])
    assert [place.task for place in places] == [Task("worker", index) for index in range(3)]
    assert [place.id for place in places] == [0, 1, 2]
    assert [place.is_chief for place in places] == [True, False, False]
    assert {place.cluster for place in places} == {worker_cluster(["x", "y", "x"])}
    assert places[0].cluster.job_tasks("worker") == ["x:0", "y:1", "x:2"]


def test_a_world_of_one_without_tf_config():
    (place,) = assign_ranks([(None, "x")])
    assert (place.task.type, place.id, place.is_chief) == ("worker", 0, True)


def test_places_follow_the_cluster_and_not_the_launch():
    tasks = ordered_tasks(FULL)[::-1]
    places = assign_ranks([report(FULL, task) for task in tasks])
    assert [place.task for place in places] == tasks
    assert [place.id for place in places] == list(range(7))[::-1]
    chiefs = [str(place.task) for place in places if place.is_chief]
    assert chiefs == ["evaluator 0", "chief 0"]
    assert [place.task.type for place in places] == [task.type for task in tasks]
    assert all(place.cluster == FULL for place in places)


def test_an_evaluator_outside_of_the_cluster_is_one_more_task():
    places = assign_ranks([report(TWO, Task("evaluator", 0)), worker(1), worker(0)])
    assert [(place.task.type, place.id) for place in places] == [
        ("evaluator", 2),
        ("worker", 1),
        ("worker", 0),
    ]


def test_the_order_of_jobs_in_the_text_does_not_matter():
    one = ClusterSpec({"worker": ["a"], "ps": ["b"]})
    other = ClusterSpec({"ps": ["b"], "worker": ["a"]})
    places = assign_ranks([report(other, Task("ps", 0)), report(one, Task("worker", 0))])
    assert [place.id for place in places] == [1, 0]


@st.composite
def clusters(draw):
    jobs = st.sampled_from(["worker", "ps", "data"])
    counts = draw(st.dictionaries(jobs, st.integers(1, 3), min_size=1))
    counts |= {job: 1 for job in ("chief", "evaluator") if draw(st.booleans())}
    step = draw(st.integers(1, 2))
    return ClusterSpec(
        {job: {index * step: f"{job}{index}" for index in range(n)} for job, n in counts.items()}
    )


@given(clusters(), st.booleans(), st.randoms(use_true_random=False))
def test_any_order_of_launch_gives_the_same_ids(cluster, lone_evaluator, chance):
    tasks = ordered_tasks(cluster)
    if lone_evaluator and "evaluator" not in cluster.jobs:
        tasks.append(Task("evaluator", 0))
    reports = [report(cluster, task) for task in chance.sample(tasks, len(tasks))]
    places = assign_ranks(reports)
    assert sorted(place.id for place in places) == list(range(len(tasks)))
    assert {place.task: place.id for place in places} == {
        task: number for number, task in enumerate(tasks)
    }


# --- refusals ------------------------------------------------------------------------------------


def test_texts_that_do_not_parse_are_all_named():
    message = refusal(("{", "x"), worker(0), ('{"task": null}', "y"), worker(1))
    assert "rank 0 on x: JSONDecodeError: TF_CONFIG is '{'" in message
    assert 'rank 2 on y: TypeError: TF_CONFIG["task"] is None; it must be a dictionary' in message
    assert "rank 1 on host0:" not in message


def test_an_unreadable_text_among_unset_ones():
    assert "rank 1 on y: JSONDecodeError" in refusal((None, "x"), ("", "y"))


def test_set_on_some_and_unset_on_others():
    message = refusal((None, "x"), worker(0), ("{}", "y"), worker(1))
    assert "rank 0 on x, rank 2 on y: saw TF_CONFIG unset or without a cluster" in message
    assert "expected ClusterSpec({'worker': ['a:1', 'b:1']}), as on rank 1 on host0" in message


def test_another_cluster_is_named_with_its_difference():
    other = ClusterSpec({"worker": ["a:1", "z:1"], "ps": ["p:1"]})
    message = refusal(worker(0, other, "x"), worker(0), worker(1))
    assert "rank 0 on x: saw another cluster than expected, as on rank 1 on host0" in message
    assert "worker 1 at 'z:1', expected at 'b:1'; ps 0 at 'p:1', expected absent" in message


def test_clusters_that_differ_in_an_empty_job():
    other = ClusterSpec({"worker": ["a:1", "b:1"], "ps": []})
    assert "jobs ['worker', 'ps'], expected ['worker']" in refusal(worker(0), worker(1, other))


def test_as_many_ranks_for_each_cluster():
    other = ClusterSpec({"worker": ["a:1", "z:1"]})
    assert "rank 1 on host1: saw another cluster" in refusal(worker(0), worker(1, other))


def test_a_missing_task_or_index():
    alone = (json.dumps({"cluster": TWO.as_dict(), "task": {"type": "worker"}}), "y")
    message = refusal(report(TWO, None, "x"), alone)
    assert 'rank 0 on x: saw TF_CONFIG["task"] with type None and index None' in message
    assert "rank 1 on y: saw TF_CONFIG[\"task\"] with type 'worker' and index None" in message


def test_a_type_that_the_cluster_lacks():
    message = refusal(worker(0), report(TWO, Task("master", 0), "x"))
    assert "rank 1 on x: saw master 0; " in message
    assert "the cluster's jobs are ['worker']" in message


def test_an_index_that_the_cluster_lacks():
    message = refusal(worker(0), worker(2))
    assert 'rank 1 on host2: ValueError: TF_CONFIG["task"]["index"] is 2' in message


def test_two_claims_of_one_task():
    message = refusal(worker(0, host="x"), worker(0, host="y"))
    assert "worker 0 is claimed by rank 0 on x and rank 1 on y; expected exactly one" in message
    assert "worker 1 is claimed by no rank" in message


def test_two_lone_evaluators():
    evaluator = report(TWO, Task("evaluator", 0))
    message = refusal(evaluator, worker(1), evaluator)
    assert "evaluator 0 is claimed by rank 0 on h and rank 2 on h" in message
    assert "worker 0 is claimed by no rank" in message


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_size_is_reported_before_duplicate_claims(size):
    message = refusal(*[worker(0)] * size)
    assert f"the world's size is {size}, but the cluster has 2 tasks" in message
    assert f"rank {size - 1} on host0 has worker 0" in message
    assert "tasks without a rank: ['worker 1']" in message
    assert "claimed" not in message


def test_a_lone_evaluator_counts_in_the_size():
    evaluator = report(TWO, Task("evaluator", 0))
    assert "size is 2, but the cluster has 3 tasks" in refusal(evaluator, worker(0))


def test_the_size_and_single_offenders_are_reported_together():
    message = refusal(worker(0), worker(1), (None, "x"), worker(5))
    assert "the world's size is 4, but the cluster has 2 tasks" in message
    assert "rank 2 on x: saw TF_CONFIG unset" in message
    assert "rank 3 on host5: ValueError" in message


def test_processes_with_other_hash_seeds_have_the_same_result():
    other = ClusterSpec({"worker": ["a:1", "z:1"], "ps": ["p:1"]})
    reports = [worker(0), worker(1, other), (None, "x"), ("[", "y"), report(TWO, None, "z")]
    reports = [tuple(each) for each in [*reports, worker(1), worker(0, other)]]
    code = f"from strategies.cluster.ranks import assign_ranks; assign_ranks({reports!r})"
    messages = {refusal(*reports)}
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        messages.add(ended.stderr.partition("\nValueError: ")[2].rstrip("\n"))
    assert len(messages) == 1


def test_each_offender_of_a_large_world_is_named():
    hosts = [f"node{rank}" for rank in range(300)]
    cluster = worker_cluster(hosts)
    reports = [worker(rank, cluster, host) for rank, host in enumerate(hosts)]
    for rank in (7, 123, 299):
        reports[rank] = (None, hosts[rank])
    message = refusal(*reports)
    assert "rank 7 on node7, rank 123 on node123, rank 299 on node299: saw TF_CONFIG" in message
    assert len(message) < 1000
