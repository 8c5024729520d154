"""The assignment of MPI ranks to tasks, from every rank's `TF_CONFIG`.

`assign_ranks` is a pure function of what all ranks reported, so every rank finds the same
assignment or raises the same error. Ids follow the cluster, not the launch: chief, workers by
index, parameter servers, evaluator, then other jobs by name. (TensorFlow's Estimator sorts other
jobs before the workers; `multi_worker_util.is_chief` and `id_in_cluster` give the rest.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strategies.cluster.spec import ClusterSpec, Task, ordered_tasks, shown, worker_cluster
from strategies.cluster.tf_config import TFConfig, parse_tf_config, validate_task

_LONE_EVALUATOR = Task("evaluator", 0)


@dataclass(frozen=True)
class RankPlace:
    """One rank's task in the cluster.

    `id` counts the tasks in the order of `ordered_tasks`. It is the key to split with, so that the
    order of launch never matters.
    """

    task: Task
    id: int
    is_chief: bool
    """Whether the task writes what is written once: the chief, else the first worker; an evaluator,
    too. (`multi_worker_util.is_chief` finds none where the workers' indices don't begin at 0.)"""
    cluster: ClusterSpec


class _Claim(NamedTuple):
    """A report that was read: what the rank's configuration says, or why it can't be read."""

    rank: int
    host: str
    config: TFConfig
    problem: str | None

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def assign_ranks(reports: Sequence[tuple[str | None, str]]) -> tuple[RankPlace, ...]:
    """Each MPI rank's place, from each one's `TF_CONFIG` (None: unset) and host, in rank order.

    Without a cluster on any rank, all are workers in rank order. Otherwise all ranks must have
    the same cluster and each task exactly one rank, an evaluator outside of the cluster counting
    as one more task. Raises ValueError, whose text names every offending rank, its host, what it
    saw and what was expected, and is the same whatever rank computes it.
    """
    claims = [_read(rank, *report) for rank, report in enumerate(reports)]
    # That of most ranks, the lowest rank's among equals; None where none has any.
    counts = Counter(claim.config.cluster for claim in claims if claim.config.cluster)
    cluster = max(counts, key=counts.__getitem__, default=None)
    problems = _size_problems(claims, cluster) + _rank_problems(claims, cluster)
    # Shared tasks are reported only where the world has the right size.
    problems = problems or _sharing_problems(claims, cluster)
    if problems:
        what = "the ranks' TF_CONFIG, or their cluster_resolver, don't fit together:"
        raise ValueError("\n  ".join([what, *problems]))
    if cluster:
        return _places([claim.config.task for claim in claims if claim.config.task], cluster)
    cluster = worker_cluster(claim.host for claim in claims)
    return _places(ordered_tasks(cluster), cluster)


def _read(rank: int, tf_config: str | None, host: str) -> _Claim:
    try:
        return _Claim(rank, host, parse_tf_config(tf_config), None)
    except (TypeError, ValueError) as error:
        return _Claim(rank, host, TFConfig(), f"{type(error).__name__}: {error}")


def _expected_tasks(claims: Sequence[_Claim], cluster: ClusterSpec) -> list[Task]:
    tasks = ordered_tasks(cluster)
    claimed = any(claim.config.task == _LONE_EVALUATOR for claim in claims)
    outside = claimed and "evaluator" not in cluster.jobs
    return [*tasks, _LONE_EVALUATOR] if outside else tasks


def _size_problems(claims: Sequence[_Claim], cluster: ClusterSpec | None) -> list[str]:
    expected = _expected_tasks(claims, cluster) if cluster else []
    if cluster is None or len(expected) == len(claims):
        return []
    seen = {claim.config.task for claim in claims}
    claimed = ", ".join(f"{claim} has {claim.config.task or 'no task'}" for claim in claims)
    absent = shown([str(task) for task in expected if task not in seen])
    sizes = f"the world's size is {len(claims)}, but the cluster has {len(expected)} tasks"
    start = ""
    if len(claims) == 1:
        start = "; start all tasks with one mpirun, or each with `python -m strategies.launch`"
    return [f"{sizes}; saw: {claimed}; tasks without a rank: {absent}{start}"]


def _rank_problems(claims: Sequence[_Claim], cluster: ClusterSpec | None) -> list[str]:
    """What is wrong with single ranks; ranks with the same problem share one line."""
    holder = next((claim for claim in claims if claim.config.cluster == cluster), None)
    ranks_of: dict[str, list[str]] = {}
    for claim in claims:
        problem = claim.problem
        if cluster and not problem:
            problem = _disagreement(claim.config, cluster, f"as on {holder}")
        if problem:
            ranks_of.setdefault(problem, []).append(str(claim))
    return [f"{', '.join(ranks)}: {problem}" for problem, ranks in ranks_of.items()]


def _disagreement(config: TFConfig, cluster: ClusterSpec, holder: str) -> str | None:
    if config.cluster is None:
        return f"saw TF_CONFIG unset or without a cluster; expected {shown(cluster)}, {holder}"
    if config.cluster != cluster:
        return (
            f"saw another cluster than expected, {holder}: {_difference(config.cluster, cluster)}"
        )
    if config.task is None:
        seen = f"type {config.task_type!r} and index {config.task_id!r}"
        return f'saw TF_CONFIG["task"] with {seen}; expected both, of a task in {shown(cluster)}'
    try:
        validate_task(config.task, cluster)
    except ValueError as error:
        return f"saw {config.task}; {error}"
    return None


def _difference(seen: ClusterSpec, expected: ClusterSpec) -> str:
    """Where two clusters differ, task by task: their full text may be too long to compare."""
    tasks = dict.fromkeys([*ordered_tasks(expected), *ordered_tasks(seen)])
    differing = [
        f"{task} {_address(task, seen)}, expected {_address(task, expected)}"
        for task in tasks
        if _address(task, seen) != _address(task, expected)
    ]
    return "; ".join(differing) or f"jobs {seen.jobs}, expected {expected.jobs}"


def _address(task: Task, cluster: ClusterSpec) -> str:
    return f"at {cluster.task_address(task.type, task.index)!r}" if task in cluster else "absent"


def _sharing_problems(claims: Sequence[_Claim], cluster: ClusterSpec | None) -> list[str]:
    if cluster is None:
        return []
    ranks_of: dict[Task, list[str]] = {task: [] for task in _expected_tasks(claims, cluster)}
    for claim in claims:
        if claim.config.task:
            ranks_of[claim.config.task].append(str(claim))
    return [
        f"{task} is claimed by {' and '.join(ranks) or 'no rank'}; expected exactly one rank"
        for task, ranks in ranks_of.items()
        if len(ranks) != 1
    ]


def _places(tasks: Sequence[Task], cluster: ClusterSpec) -> tuple[RankPlace, ...]:
    ordered = ordered_tasks(cluster)
    ids = {task: place for place, task in enumerate(ordered)}
    leader = next((task for task in ordered if task.type in ("chief", "worker")), None)
    return tuple(
        RankPlace(
            task,
            id=ids.get(task, len(ordered)),
            is_chief=task.type == "evaluator" or task == leader,
            cluster=cluster,
        )
        for task in tasks
    )
