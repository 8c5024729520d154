"""`ClusterSpec`, and which clusters and tasks each kind of training allows."""

import numpy as np
import pytest

from strategies.cluster.spec import ClusterSpec, Task
from strategies.cluster.tf_config import (
    TFConfig,
    validate_cluster,
    validate_for_collective_training,
    validate_for_parameter_servers,
    validate_for_train_and_evaluate,
    validate_task,
)

TWO = {"worker": ["a:1", "b:1"]}
INDEX = r'TF_CONFIG\["task"\]\["index"\] is '


# --- ClusterSpec ---------------------------------------------------------------------------------


def test_a_dense_cluster():
    spec = ClusterSpec({"worker": ["a", "b"], "ps": ("c",)})
    assert spec.jobs == ["worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "b"
    assert spec.job_tasks("worker") == ["a", "b"]
    assert spec.as_dict() == {"worker": ["a", "b"], "ps": ["c"]}


def test_a_sparse_cluster_keeps_its_gaps():
    spec = ClusterSpec({"worker": {"3": "d", 1: "b"}})
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b", None, "d"]
    assert spec.as_dict() == {"worker": {1: "b", 3: "d"}}
    assert Task("worker", 3) in spec
    assert Task("worker", 2) not in spec
    with pytest.raises(ValueError, match=r"no task 2 in 'worker', but \[1, 3\]"):
        spec.task_address("worker", 2)


def test_a_gapless_dictionary_is_a_list():
    assert ClusterSpec({"ps": {"1": "b", "0": "a"}}) == ClusterSpec({"ps": ["a", "b"]})


def test_a_numpy_integer_is_an_index():
    assert ClusterSpec({"ps": {np.int64(2): "c"}}).task_indices("ps") == [2]


def test_a_copy_is_equal_and_independent():
    source = {"worker": ["a"]}
    spec = ClusterSpec(source)
    source["worker"].append("b")
    assert ClusterSpec(spec) == spec == ClusterSpec({"worker": ["a"]})
    assert hash(ClusterSpec(spec)) == hash(spec)
    spec.as_dict()["worker"].append("b")
    assert spec.num_tasks("worker") == 1


def test_the_order_of_jobs_does_not_matter_but_addresses_do():
    spec = ClusterSpec({"worker": ["a"], "ps": ["b"]})
    assert spec == ClusterSpec({"ps": ["b"], "worker": ["a"]})
    assert spec != ClusterSpec({"ps": ["a"], "worker": ["b"]})
    assert spec != {"worker": ["a"], "ps": ["b"]}


def test_only_a_cluster_with_jobs_is_true():
    assert ClusterSpec({"worker": []})
    assert not ClusterSpec({})


def test_a_job_without_tasks():
    spec = ClusterSpec({"worker": []})
    assert (spec.num_tasks("worker"), spec.job_tasks("worker")) == (0, [])
    assert ClusterSpec(spec.as_dict()) == spec


def test_repr_makes_the_cluster_again():
    spec = ClusterSpec({"worker": ["a", "b"], "ps": {2: "c"}})
    assert repr(spec) == "ClusterSpec({'worker': ['a', 'b'], 'ps': {2: 'c'}})"
    assert eval(repr(spec)) == spec


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job(method):
    with pytest.raises(ValueError, match=r"no job 'ps' in the cluster, but \['worker'\]"):
        getattr(ClusterSpec(TWO), method)("ps")


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (None, TypeError, "cluster is None; it must be a dictionary"),
        (["a"], TypeError, r"cluster is \['a'\]"),
        ({5: ["a"]}, TypeError, "cluster has the key 5; its keys must be strings"),
        ({"ps": "a"}, TypeError, r"""cluster\["ps"\] is 'a'; it must be a list"""),
        ({"ps": ["a", 5]}, TypeError, r'cluster\["ps"\]\[1\] is 5; an address must be a string'),
        ({"ps": {1.0: "a"}}, TypeError, r'an index in cluster\["ps"\] is 1.0; allowed'),
        ({"ps": {True: "a"}}, TypeError, r'an index in cluster\["ps"\] is True; allowed'),
        ({"ps": {"x": "a"}}, ValueError, r"""an index in cluster\["ps"\] is 'x'; allowed"""),
        ({"ps": {-1: "a"}}, ValueError, r'an index in cluster\["ps"\] is -1; allowed'),
        ({"ps": {"1": "a", "01": "b"}}, ValueError, r'index 1 occurs twice in cluster\["ps"\]'),
    ],
)
def test_a_malformed_cluster(cluster, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


def test_a_task_reads_well():
    assert f"{Task('worker', 1)}" == "worker 1"


# --- what each strategy allows -------------------------------------------------------------------


def config_of(task_type, index=0, **jobs):
    return TFConfig(ClusterSpec(jobs), task_type, index)


VALIDATIONS = [
    validate_for_collective_training,
    validate_for_parameter_servers,
    validate_for_train_and_evaluate,
]


@pytest.mark.parametrize("validate", VALIDATIONS)
@pytest.mark.parametrize("config", [TFConfig(), TFConfig(None, "ps", 0)])
def test_without_a_cluster_everything_is_a_single_worker(validate, config):
    validate(config)


@pytest.mark.parametrize("validate", VALIDATIONS)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TFConfig(ClusterSpec(TWO)), "type None and index None; with a cluster, .* needs both"),
        (config_of("chief", chief=["a", "b"]), "one chief is allowed"),
        (config_of("chief", chief=["a"], evaluator=["b", "c"]), "one evaluator is allowed"),
        (config_of("worker", 1, chief=["a"], worker=["b"]), INDEX + r"1; .* \[0\]"),
        (config_of("ps", chief=["a"]), r"\"type\"\] is 'ps'; .* \['chief'\]"),
        (config_of("gpu", gpu=["a"]), r"has the jobs \['gpu'\]"),
    ],
)
def test_what_no_strategy_allows(validate, config, message):
    with pytest.raises(ValueError, match=message):
        validate(config)


