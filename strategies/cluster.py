"""Who takes part in a program: clusters, tasks, and `TF_CONFIG`, the JSON text that names both.

Everything here is a pure function of its arguments; the environment is read elsewhere, once.
The rules are those of `tf.train.ClusterSpec`, of
`tf.distribute.cluster_resolver.TFConfigClusterResolver` and of TensorFlow's `multi_worker_util`.
Where TensorFlow ignores a malformed value or lets it collide with another one, the value is
refused here. Addresses are advisory: MPI connects the processes, so they need no port.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Jobs: TypeAlias = Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]]

_DIGITS = re.compile("[0-9]{1,9}")
_TRAINING_JOBS = ("chief", "worker", "evaluator", "data")


@dataclass(frozen=True)
class Task:
    """One process's place in a cluster, as `TF_CONFIG["task"]` gives it."""

    type: str
    index: int

    def __str__(self) -> str:
        return f"{self.type} {self.index}"


class ClusterSpec:
    """Jobs, and the address of each of their tasks, as in `tf.train.ClusterSpec`; immutable.

    `cluster` maps a job to a list of addresses or to a dictionary {index: address}, whose gaps
    are kept; another `ClusterSpec` is copied. `name` is what messages call it. Raises TypeError
    for a cluster, job or address of the wrong type, and ValueError for an index that isn't a
    number from 0 up or stands twice. The methods raise ValueError for what isn't in the cluster.
    """

    def __init__(self, cluster: ClusterSpec | Jobs, *, name: str = "cluster") -> None:
        jobs = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        self._jobs = {
            job: _read_tasks(tasks, f"{name}[{json.dumps(job)}]")
            for job, tasks in _object(jobs, name, "from job names to addresses").items()
        }

    @property
    def jobs(self) -> list[str]:
        """The job names, in the order given."""
        return list(self._jobs)

    def num_tasks(self, job_name: str) -> int:
        """How many tasks the job has."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """The job's valid indices, ascending."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """The address of one task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"no task {task_index!r} in {job_name!r}, but {shown(sorted(tasks))}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """The job's addresses by index, None in the gaps."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, Any]:
        """The dictionary that makes this cluster again: lists, or {index: address} with gaps."""
        return {job: self._compact(job) for job in self._jobs}

    def __contains__(self, task: object) -> bool:
        return isinstance(task, Task) and task.index in self._jobs.get(task.type, {})

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == other._jobs if isinstance(other, ClusterSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset((job, frozenset(tasks.items())) for job, tasks in self._jobs.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"no job {job_name!r} in the cluster, but {shown(self.jobs)}")
        return self._jobs[job_name]

    def _compact(self, job: str) -> list[str | None] | dict[int, str]:
        tasks = self._jobs[job]
        gapless = tasks and max(tasks) + 1 == len(tasks)
        return self.job_tasks(job) if gapless else dict(sorted(tasks.items()))


@dataclass(frozen=True)
class TFConfig:
    """What one `TF_CONFIG` says. Without a cluster the process is a single worker.

    `task` has a type and an index; where only one of the two was given, it is the lone one.
    """

    cluster: ClusterSpec | None = None
    task: Task | None = None
    lone_type: str | None = None
    lone_index: int | None = None

    @property
    def task_type(self) -> str | None:
        """The task's type, also where no index came with it."""
        return self.task.type if self.task else self.lone_type

    @property
    def task_id(self) -> int | None:
        """The task's index, also where no type came with it."""
        return self.task.index if self.task else self.lone_index

    def to_text(self) -> str:
        """The `TF_CONFIG` text that `parse_tf_config` reads as this value."""
        task = {"type": self.task_type, "index": self.task_id}
        given = {key: value for key, value in task.items() if value is not None}
        cluster = self.cluster.as_dict() if self.cluster else {}
        return json.dumps({"cluster": cluster, "task": given})


def parse_tf_config(text: str | None) -> TFConfig:
    """Read the text of `TF_CONFIG`, as `TFConfigClusterResolver` does; None: it is unset.

    Other keys are ignored. A task type that the cluster lacks is refused only by the validations
    below and by `assign_ranks`. Raises json.JSONDecodeError for what isn't JSON, TypeError for a
    part of the wrong type (such as null, or an index 1.7 or true), ValueError for an index that
    isn't one of the job's, and for a second chief or evaluator.
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
    """Raise ValueError where `MultiWorkerMirroredStrategy` can't train with this configuration.

    TensorFlow refuses a ps task in its own process only. Here every task is a rank of the same
    world, so a cluster with a ps task is refused on every rank alike. An evaluator may stand in
    the cluster or outside of it (in TensorFlow a KeyError); job `data` feeds the workers.
    """
    jobs = config.cluster.as_dict() if config.cluster else {}
    if jobs.get("ps"):
        seen = f'cluster["ps"] is {shown(jobs["ps"])}'
        allowed = f"MultiWorkerMirroredStrategy knows only the jobs {_TRAINING_JOBS}"
        raise ValueError(f"{seen}; {allowed}: use ParameterServerStrategy")
    _validate_for("MultiWorkerMirroredStrategy", _TRAINING_JOBS, config)


def validate_for_parameter_servers(config: TFConfig) -> None:
    """Raise ValueError where `ParameterServerStrategy` can't train with this configuration."""
    _validate_for("ParameterServerStrategy", (*_TRAINING_JOBS, "ps"), config)


def validate_for_train_and_evaluate(config: TFConfig) -> None:
    """Raise ValueError where `tf.estimator.train_and_evaluate` would refuse this configuration.

    It wants exactly one chief, or one master (its older name) without an evaluator.
    """
    _validate_for("train_and_evaluate", ("chief", "master", "worker", "ps", "evaluator"), config)
    jobs = config.cluster.as_dict() if config.cluster else {}
    leaders = [f"{job} at {at}" for job in ("chief", "master") for at in jobs.get(job, ())]
    if jobs and len(leaders) != 1:
        raise ValueError(f"the cluster's leaders are {shown(leaders)}; exactly one is needed")
    if jobs.get("master") and "evaluator" in (*jobs, config.task_type):
        raise ValueError("job 'evaluator' stands beside 'master'; it is allowed beside 'chief'")


def shown(value: object) -> str:
    """The value for a message: its `repr`, shortened in the middle."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"


def read_index(value: object, where: str) -> int:
    """The index that a value stands for: an integer from 0 up, or its decimal digits.

    TensorFlow's `int(value)` takes 1.7 and true for 1, and -1, whose id is then the chief's.
    Raises TypeError or ValueError, naming `where` the value stands.
    """
    allowed = "allowed are integers from 0 up, and at most nine digits as a string"
    if isinstance(value, str):
        index = int(value) if _DIGITS.fullmatch(value) else -1
    elif isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{where} is {shown(value)}; {allowed}")
    else:
        index = operator.index(value)
    if index < 0:
        raise ValueError(f"{where} is {shown(value)}; {allowed}")
    return index


def _validate_for(strategy: str, jobs: tuple[str, ...], config: TFConfig) -> None:
    if not config.cluster:
        return
    unknown = [job for job in config.cluster.jobs if job not in jobs]
    if unknown:
        raise ValueError(f"the cluster has the jobs {shown(unknown)}; {strategy} knows {jobs}")
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
    parts = _object(parts, "TF_CONFIG", 'with the keys "cluster" and "task"')
    cluster = ClusterSpec(parts.get("cluster", {}), name='TF_CONFIG["cluster"]')
    validate_cluster(cluster)
    task_type, index = _read_task(parts.get("task", {}))
    if task_type is None or index is None:
        return TFConfig(cluster or None, None, task_type, index)
    if cluster and task_type in ("evaluator", *cluster.jobs):
        validate_task(Task(task_type, index), cluster)
    return TFConfig(cluster or None, Task(task_type, index))


def _read_task(task: object) -> tuple[str | None, int | None]:
    task = _object(task, 'TF_CONFIG["task"]', 'with the keys "type" and "index"')
    task_type, index = task.get("type"), None
    if isinstance(task_type, (list, dict)):
        raise TypeError(f'TF_CONFIG["task"]["type"] is {shown(task_type)}; it must be a job name')
    if "index" in task:
        index = read_index(task["index"], 'TF_CONFIG["task"]["index"]')
    # TensorFlow makes a string of any type, of null too.
    return str(task_type) if "type" in task else None, index


def _read_tasks(tasks: object, where: str) -> dict[int, str]:
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(f"{where} is {shown(tasks)}; it must be a list, or a dict by index")
    addresses: dict[int, str] = {}
    where_index = f"an index in {where}"
    for key, address in tasks.items():
        index = read_index(key, where_index)
        if index in addresses:
            raise ValueError(f"index {index} stands twice in {where}: {shown(tasks)}")
        if not isinstance(address, str):
            raise TypeError(f"{where}[{index}] is {shown(address)}; an address must be a string")
        addresses[index] = address
    return addresses


def _object(value: object, where: str, form: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is {shown(value)}; it must be a dictionary {form}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{where} has the key {shown(key)}; its keys must be strings")
    return value
