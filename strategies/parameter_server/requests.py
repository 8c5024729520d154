"""What workers and parameter servers exchange: requests, and the shards that they are about.

A request without an answer is called a push. Messages between two ranks keep their order, so a
request is answered after all that its worker pushed before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collectives.messaging.remote_error import Failure
from collectives.shm.seqlock import ArrayAddress
from strategies.base.membership import Membership
from strategies.cluster.tf_config import TFConfig, validate_for_parameter_servers
from strategies.core.values import whole_number


class ShardInfo(NamedTuple):
    """What a worker needs to read and change a shard."""

    number: int
    server: int
    """The number of the server, not its rank."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: ArrayAddress | None
    """Where the workers of the server's host map it."""


class VariableInfo(NamedTuple):
    """One variable, as its chief made it: its shards are in the order of its rows."""

    what: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[ShardInfo, ...]
    split: bool


class Request(NamedTuple):
    """The call of a method of `Server` that takes a `Call`."""

    method: str
    shard: int | None = None
    """The shard that it is about, if it is about one."""
    arguments: tuple[Any, ...] = ()


class PushFailed(NamedTuple):
    """Notification to a worker: one of its pushes failed."""

    failure: Failure
    shard: int | None
    """What the push was for."""


@dataclass(frozen=True)
class Roles:
    """The world's ranks by role, each in the order of their tasks."""

    workers: tuple[int, ...]
    """With the chief."""
    servers: tuple[int, ...]
    chief: int
    tasks: tuple[str, ...]
    """The name of each rank's task."""

    @classmethod
    def of(cls, membership: Membership) -> Roles:
        """The roles in the cluster."""
        workers = membership.ranks_of("chief", "worker")
        servers = membership.ranks_of("ps")
        chief = next(rank for rank in workers if membership.places[rank].is_chief)
        tasks = tuple(str(place.task) for place in membership.places)
        return cls(tuple(workers), tuple(servers), chief, tasks)

    def name(self, rank: int) -> str:
        """A rank in messages."""
        return f"{self.tasks[rank]} (rank {rank})"


def validate_roles(config: TFConfig) -> None:
    """ValueError where the cluster has no servers or no ranks that train."""
    validate_for_parameter_servers(config)
    jobs = config.cluster.as_dict() if config.cluster else {}
    if not jobs.get("ps"):
        raise ValueError(
            f"the cluster has no job ps, but {list(jobs)}: ParameterServerStrategy needs a"
            " TF_CONFIG, or a cluster_resolver, with at least one ps and one worker or chief"
        )
    if not jobs.get("worker") and not jobs.get("chief"):
        raise ValueError(
            f"the cluster has no job worker or chief, but {list(jobs)}: one must train"
        )


def checked_staleness(staleness: int | None, variable_partitioner: Any) -> int | None:
    """A strategy's staleness; TypeError or ValueError for that or a partitioner that is wrong."""
    if variable_partitioner is not None and not callable(variable_partitioner):
        raise TypeError(
            f"variable_partitioner={variable_partitioner!r}: must be a function, or None"
        )
    return None if staleness is None else whole_number("staleness", staleness, 0)
