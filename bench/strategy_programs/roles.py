"""Roles for the ranks of a world, without a TF_CONFIG for each process."""

from __future__ import annotations

from collections.abc import Mapping

from collectives import Communicator
from strategies import ClusterSpec
from strategies.cluster_resolver import SimpleClusterResolver


def resolver_of(comm: Communicator, jobs: Mapping[str, int]) -> SimpleClusterResolver:
    """The rank's task, if the jobs are assigned to the ranks in order."""
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)]
    task_type, index = tasks[comm.rank]
    cluster = ClusterSpec({job: ["localhost"] * count for job, count in jobs.items()})
    return SimpleClusterResolver(cluster, task_type=task_type, task_id=index)
