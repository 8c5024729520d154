"""`TF_CONFIG`: every row of tf_semantics.md's §2.6 is a case here."""

import contextlib
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies.cluster.spec import ClusterSpec, Task
from strategies.cluster.tf_config import (
    TFConfig,
    parse_tf_config,
    validate_for_collective_training,
    validate_for_parameter_servers,
)

TWO = {"worker": ["a:1", "b:1"]}


def text_of(cluster=None, task=None):
    parts = {"cluster": cluster, "task": task}
    return json.dumps({key: value for key, value in parts.items() if value is not None})


def task_text(**task):
    return json.dumps({"cluster": TWO, "task": task})


# --- what is accepted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [None, "{}", '{"cluster": {}}', '{"task": {}}', '{"environment": "cloud", "tags": ["a"]}'],
)
def test_nothing_set_is_a_single_worker(text):
    assert parse_tf_config(text) == TFConfig()


@pytest.mark.parametrize(
    ("wrong", "missing"), [("clusters", "cluster"), ("CLUSTER", "cluster"), ("tasks", "task")]
)
def test_a_misspelt_key(wrong, missing):
    parts = {"cluster": TWO, "task": {"type": "worker", "index": 1}, "environment": "cloud"}
    parts[wrong] = parts.pop(missing)
    with pytest.raises(ValueError, match=f"the key '{wrong}' and no '{missing}'"):
        parse_tf_config(json.dumps(parts))


def test_a_task_without_a_cluster():
    config = parse_tf_config(text_of(task={"type": "worker", "index": 7}))
    assert config == TFConfig(None, "worker", 7)


@pytest.mark.parametrize(
    ("task", "seen"),
    [
        (None, (None, None)),
        ({}, (None, None)),
        ({"type": "worker"}, ("worker", None)),
        ({"index": 1}, (None, 1)),
    ],
)
def test_a_cluster_without_a_whole_task(task, seen):
    config = parse_tf_config(text_of(TWO, task))
    assert config.cluster == ClusterSpec(TWO)
    assert config.task is None
    assert (config.task_type, config.task_id) == seen
    with pytest.raises(ValueError, match=rf'TF_CONFIG\["task"\] has type {seen[0]!r} and index'):
        validate_for_collective_training(config)


@pytest.mark.parametrize("index", [1, "1", "01"])
def test_an_index(index):
    assert parse_tf_config(task_text(type="worker", index=index)).task == Task("worker", 1)


@pytest.mark.parametrize(("given_type", "read"), [(123, "123"), (None, "None")])
def test_a_type_becomes_a_string(given_type, read):
    config = parse_tf_config(task_text(type=given_type, index=0))
    assert config.task == Task(read, 0)
    with pytest.raises(ValueError, match=rf'\["type"\] is \'{read}\'; .* \[\'worker\'\]'):
        validate_for_collective_training(config)


def test_a_sparse_cluster_in_json():
    cluster = {"worker": {"1": "b:1", "3": "d:1"}}
    config = parse_tf_config(text_of(cluster, {"type": "worker", "index": 3}))
    assert config.cluster == ClusterSpec({"worker": {1: "b:1", 3: "d:1"}})
    assert config.task == Task("worker", 3)


def test_addresses_need_no_port():
    config = parse_tf_config(text_of({"worker": ["host1", ""]}, {"type": "worker", "index": 1}))
    assert config.cluster.job_tasks("worker") == ["host1", ""]


@pytest.mark.parametrize("cluster", [TWO, {**TWO, "evaluator": ["e"]}])
def test_an_evaluator_in_the_cluster_or_outside_of_it(cluster):
    config = parse_tf_config(text_of(cluster, {"type": "evaluator", "index": 0}))
    assert config.task == Task("evaluator", 0)
    validate_for_collective_training(config)
    validate_for_parameter_servers(config)


# --- what is refused -----------------------------------------------------------------------------

