"""What a user may ask for: how a dataset is split between ranks, and how far it is read ahead."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar

from strategies.core.declared import CheckedAttributes, Checks, FixedAttributes


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is split between ranks, as `tf.data.experimental.AutoShardPolicy`.

    DATA: all ranks read everything; each global batch is cut into contiguous parts of ⌈n/W⌉.
    FILE: rank r reads the files r, r + W, r + 2W, … OFF: every rank reads everything for itself.
    HINT: as OFF, since there is no placeholder to fill in. Under these three a rank's batches
    are cut to its portion of the global batch size (`batch_sizes_for_worker`).
    AUTO: FILE where the dataset is made of at least one file a rank, DATA everywhere else.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """As `tf.distribute.InputReplicationMode`; the same thing here: one worker is one replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(unsafe_hash=True)
class InputOptions(FixedAttributes):
    """How a dataset is distributed, as `tf.distribute.InputOptions`, and more.

    experimental_per_replica_buffer_size: so many batches are read ahead by a thread. 0 (the
    default; TensorFlow's is 1) reads each batch when it is asked for.
    auto_shard_policy: goes before the policy in the dataset's own options; None leaves it to them.
    sharding: "seed_offset" lets every rank read everything in an order of its own: shuffles add
    the rank to their seed (`Dataset.with_seed`). No data are left out and none are shared;
    batches are cut as under OFF.

    The rest is accepted for the sake of scripts and changes nothing, since there are no devices
    to place data on. Raises ValueError for what isn't allowed; AttributeError where an attribute is
    assigned.
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
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(
                f"experimental_per_replica_buffer_size={depth!r}: must be an int from 0 on"
            )
        if self.sharding not in (None, "seed_offset"):
            raise ValueError(f"sharding={self.sharding!r}: must be None or 'seed_offset'")
        if self.auto_shard_policy is not None:
            object.__setattr__(self, "auto_shard_policy", as_policy(self.auto_shard_policy))
            if self.sharding:
                raise ValueError("sharding='seed_offset' goes with no auto_shard_policy: omit it")


def as_policy(value: Any) -> AutoShardPolicy:
    """The policy that a member (also TensorFlow's own), its name or its number stands for.

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
    """As `tf.data.experimental.DistributeOptions`. Policies go by name and number as well.

    Raises ValueError for what is no policy, AttributeError for other attributes.
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
    """As `tf.data.Options`, of which the policy alone matters: for `Dataset.with_options`.

        options = Options()
        options.experimental_distribute.auto_shard_policy = AutoShardPolicy.FILE

    Raises AttributeError for other attributes, TypeError for another value.
    """

    checks: ClassVar[Checks] = {"experimental_distribute": _distribute_options}

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)
