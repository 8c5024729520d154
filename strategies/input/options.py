"""Options of distributed datasets, and the contexts that users' functions receive."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

from strategies.core.options import CheckedAttributes, Checks, FixedAttributes
from strategies.core.values import whole_number


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is split between ranks, as `tf.data.experimental.AutoShardPolicy`.

    DATA: all ranks read everything; each global batch is split into contiguous parts of ⌈n/W⌉.
    FILE: rank r reads the files r, r + W, r + 2W, …
    OFF: every rank reads everything, and keeps it.
    HINT: as OFF, since there is no placeholder to fill in.
    AUTO: FILE where the dataset has at least one file for each rank, DATA otherwise.

    Under FILE, OFF and HINT the batches of a rank are cut to its portion of the global batch size
    (`batch_sizes_for_worker`).
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """As `tf.distribute.InputReplicationMode`. Both are the same: one worker is one replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(unsafe_hash=True)
class InputOptions(FixedAttributes):
    """How a dataset is distributed, as `tf.distribute.InputOptions`, with additions.

    experimental_per_replica_buffer_size: the number of batches that a thread reads ahead. 0 (the
    default; TensorFlow's is 1) reads each batch when it is requested. What is read ahead of a
    dataset of `distribute_datasets_from_function` must not use the same arrays for every batch.
    auto_shard_policy: overrides the policy in the dataset's own options; None keeps that one.
    sharding: "seed_offset" makes every rank read everything in a different order: shuffles add
    the rank to their seed (`Dataset.with_seed`). Batches are cut as under OFF.

    The other options are accepted for compatibility and have no effect, since data aren't placed
    on devices. Raises ValueError or TypeError for other values, AttributeError where an attribute
    is assigned.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 0
    auto_shard_policy: AutoShardPolicy | str | int | None = None
    sharding: str | None = None
    experimental_prefetch_to_device: bool | None = None

    def __post_init__(self) -> None:
        depth = self.experimental_per_replica_buffer_size
        whole_number("experimental_per_replica_buffer_size", depth, 0)
        if self.sharding not in (None, "seed_offset"):
            raise ValueError(f"sharding={self.sharding!r}: must be None or 'seed_offset'")
        if self.auto_shard_policy is not None:
            object.__setattr__(self, "auto_shard_policy", as_policy(self.auto_shard_policy))
            if self.sharding:
                raise ValueError(
                    f"sharding='seed_offset' and auto_shard_policy={self.auto_shard_policy!r}:"
                    " must be only one of them"
                )


def as_policy(value: Any) -> AutoShardPolicy:
    """The policy of an enum member (TensorFlow's too), its name or its number.

    Raises ValueError for anything else.
    """
    number = getattr(value, "value", value)
    for policy in AutoShardPolicy:
        if number == policy or str(value).upper() == policy.name:
            return policy
    names = ", ".join(policy.name for policy in AutoShardPolicy)
    raise ValueError(f"auto_shard_policy={value!r}: must be one of {names}")


@dataclass
class DistributeOptions(CheckedAttributes):
    """As `tf.data.experimental.DistributeOptions`. A policy may be a name or a number, too.

    Raises ValueError for other policies, AttributeError for other attributes.
    """

    checks: ClassVar[Checks] = {"auto_shard_policy": as_policy}

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


def _distribute_options(given: Any) -> DistributeOptions:
    if not isinstance(given, DistributeOptions):
        kind = type(given).__name__
        raise TypeError(f"experimental_distribute is a {kind}: must be DistributeOptions")
    return given


@dataclass
class Options(CheckedAttributes):
    """As `tf.data.Options`, with the auto-shard policy only: for `Dataset.with_options`.

        options = Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE

    Raises AttributeError for other attributes, TypeError for other values.
    """

    checks: ClassVar[Checks] = {"experimental_distribute": _distribute_options}

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)


@dataclass(frozen=True)
class InputContext:
    """The argument of a dataset function, as `tf.distribute.InputContext`: one pipeline a rank."""

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The global batch size divided by the replicas; ValueError where a remainder is left."""
        size, remainder = divmod(global_batch_size, self.num_replicas_in_sync)
        if remainder:
            raise ValueError(
                f"global_batch_size={global_batch_size!r}: must be a multiple of the"
                f" {self.num_replicas_in_sync} replicas"
            )
        return size


@dataclass(frozen=True)
class ValueContext:
    """The argument of a value function, as `tf.distribute.experimental.ValueContext`."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
