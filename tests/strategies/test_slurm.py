"""Clusters from Slurm's environment: host lists, task counts, and tasks of hosts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import ClusterSpec
from strategies.cluster.slurm import expand_counts, expand_hosts, place_tasks
from strategies.cluster_resolver import SlurmClusterResolver
from tests.strategies.support import refusal


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("b,a", ["b", "a"]),
        ("t[1-3]", ["t1", "t2", "t3"]),
        ("t[08-10,2]x", ["t08x", "t09x", "t10x", "t2x"]),
        ("r[1-2]n[3,5],z", ["r1n3", "r1n5", "r2n3", "r2n5", "z"]),
        ("gpu[01-02],gpu[7],cpu", ["gpu01", "gpu02", "gpu7", "cpu"]),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-2", "a]1[", "a[x]", "a[3-1]", "a[]", "a[1-2]]["])
def test_what_is_no_host_list(text):
    refusal(ValueError, "is no host list", expand_hosts, text)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), min_size=1, max_size=4))
def test_ranges_keep_their_order_and_their_zeros(ranges):
    text = "n[" + ",".join(f"{first:03d}-{first + more:03d}" for first, more in ranges) + "]"
    numbers = [n for first, more in ranges for n in range(first, first + more + 1)]
    assert expand_hosts(text) == [f"n{n:03d}" for n in numbers]


def test_task_counts():
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for text in ("", "x", "2(3)", "1,,2"):
        refusal(ValueError, "is no list of task counts", expand_counts, text)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_tasks_fill_one_host_after_the_other(per_host, data):
    hosts = [f"h{n}" for n in reversed(range(len(per_host)))]
    tasks = data.draw(st.integers(0, sum(per_host)))
    placed = place_tasks(hosts, per_host, tasks)
    assert len(placed) == tasks
    assert [hosts.index(host) for host in placed] == sorted(hosts.index(host) for host in placed)
    assert all(placed.count(host) <= most for host, most in zip(hosts, per_host, strict=True))
    refusal(ValueError, "don't fit", place_tasks, hosts, per_host, sum(per_host) + 1)


@pytest.mark.parametrize("kind", ["cyclic", "cyclic:block"])
def test_tasks_go_round_the_hosts(kind):
    assert place_tasks(["b", "a", "c"], [2, 1, 3], 6, kind) == ["b", "a", "c", "b", "c", "c"]
    refusal(ValueError, "by 'plane=2': known are", place_tasks, ["a"], [2], 2, "plane=2")


@pytest.fixture
def step(monkeypatch):
    """A function that sets the variables of a step."""

    def enter(rank, nodes="b,a", per_node="2,1", tasks=3):
        monkeypatch.delenv("SLURM_DISTRIBUTION", raising=False)
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(tasks))
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", per_node)

    return enter


@pytest.mark.parametrize("rank", range(3))
def test_all_tasks_are_workers_where_slurm_runs_them(step, rank):
    """TensorFlow sorts the hosts: task 0, which runs on b, would get the address of a."""
    step(rank)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["b:8888", "b:8889", "a:8888"]})
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)


def test_the_distribution_of_the_step_counts(step, monkeypatch):
    step(1)
    for distribution in ("cyclic", "cyclic:block", "Cyclic,NoPack"):
        monkeypatch.setenv("SLURM_DISTRIBUTION", distribution)
        spec = SlurmClusterResolver().cluster_spec()
        assert spec == ClusterSpec({"worker": ["b:8888", "a:8888", "b:8889"]})


@pytest.mark.parametrize(
    ("rank", "task"), [(0, ("chief", 0)), (1, ("worker", 0)), (2, ("worker", 1)), (3, ("ps", 0))]
)
def test_jobs_are_in_the_order_of_ids(step, rank, task):
    step(rank, nodes="n[1-2]", per_node="2(x2)", tasks=4)
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1, "chief": 1}, port_base=100)
    assert (resolver.task_type, resolver.task_id) == task
    cluster = {"worker": ["n1:101", "n2:100"], "ps": ["n2:101"], "chief": ["n1:100"]}
    assert resolver.cluster_spec() == ClusterSpec(cluster)


def test_tasks_per_node_can_be_given(step, monkeypatch):
    step(1, nodes="n[1-2]", per_node="", tasks=2)
    refusal(ValueError, "SLURM_STEP_TASKS_PER_NODE isn't set", SlurmClusterResolver)
    spec = SlurmClusterResolver(tasks_per_node=1).cluster_spec()
    assert spec == ClusterSpec({"worker": ["n1:8888", "n2:8888"]})


def test_what_does_not_fit(step, monkeypatch):
    step(0)
    refusal(ValueError, "the Slurm step has 3 tasks", SlurmClusterResolver, {"worker": 2})
    refusal(ValueError, r"jobs\['ps'\] is -1", SlurmClusterResolver, {"worker": 4, "ps": -1})
    refusal(TypeError, r"jobs\['worker'\] is 3.0", SlurmClusterResolver, {"worker": 3.0})
    refusal(TypeError, r"jobs is \['worker'\]", SlurmClusterResolver, ["worker"])
    refusal(ValueError, "one chief is allowed", SlurmClusterResolver, {"chief": 3})
    for rank, text in (("3", "the Slurm step has 3 tasks"), ("-1", "SLURM_PROCID is '-1'")):
        monkeypatch.setenv("SLURM_PROCID", rank)
        refusal(ValueError, text, SlurmClusterResolver)
    monkeypatch.delenv("SLURM_PROCID")
    refusal(ValueError, "SLURM_PROCID isn't set: this is no task", SlurmClusterResolver)
