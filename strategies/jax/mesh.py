"""A mesh of the devices of all processes: replicas, and the logical devices of each."""

from __future__ import annotations

import hashlib
import math
import operator
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from collectives import Communicator
from strategies.cluster_resolver import TPUClusterResolver

_Results = TypeVar("_Results")

REPLICA = "replica"
"""The axis of the replicas, for collectives of `jax.lax` in `TPUStrategy.run`."""


class Topology(NamedTuple):
    """The processes, and the devices of each, as `tf.tpu.experimental.Topology`."""

    num_tasks: int
    num_tpus_per_task: int


class DeviceAssignment(NamedTuple):
    """How devices form replicas, as `tf.tpu.experimental.DeviceAssignment`."""

    num_replicas: int
    num_cores_per_replica: int

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: Sequence[int] | None = None,
        num_replicas: int = 1,
    ) -> DeviceAssignment:
        """Replicas of so many devices as the product of `computation_shape`; None: of one.

        ValueError unless the replicas use all devices of the topology.
        """
        built = cls(num_replicas, math.prod(computation_shape or (1,)))
        built.check(topology.num_tasks * topology.num_tpus_per_task)
        return built

    def check(self, devices: int) -> None:
        """ValueError unless the replicas use this number of devices."""
        if min(self) < 1 or self.num_replicas * self.num_cores_per_replica != devices:
            raise ValueError(
                f"{self.num_replicas} replicas of {self.num_cores_per_replica} devices: must use"
                f" all {devices} devices"
            )


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Connect the processes by `jax.distributed`, before JAX has computed anything. Collective.

    As `tf.tpu.experimental.initialize_tpu_system`, but a second call changes nothing: it does not
    invalidate arrays. JAX raises RuntimeError in a program that has used its devices before.
    """
    resolver = cluster_resolver or TPUClusterResolver()
    _connect(resolver.communicator)
    return Topology(jax.process_count(), jax.local_device_count())


def _connect(communicator: Communicator) -> None:
    if communicator.size == 1 or jax.distributed.is_initialized():
        return
    hosts = communicator.all_gather_object(socket.gethostname())
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    with socket.socket() as free:
        free.bind(("", 0))
        address = communicator.broadcast_object(f"{host}:{free.getsockname()[1]}")
    jax.distributed.initialize(address, communicator.size, communicator.rank)


class ReplicaMesh:
    """The mesh, and the shardings of arrays on it.

    The axis of logical devices is split into its prime factors, so that any split of an array into
    as many parts as logical devices is a sharding.
    """

    def __init__(
        self, assignment: DeviceAssignment | None, compare: Callable[[str], None] | None
    ) -> None:
        """`compare` raises on every process where texts differ; None for one process.

        ValueError for replicas that don't use all devices, or lie in several processes.
        """
        self._compare = compare
        if compare is not None:
            compare(f"TPUStrategy: {assignment}")
        devices = sorted(jax.devices(), key=lambda each: (each.process_index, each.id))
        given = assignment or DeviceAssignment(len(devices), 1)
        given.check(len(devices))
        self.replicas, self.cores = given
        counts = Counter(each.process_index for each in devices)
        if len(set(counts.values())) > 1 or counts[0] % self.cores:
            raise ValueError(
                f"replicas of {self.cores} devices: must divide the devices of each process, of"
                f" which the processes have {', '.join(map(str, counts.values()))}: equally many"
            )
        self.factors = list(_prime_factors(self.cores))
        self._names = [f"core_{number}" for number in range(len(self.factors))]
        self._on_cpu = devices[0].platform == "cpu"
        self._devices = np.array(devices).reshape(self.replicas, *self.factors)
        self.mesh = Mesh(self._devices, (REPLICA, *self._names))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.by_replica = NamedSharding(self.mesh, PartitionSpec(REPLICA))

    def wait_on_cpu(self, results: _Results) -> _Results:
        """The results of a compiled function; on devices of the CPU, when they are computed.

        There the collectives of two functions in flight can hold all threads of XLA while each
        waits for a device that has none left: a deadlock, which XLA ends after 30 minutes.
        """
        return jax.block_until_ready(results) if self._on_cpu else results

    def place(self, value: Any, sharding: NamedSharding) -> jax.Array:
        """An array that is equal on all processes, with this sharding. Collective."""
        known = not isinstance(value, jax.Array) or value.is_fully_replicated
        if not (known or value.is_fully_addressable):
            return self.wait_on_cpu(jax.device_put(value, sharding))
        host = np.asarray(value)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        if self._compare is not None:
            digest = hashlib.blake2b(host.tobytes(), digest_size=16).hexdigest()
            self._compare(f"TPUStrategy: an array {host.dtype}{host.shape} of contents {digest}")
        return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])

    def assign(self, tensor: Any, logical_device_id: int) -> jax.Array:
        """As `TPUStrategy.experimental_assign_to_logical_device`."""
        number = operator.index(logical_device_id)
        if not 0 <= number < self.cores:
            raise ValueError(
                f"logical_device_id={number}: must be from 0 to {self.cores - 1}, since a replica"
                f" has {self.cores} logical devices"
            )
        if isinstance(tensor, jax.core.Tracer):
            raise ValueError(
                "experimental_assign_to_logical_device: a compiled function of JAX can't keep an"
                " array on one of a replica's devices: call it outside of run, or split"
            )
        column = self._devices.reshape(self.replicas, self.cores)[:, number]
        return self.place(tensor, NamedSharding(Mesh(column, (REPLICA,)), PartitionSpec()))

    def split(self, tensor: Any, partition_dimensions: Sequence[int]) -> jax.Array:
        """As `TPUStrategy.experimental_split_to_logical_devices`."""
        shape, parts = np.shape(tensor), list(map(operator.index, partition_dimensions))
        text = f"partition_dimensions={parts}"
        if len(parts) != len(shape):
            raise ValueError(f"{text}: must have one number for each axis of the shape {shape}")
        if min(parts, default=1) < 1 or math.prod(parts) != self.cores:
            raise ValueError(
                f"{text}: must have the product {self.cores}, the number of a replica's logical"
                " devices"
            )
        if any(length % count for length, count in zip(shape, parts, strict=True)):
            raise ValueError(f"{text}: must divide the axes of the shape {shape}")
        free = list(zip(self._names, self.factors, strict=True))
        spec = [tuple(_take(free, count)) or None for count in parts]
        return self._constrained(tensor, PartitionSpec(*spec))

    def replicate(self, tensor: Any) -> jax.Array:
        """As `TPUStrategy.experimental_replicate_to_logical_devices`."""
        return self._constrained(tensor, PartitionSpec())

    def _constrained(self, tensor: Any, spec: PartitionSpec) -> jax.Array:
        if not isinstance(tensor, jax.core.Tracer):
            return self.place(tensor, NamedSharding(self.mesh, spec))
        inside = NamedSharding(jax.sharding.get_abstract_mesh(), spec)
        return jax.lax.with_sharding_constraint(tensor, inside)


def _prime_factors(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1


def _take(free: list[tuple[str, int]], count: int) -> Iterator[str]:
    """Take axes whose product is the count from those that are left."""
    for factor in _prime_factors(count):
        axis = next(each for each in free if each[1] == factor)
        free.remove(axis)
        yield axis[0]