@pytest.mark.parametrize("validate", VALIDATIONS)
def test_master_is_an_older_name_of_chief(validate):
    with pytest.raises(ValueError, match=r"has the jobs \['master'\]"):
        validate(config_of("master", master=["a"], worker=["b"]))


def test_a_ps_is_refused_on_every_rank_of_collective_training():
    jobs = {"worker": ["a"], "ps": ["b"]}
    messages = set()
    for task_type in jobs:
        with pytest.raises(ValueError, match="use ParameterServerStrategy") as caught:
            validate_for_collective_training(config_of(task_type, **jobs))
        messages.add(str(caught.value))
        validate_for_parameter_servers(config_of(task_type, **jobs))
    assert len(messages) == 1


def test_collective_training_takes_chief_workers_and_a_data_rank():
    jobs = {"chief": ["a"], "worker": ["b"], "data": ["c"], "ps": []}
    for task_type in ("chief", "worker", "data"):
        validate_for_collective_training(config_of(task_type, **jobs))


def test_train_and_evaluate_takes_one_chief():
    validate_for_train_and_evaluate(config_of("worker", chief=["a"], worker=["b"]))
    with pytest.raises(ValueError, match="a task of job 'chief' is needed"):
        validate_for_train_and_evaluate(config_of("worker", worker=["a"]))


def test_a_cluster_of_single_leaders_is_valid():
    validate_cluster(ClusterSpec({"chief": ["a"], "evaluator": {2: "b"}, **TWO}))
    validate_task(Task("evaluator", 2), ClusterSpec({"evaluator": {2: "b"}}))


def test_an_evaluator_of_another_index_than_the_clusters():
    with pytest.raises(ValueError, match=INDEX + r"0; job 'evaluator' has the indices \[2\]"):
        validate_task(Task("evaluator", 0), ClusterSpec({"evaluator": {2: "b"}}))
