"""TPUStrategy: replicas on the devices that JAX has in all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from strategies.cluster_resolver import TPUClusterResolver
from strategies.core import nest
from strategies.core.options import ReduceOp
from strategies.core.same_error import call_on_all
from strategies.core.values import Array
from strategies.input import InputOptions, ValueContext, distribute
from strategies.replication import contexts
from strategies.replication.replication import Replication

if TYPE_CHECKING:
    from strategies.jax.mesh import DeviceAssignment


class _Batches:
    """A dataset of PerReplicaArrays, which can be iterated any number of times."""

    def __init__(self, dataset: Iterable[Any], split_rows: Callable[[Any], Any]) -> None:
        self._dataset, self._split_rows = dataset, split_rows

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset:
            yield nest.map_leaves(self._split_rows, batch)


class TPUStrategy(Replication):
    """Replicas on the devices of JAX, TPUs or others, of all processes: one mesh, one program.

    As `tf.distribute.TPUStrategy`. Each process is a rank with all devices that JAX gives it. A
    replica is one device, or several logical devices by `experimental_device_assignment`. `run`
    compiles a function of JAX for all replicas, and the replicas communicate by XLA. So state is
    passed and returned, as JAX's functions do; `strategies.Variable`, optimizers of `strategies`
    and models of other frameworks can't be used. `experimental_spmd_xla_partitioning` changes
    nothing: XLA partitions so always.

    Where there are several ranks and the program has not called
    `strategies.jax.initialize_tpu_system`, the constructor does. Collective, as all methods are.
    Tested on devices of the CPU; it was never run on a TPU.

    Raises NotImplementedError without JAX 0.10 or newer; TypeError for another resolver; ValueError
    for an assignment that doesn't use all devices, or with replicas in several processes.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        try:
            from strategies.jax.mesh import ReplicaMesh, initialize_tpu_system
            from strategies.jax.replicas import Replicas
        except ImportError as error:
            raise NotImplementedError(
                "TPUStrategy: TPUs aren't supported without JAX 0.10; install it, or use"
                " MirroredStrategy for the ranks of one node, or MultiWorkerMirroredStrategy for"
                " several, under mpirun"
            ) from error
        if tpu_cluster_resolver is None:
            tpu_cluster_resolver = TPUClusterResolver()
        if not isinstance(tpu_cluster_resolver, TPUClusterResolver):
            kind = type(tpu_cluster_resolver).__name__
            raise TypeError(f"tpu_cluster_resolver is a {kind}: must be a TPUClusterResolver")
        self.cluster_resolver = tpu_cluster_resolver
        super().__init__(tpu_cluster_resolver.communicator)
        initialize_tpu_system(tpu_cluster_resolver)
        compare = None if self.trains_alone else self.barrier
        self._mesh = ReplicaMesh(experimental_device_assignment, compare)
        self._replicas = Replicas(self, self._mesh)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all devices."""
        return self._mesh.replicas

    @property
    def mesh(self) -> Any:
        """The `jax.sharding.Mesh`: "replica", and one axis for each factor of logical devices."""
        return self._mesh.mesh

    def scope(self) -> AbstractContextManager[None]:
        """A context in which the strategy is in force. RuntimeError inside `run`."""
        return contexts.scope_of(self)

    def store(self, value: Array, what: str) -> NoReturn:
        """NotImplementedError: variables of `strategies` are arrays of NumPy."""
        raise NotImplementedError(f"{what}: under TPUStrategy use arrays of `replicate`")

    def replicate(self, value: Any) -> Any:
        """A pytree of arrays with the chief's values, replicated on all devices. Collective.

        Raises a MismatchError on every rank where shapes or dtypes differ.
        """
        contexts.require_cross_replica("TPUStrategy.replicate", self)
        return self._replicas.replicate(value)

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call a function of JAX as every replica; its results are PerReplicaArrays. Collective.

        It is compiled (`jax.jit` of `jax.shard_map`) once for a function, the pytree of its
        arguments, and their shapes. A PerReplicaArray is given to each replica as that replica's
        array, any other array, which must be equal on all ranks, whole. `get_replica_context` gives
        its number, `all_reduce` and `all_gather`; collectives of `jax.lax` over the axis
        `strategies.jax.REPLICA` work, too.

        Raises ValueError where args is neither a tuple nor a list, RuntimeError inside `run`; a
        MismatchError on every rank where the ranks' functions or arrays differ.
        """
        contexts.require_cross_replica("TPUStrategy.run", self)
        if not isinstance(args, list | tuple):
            raise ValueError(f"args={args!r}: must be a tuple or list of positional arguments")
        return self._replicas.run(fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Fold the replicas' arrays; the result is replicated on all devices. Collective.

        axis None: element by element. Otherwise each replica's array is folded over the axis, an
        int or a tuple, too. Other values count once for each replica. ValueError for an op that is
        neither SUM nor MEAN, TypeError for a list as axis.
        """
        contexts.require_cross_replica("TPUStrategy.reduce", self)
        return self._replicas.reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' arrays, concatenated along the axis on all devices. Collective."""
        contexts.require_cross_replica("TPUStrategy.gather", self)
        return self._replicas.gather(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The NumPy arrays of this process's replicas; a tuple of one for any other value."""
        values = getattr(value, "values", None)
        return values if isinstance(values, tuple) else (value,)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Iterable[Any]:
        """The batches as PerReplicaArrays: equal parts of the global batch. Collective.

        Ranks share the dataset as under every strategy. Iteration raises, on every rank alike,
        ValueError for a batch that doesn't divide by the replicas: XLA needs equal shapes.
        """
        return _Batches(distribute(self.communicator, dataset, options), self._split_rows)

    def _split_rows(self, leaf: Any) -> Any:
        rows, local = np.asarray(leaf), self._mesh.replicas // self.communicator.size
        counts = self.communicator.all_gather_object(len(rows))
        if len(set(counts)) > 1 or len(rows) % local:
            raise ValueError(
                f"a batch of {sum(counts)} rows: must divide by the {self._mesh.replicas} replicas"
            )
        return self._replicas.stack(rows.reshape(local, -1, *rows.shape[1:]))

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """What the function returns for each replica, arrays of equal shapes. Collective.

        It is called on the process that has the replica.
        """
        local = self._mesh.replicas // self.communicator.size
        first = self.communicator.rank * local

        def make() -> Array:
            given = [ValueContext(first + number, self._mesh.replicas) for number in range(local)]
            return np.stack([np.asarray(value_fn(each)) for each in given])

        rows = call_on_all(self.communicator, "distribute_values_from_function", make)
        return self._replicas.stack(rows)

    # Logical devices. Outside of `run` the methods are collective, and raise a MismatchError on
    # every rank where the ranks' arrays differ.

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """The array on one logical device of each replica, as in `tf.distribute.TPUStrategy`.

        Raises ValueError for a number that no logical device has; inside `run`, as TensorFlow does
        where XLA partitions by `experimental_spmd_xla_partitioning`.
        """
        return self._mesh.assign(tensor, logical_device_id)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """The array, split over each replica's logical devices: inside `run` or outside.

        partition_dimensions: the number of parts along each axis; which part lies on which of the
        replica's devices is not defined. Raises ValueError unless there is one number for each
        axis, which divides the axis, and their product is the number of logical devices.
        """
        return self._mesh.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """The array, whole on each of a replica's logical devices: inside `run` or outside."""
        return self._mesh.replicate(tensor)

    def __repr__(self) -> str:
        rank, size = self.communicator.rank, self.communicator.size
        return f"<TPUStrategy of {self._mesh.replicas} replicas, rank {rank} of {size}>"
