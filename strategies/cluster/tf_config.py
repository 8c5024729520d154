"""`TF_CONFIG`, the JSON text that names a cluster and one's own task in it, and what it allows.

Everything here is a pure function of its arguments; the environment is read elsewhere, once. The
rules are those of `tf.distribute.cluster_resolver.TFConfigClusterResolver` and of TensorFlow's
`multi_worker_util`, except that malformed values are refused rather than ignored.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass

from strategies.cluster.spec import ClusterSpec, Task, as_object, read_index, shown

_TRAINING_JOBS = ("chief", "worker", "evaluator", "data")


@dataclass(frozen=True)
class TFConfig:
    """What one `TF_CONFIG` says. Without a cluster the process is a single worker."""

    cluster: ClusterSpec | None = None
    task_type: str | None = None
    task_id: int | None = None

    @property
    def task(self) -> Task | None:
        """The task, where both its type and its index are known."""
        if self.task_type is None or self.task_id is None:
            return None
        return Task(self.task_type, self.task_id)

    def to_text(self) -> str:
        """The `TF_CONFIG` text that `parse_tf_config` reads as this value."""
        task = {"type": self.task_type, "index": self.task_id}
        given = {key: value for key, value in task.items() if value is not None}
        cluster = self.cluster.as_dict() if self.cluster else {}
        return json.dumps({"cluster": cluster, "task": given})


def parse_tf_config(text: str | None) -> TFConfig:
    """Read the text of `TF_CONFIG`, as `TFConfigClusterResolver` does; None: it is unset.

    Other keys are ignored, unless one resembles a missing key (ValueError). A task type that the
    cluster lacks is refused only by the validations below and by `assign_ranks`. Raises
    json.JSONDecodeError for what isn't JSON, TypeError for a part of the wrong type (such as null,
    or an index 1.7 or true), ValueError for an index that isn't one of the job's, and for a second
    chief or evaluator.
    """
    try:
        return _read_config({} if text is None else _load(text))
    except RecursionError:
        raise ValueError(f"TF_CONFIG is nested too deeply: {shown(text)}") from None


def validate_cluster(cluster: ClusterSpec) -> None:
    """Raise ValueError where a cluster has more than one chief or more than one evaluator."""
    for job in ("chief", "evaluator"):
        if job in cluster.jobs and cluster.num_tasks(job) > 1:
            tasks = shown(cluster.as_dict()[job])
            raise ValueError(f'cluster["{job}"] is {tasks}; one {job} is allowed')


def validate_task(task: Task, cluster: ClusterSpec) -> None:
    """Raise ValueError unless the task is in the cluster, or is the evaluator outside of it."""
    if task in cluster or (task == Task("evaluator", 0) and "evaluator" not in cluster.jobs):
        return
    key = "index"
    if task.type in cluster.jobs:
        allowed = f"job {task.type!r} has the indices {shown(cluster.task_indices(task.type))}"
    elif task.type == "evaluator":
        allowed = "an evaluator outside of the cluster has index 0"
    else:
        key, allowed = "type", f"the cluster's jobs are {shown(cluster.jobs)}"
    raise ValueError(f'TF_CONFIG["task"]["{key}"] is {getattr(task, key)!r}; {allowed}')


def validate_for_collective_training(config: TFConfig) -> None:
    """Raise ValueError where a strategy without parameter servers can't train with these jobs.

    TensorFlow refuses a ps task in its own process only. Here every task is a rank of the same
    world, so a cluster with a ps task is refused on every rank alike. An evaluator may stand in
    the cluster or outside of it (in TensorFlow a KeyError); job `data` feeds the workers.
    """
    jobs = config.cluster.as_dict() if config.cluster else {}
    if jobs.get("ps"):
        seen = f'cluster["ps"] is {shown(jobs["ps"])}'
        allowed = f"a strategy without parameter servers takes only the jobs {_TRAINING_JOBS}"
        raise ValueError(f"{seen}; {allowed}: use ParameterServerStrategy")
    _validate_for("a strategy without parameter servers", _TRAINING_JOBS, config)


def validate_for_parameter_servers(config: TFConfig) -> None:
    """Raise ValueError where `ParameterServerStrategy` can't train with this configuration."""
    _validate_for("ParameterServerStrategy", (*_TRAINING_JOBS, "ps"), config)


def validate_for_train_and_evaluate(config: TFConfig) -> None:
    """Raise ValueError where `train_and_evaluate` can't work with this configuration.

    As `tf.estimator.train_and_evaluate`, it wants exactly one chief.
    """
    _validate_for("train_and_evaluate", ("chief", "worker", "ps", "evaluator"), config)
    if config.cluster and not config.cluster.as_dict().get("chief"):
        raise ValueError(
            "a task of job 'chief' is needed, which saves the checkpoints; the cluster has none"
        )


def _validate_for(strategy: str, jobs: tuple[str, ...], config: TFConfig) -> None:
    if not config.cluster:
        return
    present = [job for job, tasks in config.cluster.as_dict().items() if tasks]
    unknown = [job for job in present if job not in jobs]
    if unknown:
        raise ValueError(f"the cluster has the jobs {shown(unknown)}; {strategy} accepts {jobs}")
    validate_cluster(config.cluster)
    if config.task is None:
        seen = f'TF_CONFIG["task"] has type {config.task_type!r} and index {config.task_id!r}'
        raise ValueError(f"{seen}; with a cluster, {strategy} needs both")
    validate_task(config.task, config.cluster)


def _load(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        problem = f"TF_CONFIG is {shown(text)}, but must be a JSON object: {error.msg}"
        raise json.JSONDecodeError(problem, error.doc, error.pos) from None
    except ValueError as error:  # more digits than Python makes an integer of
        raise ValueError(f"TF_CONFIG is {shown(text)}, which can't be read: {error}") from None


def _read_config(parts: object) -> TFConfig:
    parts = as_object(parts, "TF_CONFIG", 'with the keys "cluster" and "task"')
    # Other keys are ignored, as in TensorFlow, but for those that are probably misspelt.
    objects = {key.casefold(): key for key, value in parts.items() if isinstance(value, dict)}
    for name in ("cluster", "task"):
        near = [] if name in parts else difflib.get_close_matches(name, objects, n=1, cutoff=0.8)
        if near:
            raise ValueError(f"TF_CONFIG has the key {objects[near[0]]!r} and no {name!r}")
    cluster = ClusterSpec(parts.get("cluster", {}), name='TF_CONFIG["cluster"]')
    validate_cluster(cluster)
    config = TFConfig(cluster or None, *_read_task(parts.get("task", {})))
    if cluster and config.task and config.task_type in ("evaluator", *cluster.jobs):
        validate_task(config.task, cluster)
    return config


def _read_task(task: object) -> tuple[str | None, int | None]:
    task = as_object(task, 'TF_CONFIG["task"]', 'with the keys "type" and "index"')
    task_type, index = task.get("type"), None
    if isinstance(task_type, (list, dict)):
        raise TypeError(f'TF_CONFIG["task"]["type"] is {shown(task_type)}; it must be a job name')
    if "index" in task:
        index = read_index(task["index"], 'TF_CONFIG["task"]["index"]')
    # TensorFlow makes a string of any type, of null too.
    return str(task_type) if "type" in task else None, index
