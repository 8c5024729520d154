"""Cluster resolvers: the cluster from `TF_CONFIG`, the caller, Slurm, or the MPI world.

The counterparts of `tf.distribute.cluster_resolver`'s classes. A session-era `master` address
and device counts aren't part of them: MPI connects the processes, one process is one device.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping

from collectives import Communicator
from strategies.cluster.slurm import expand_counts, expand_hosts, place_tasks
from strategies.cluster.spec import (
    ClusterSpec,
    as_object,
    ordered_tasks,
    read_index,
    worker_cluster,
)
from strategies.cluster.tf_config import TFConfig, parse_tf_config, validate_cluster
from strategies.core.world import world_of

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
]


class ClusterResolver(ABC):
    """Gives a strategy its cluster and this process's task in it.

    As `tf.distribute.cluster_resolver.ClusterResolver`. `task_type` and `task_id` are None where
    they aren't known.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The cluster; an empty one, which is false, for a single worker."""

    def tf_config(self) -> TFConfig:
        """The same answers as one value, whose `to_text()` every rank can report.

        Raises TypeError or ValueError for a cluster or a task that TF_CONFIG could not have.
        """
        cluster = ClusterSpec(self.cluster_spec() or {}, name="cluster_spec()")
        if not (self.task_type is None or isinstance(self.task_type, str)):
            raise TypeError(f"task_type is {self.task_type!r}; it must be a string, or None")
        index = None if self.task_id is None else read_index(self.task_id, "task_id")
        return TFConfig(cluster or None, self.task_type, index)


class _KnownCluster(ClusterResolver):
    """A resolver whose cluster is known from when it was made."""

    _cluster: ClusterSpec

    def cluster_spec(self) -> ClusterSpec:
        """The cluster as it was when this resolver was made."""
        return self._cluster


class TFConfigClusterResolver(_KnownCluster):
    """The cluster and task in the environment variable `TF_CONFIG`, read once, when made.

    As `tf.distribute.cluster_resolver.TFConfigClusterResolver`, which reads the variable anew on
    every use. A `task_type` or `task_id` given here goes before the variable's. Raises what
    `parse_tf_config` raises.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = parse_tf_config(os.environ.get("TF_CONFIG"))
        self._cluster = config.cluster or ClusterSpec({})
        self.task_type = config.task_type if task_type is None else task_type
        self.task_id = config.task_id if task_id is None else read_index(task_id, "task_id")
        self.rpc_layer = rpc_layer
        self.environment = environment or ""


class SimpleClusterResolver(_KnownCluster):
    """A cluster and task given by the caller.

    As `tf.distribute.cluster_resolver.SimpleClusterResolver`. Raises TypeError where
    `cluster_spec` isn't a `ClusterSpec`, and TypeError or ValueError for a bad `task_id`.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        *,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str = "",
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(f"cluster_spec is {cluster_spec!r}; it must be a ClusterSpec")
        self._cluster = cluster_spec
        self.task_type = task_type
        self.task_id = None if task_id is None else read_index(task_id, "task_id")
        self.rpc_layer = rpc_layer
        self.environment = environment


class MPIClusterResolver(_KnownCluster):
    """The ranks of an MPI world as the workers of a cluster, in rank order.

    TensorFlow has no counterpart in its releases. Addresses are `host:rank`, for reading only.
    Every rank of the communicator (the default: `collectives.world()`) must make one.
    """

    def __init__(self, communicator: Communicator | None = None) -> None:
        if communicator is None or not hasattr(communicator, "all_gather_object"):
            communicator = world_of(communicator)
        self.communicator = communicator
        self._cluster = worker_cluster(communicator.all_gather_object(socket.gethostname()))
        self.task_type = "worker"
        self.task_id = communicator.rank


class TPUClusterResolver(MPIClusterResolver):
    """The ranks of an MPI world, each with the devices that JAX finds on its host.

    As `tf.distribute.cluster_resolver.TPUClusterResolver`. tpu: None, "" or "local". Raises
    ValueError for a name, since no TPU is looked up: start one rank on each of its hosts.
    """

    def __init__(self, tpu: str | None = None, communicator: Communicator | None = None) -> None:
        if tpu not in (None, "", "local"):
            raise ValueError(f"tpu={tpu!r}: must be None, '' or 'local': start a rank on each host")
        super().__init__(communicator)


class SlurmClusterResolver(_KnownCluster):
    """The tasks of a Slurm step, from its environment, read once, when made.

    As `tf.distribute.cluster_resolver.SlurmClusterResolver`; GPUs are not needed, and not counted.
    jobs: how many tasks each job has (default: all are workers); tasks get them in the order chief,
    workers, ps, evaluator, others by name, by SLURM_PROCID. tasks_per_node: where the step
    doesn't define it. Addresses are `host:port`, from port_base on, for reading only. Raises
    TypeError for a count that is no integer, and ValueError outside of a Slurm step, where the
    jobs' tasks aren't as many as the step's, and for a second chief or evaluator.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        tasks_per_node: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        rank = read_index(_of_slurm("PROCID"), "SLURM_PROCID")
        count = read_index(_of_slurm("STEP_NUM_TASKS", "NTASKS"), "the number of the step's tasks")
        if rank >= count:
            raise ValueError(f"SLURM_PROCID is {rank}; the Slurm step has {count} tasks")
        hosts = expand_hosts(_of_slurm("STEP_NODELIST", "NODELIST"))
        if tasks_per_node is None:
            per_host = expand_counts(_of_slurm("STEP_TASKS_PER_NODE", "TASKS_PER_NODE"))
        else:
            per_host = [read_index(tasks_per_node, "tasks_per_node")] * len(hosts)
        named = {"worker": count} if jobs is None else jobs
        named = as_object(named, "jobs", "from job names to numbers of tasks")
        given = {job: read_index(tasks, f"jobs[{job!r}]") for job, tasks in named.items()}
        if sum(given.values()) != count:
            raise ValueError(f"jobs={given}: the Slurm step has {count} tasks")
        distribution = os.environ.get("SLURM_DISTRIBUTION", "block")
        placed = place_tasks(hosts, per_host, count, distribution)
        first = read_index(port_base, "port_base")
        ports = [first + placed[:number].count(host) for number, host in enumerate(placed)]
        addresses = [f"{host}:{port}" for host, port in zip(placed, ports, strict=True)]
        tasks = ordered_tasks(ClusterSpec({job: [""] * tasks for job, tasks in given.items()}))
        self._cluster = ClusterSpec(
            {
                job: [addresses[n] for n, task in enumerate(tasks) if task.type == job]
                for job in given
            }
        )
        validate_cluster(self._cluster)
        self.task_type, self.task_id = tasks[rank].type, tasks[rank].index
        self.rpc_layer = rpc_layer


def _of_slurm(*names: str) -> str:
    """The first of the variables SLURM_… that is set."""
    for name in names:
        value = os.environ.get(f"SLURM_{name}")
        if value:
            return value
    raise ValueError(f"SLURM_{names[0]} isn't set: this is no task that srun has started")