INDEX = r'TF_CONFIG\["task"\]\["index"\] is '
CLUSTER = r'TF_CONFIG\["cluster"\]'


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", json.JSONDecodeError, "TF_CONFIG is '', but must be a JSON object"),
        ("{'task'", json.JSONDecodeError, "TF_CONFIG is \"{'task'\", but must be a JSON object"),
        ("1" * 5000, ValueError, "TF_CONFIG is '1+ ... 1+', which can't be read"),
        ("[" * 100_000, ValueError, "TF_CONFIG is nested too deeply"),
        ("null", TypeError, "TF_CONFIG is None; it must be a dictionary"),
        ("[]", TypeError, r"TF_CONFIG is \[\]; it must be a dictionary"),
        ("true", TypeError, "TF_CONFIG is True; it must be a dictionary"),
        ('{"task": null}', TypeError, r'TF_CONFIG\["task"\] is None; it must be a dictionary'),
        ('{"task": ["worker", 0]}', TypeError, r'TF_CONFIG\["task"\] is \[\'worker\', 0\]'),
        ('{"task": "worker"}', TypeError, r'TF_CONFIG\["task"\] is \'worker\''),
        (task_text(type=["worker"], index=0), TypeError, r'TF_CONFIG\["task"\]\["type"\] is \['),
        (task_text(type="worker", index=None), TypeError, INDEX + "None; allowed are integers"),
        (task_text(type="worker", index=1.7), TypeError, INDEX + "1.7; allowed are integers"),
        (task_text(type="worker", index=True), TypeError, INDEX + "True; allowed are integers"),
        (task_text(type="worker", index=[1]), TypeError, INDEX + r"\[1\]; allowed are integers"),
        (task_text(type="worker", index="x"), ValueError, INDEX + "'x'; allowed are integers"),
        (task_text(type="worker", index="1.0"), ValueError, INDEX + "'1.0'; allowed"),
        (task_text(type="worker", index=" 1"), ValueError, INDEX + "' 1'; allowed"),
        (task_text(type="worker", index="\uff11"), ValueError, INDEX + "'\uff11'; allowed"),
        (task_text(type="worker", index="-1"), ValueError, INDEX + "'-1'; allowed"),
        (task_text(type="worker", index=-1), ValueError, INDEX + "-1; allowed"),
        (task_text(type="worker", index=2), ValueError, INDEX + r"2; .* \[0, 1\]"),
        (task_text(type="evaluator", index=1), ValueError, INDEX + "1; .* has index 0"),
        ('{"cluster": ["a"]}', TypeError, CLUSTER + r" is \['a'\]; it must be a dictionary"),
        ('{"cluster": null}', TypeError, CLUSTER + " is None; it must be a dictionary"),
        (text_of({"worker": "a"}), TypeError, CLUSTER + r'\["worker"\] is \'a\'; it must be'),
        (text_of({"worker": ["a", 5]}), TypeError, CLUSTER + r'\["worker"\]\[1\] is 5; an addr'),
        (text_of({"worker": {"x": "a"}}), ValueError, CLUSTER + r'\["worker"\] is \'x\''),
        (text_of({"worker": {"-1": "a"}}), ValueError, CLUSTER + r'\["worker"\] is \'-1\''),
        (text_of({"chief": ["a", "b"]}), ValueError, r'"chief"\] is \[\'a\', \'b\'\]; one chief'),
        (text_of({"evaluator": ["a", "b"]}), ValueError, "one evaluator is allowed"),
    ],
)
def test_a_refused_text(text, error, message):
    with pytest.raises(error, match=message) as caught:
        parse_tf_config(text)
    assert type(caught.value) is error


@pytest.mark.parametrize(("index", "missing"), [(0, False), (1, True), (2, False), (3, True)])
def test_membership_is_tested_rather_than_the_count(index, missing):
    text = text_of({"worker": {"0": "a", "2": "c"}}, {"type": "worker", "index": index})
    if missing:
        with pytest.raises(ValueError, match=rf"{INDEX}{index}; .* \[0, 2\]"):
            parse_tf_config(text)
    else:
        assert parse_tf_config(text).task == Task("worker", index)


# --- any text ------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
near_configs = st.fixed_dictionaries(
    {},
    optional={
        "cluster": json_values
        | st.dictionaries(st.sampled_from(["worker", "chief", "x"]), json_values),
        "task": json_values
        | st.fixed_dictionaries({}, optional={"type": json_values, "index": json_values}),
    },
)


@given(st.text() | json_values.map(json.dumps) | near_configs.map(json.dumps))
def test_no_text_raises_anything_but_value_or_type_errors(text):
    with contextlib.suppress(ValueError, TypeError):
        assert isinstance(parse_tf_config(text), TFConfig)


addresses = st.text(string.printable, max_size=8)
jobs = st.lists(addresses, min_size=1, max_size=4) | st.dictionaries(
    st.integers(0, 20), addresses, min_size=1, max_size=4
)


@st.composite
def configs(draw):
    names = st.sampled_from(["worker", "ps", "data", "gpu \N{GREEK SMALL LETTER MU}"])
    cluster = ClusterSpec(draw(st.dictionaries(names, jobs, min_size=1)))
    job = draw(st.sampled_from(cluster.jobs))
    index = draw(st.sampled_from(cluster.task_indices(job)))
    alone = [TFConfig(cluster), TFConfig(cluster, job), TFConfig(cluster, None, 2)]
    return draw(
        st.sampled_from([TFConfig(cluster, job, index), TFConfig(None, job, index), *alone])
    )


@given(configs())
def test_a_valid_configuration_survives_its_text(config):
    assert parse_tf_config(config.to_text()) == config
