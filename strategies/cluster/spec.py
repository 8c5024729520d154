"""Clusters and tasks.

The rules are those of `tf.train.ClusterSpec`. Where TensorFlow ignores a malformed value or lets it
collide with another one, the value is refused here. Addresses are advisory: MPI connects the
processes, so they need no port.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Jobs: TypeAlias = Mapping[str, Sequence[str] | Mapping[int, str] | Mapping[str, str]]

_DIGITS = re.compile("[0-9]{1,9}")
_ROLES = ("chief", "worker", "ps", "evaluator")


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
    number from 0 up or occurs twice. The methods raise ValueError for what isn't in the cluster.
    """

    def __init__(self, cluster: ClusterSpec | Jobs, *, name: str = "cluster") -> None:
        jobs = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        self._jobs = {
            job: _read_tasks(tasks, f"{name}[{json.dumps(job)}]")
            for job, tasks in as_object(jobs, name, "from job names to addresses").items()
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


def ordered_tasks(cluster: ClusterSpec) -> list[Task]:
    """The cluster's tasks by id: chief, workers, ps, evaluator, then other jobs by name."""

    def place(job: str) -> tuple[int, str]:
        return (_ROLES.index(job) if job in _ROLES else len(_ROLES), job)

    jobs = sorted(cluster.jobs, key=place)
    return [Task(job, index) for job in jobs for index in cluster.task_indices(job)]


def worker_cluster(hosts: Iterable[str]) -> ClusterSpec:
    """The cluster of a world without `TF_CONFIG`: each rank is the worker of its number."""
    return ClusterSpec({"worker": [f"{host}:{rank}" for rank, host in enumerate(hosts)]})


def shown(value: object) -> str:
    """The value for a message: its `repr`, shortened in the middle."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}"


def read_index(value: object, where: str) -> int:
    """The index or count that a value stands for: an integer from 0 up, or its decimal digits.

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
            raise ValueError(f"index {index} occurs twice in {where}: {shown(tasks)}")
        if not isinstance(address, str):
            raise TypeError(f"{where}[{index}] is {shown(address)}; an address must be a string")
        addresses[index] = address
    return addresses


def as_object(value: object, where: str, form: str) -> Mapping[str, Any]:
    """A JSON object; TypeError, naming `where` it stands and its `form`, for anything else."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} is {shown(value)}; it must be a dictionary {form}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{where} has the key {shown(key)}; its keys must be strings")
    return value
