"""Tasks of TF_CONFIG that start without mpirun."""

import json

import pytest

from strategies.launch import find_tasks
from tests.worlds.launcher import find_mpirun, is_open_mpi
from tests.worlds.pages import page_of, run_in

CLUSTER = {"worker": ["b:1", "[2001:db8::1]:2"], "chief": ["[2001:db8::2]:2222"], "ps": ["b:3"]}


def config(kind, index, cluster=CLUSTER):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_ranks_are_the_tasks_of_the_cluster_and_the_first_serves():
    found = [find_tasks(config(*task)) for task in (("chief", 0), ("worker", 1), ("ps", 0))]
    assert [each.rank for each in found] == [0, 2, 3]
    assert len({each.digest for each in found}) == 1
    assert found[0].own_name == "chief 0 ([2001:db8::2]:2222)"
    assert (found[2].host, found[2].port) == ("2001:db8::2", 2222)
    assert found[0].hosts == {"2001:db8::2", "b", "2001:db8::1"}
    other = CLUSTER | {"ps": ["c:3"]}
    assert find_tasks(config("chief", 0, other)).digest != found[0].digest


def test_tasks_may_have_the_same_address():
    # The first one alone listens on it.
    same = {"worker": ["a:1", "a:1"]}
    found = [find_tasks(config("worker", index, same)) for index in (0, 1)]
    assert [(each.rank, each.size, each.host, each.port) for each in found] == [
        (0, 2, "a", 1),
        (1, 2, "a", 1),
    ]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "TF_CONFIG is None; needed are a cluster, and the type and index of the task"),
        ({"TF_CONFIG": "{"}, "must be a JSON object"),
        ({"TF_CONFIG": json.dumps({"cluster": CLUSTER})}, "needed are a cluster, and the type"),
        (config("worker", 2), r"\['index'\]|\"index\"\] is 2; job 'worker' has the indices"),
        (config("boss", 0), "is 'boss'; the cluster's jobs are"),
        (config("evaluator", 0), "evaluator 0 has no address in the cluster"),
        (config("worker", 0, {"worker": ["here"]}), "worker 0 has the address 'here'; it serves"),
        (config("worker", 0, {"worker": ["a:0"]}), "worker 0 has the address 'a:0'"),
        (config("worker", 0, {"worker": ["a:x"]}), "needs host:port"),
        (config("worker", 0, {"worker": ["http://a:1"]}), "needs host:port"),
    ],
)
def test_a_task_that_can_not_start_says_why(environment, text):
    with pytest.raises(ValueError, match=text):
        find_tasks(environment)


def test_the_commands_of_the_page(tmp_path):
    files, (_, command) = page_of("tf-config")
    ended = run_in(tmp_path, files, command, timeout=60)
    if is_open_mpi(find_mpirun()):
        assert ended.stderr.count("Without mpirun only MPICH can start") == 2, ended.stderr
        return
    assert ended.returncode == 0, ended.stderr
    # Lines that both write at once may be joined.
    for text in ("chief 0 is replica 0", "worker 0 is replica 1"):
        assert text in ended.stdout
