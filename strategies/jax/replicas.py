"""A function compiled for all replicas of a mesh, and the arrays that it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.lax import pcast
from jax.sharding import PartitionSpec

from collectives.caching import LRU
from strategies.core.options import ReduceOp, as_reduce_op
from strategies.core.same_error import PropagatedErrors
from strategies.jax.mesh import REPLICA, ReplicaMesh
from strategies.replication import contexts
from strategies.replication.replication import Replication

_COMPILED = 64


class PerReplicaArray:
    """One array for each replica, of equal shapes and dtypes.

    stacked: a `jax.Array` of shape (replicas, …), of which each replica's devices hold one row.
    """

    def __init__(self, stacked: jax.Array, mesh: ReplicaMesh) -> None:
        self.stacked, self._mesh = stacked, mesh

    @property
    def values(self) -> tuple[np.ndarray[Any, Any], ...]:
        """The arrays of this process's replicas, in order."""
        whole = self._mesh.wait_on_cpu(jax.device_put(self.stacked, self._mesh.by_replica))
        rows = {each.index[0].start or 0: each.data for each in whole.addressable_shards}
        return tuple(np.asarray(rows[number][0]) for number in sorted(rows))

    def __repr__(self) -> str:
        return f"PerReplicaArray({self.stacked.dtype}{list(self.stacked.shape[1:])})"


class JaxReplicaContext(contexts.ReplicaContext):
    """A replica in a compiled function: its number and its reductions are traced."""

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of the replica, a traced int32."""
        return jax.lax.axis_index(REPLICA)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: Any = None) -> Any:
        """Fold a pytree over the replicas. ValueError for an op that is neither SUM nor MEAN."""
        fold = jax.lax.pmean if as_reduce_op(reduce_op) is ReduceOp.MEAN else jax.lax.psum
        return fold(value, REPLICA)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate each array of a pytree along the axis, in the order of the replicas."""
        return jax.lax.all_gather(value, REPLICA, axis=axis, tiled=True)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Raises NotImplementedError: a compiled function is not left."""
        raise NotImplementedError("merge_call: under TPUStrategy `run` is one compiled function")


class Replicas:
    """What `TPUStrategy` computes on its mesh."""

    def __init__(self, strategy: Replication, mesh: ReplicaMesh) -> None:
        self._strategy, self._mesh = strategy, mesh
        self._compiled = lru_cache(_COMPILED)(self._compile)
        self._traced: LRU[Any, bool] = LRU(_COMPILED)
        self._described = lru_cache(_COMPILED)(_described)
        self._fold = jax.jit(_fold, static_argnums=(1, 2), out_shardings=mesh.replicated)
        self._join = jax.jit(_join, static_argnums=1, out_shardings=mesh.replicated)

    def _agree(self, what: Any, structure: Any, arrays: Sequence[jax.Array]) -> None:
        """A MismatchError on every rank where their calls differ: XLA would wait for ever."""
        if not self._strategy.trains_alone:
            kinds = tuple(each.aval for each in arrays)
            self._strategy.barrier(self._described(what, structure, kinds))

    def replicate(self, value: Any) -> Any:
        """As `TPUStrategy.replicate`."""
        self._strategy.barrier(f"TPUStrategy.replicate of {jax.tree.structure(value)}")

        def of(leaf: Any) -> jax.Array:
            chiefs = self._strategy.mirror(np.array(leaf), "TPUStrategy.replicate")
            return self._mesh.place(chiefs, self._mesh.replicated)

        with PropagatedErrors(self._strategy.communicator, "TPUStrategy.replicate"):
            for leaf in jax.tree.leaves(value):
                np.asarray(jnp.asarray(leaf))  # raises what it raises before the others wait
        return jax.tree.map(of, value)

    def stack(self, rows: np.ndarray[Any, Any]) -> PerReplicaArray:
        """An array of shape (replicas of this process, …) as its replicas' values. Collective."""
        shape = (self._mesh.replicas, *rows.shape[1:])
        rows = np.asarray(rows, jax.dtypes.canonicalize_dtype(rows.dtype))
        self._strategy.barrier(f"TPUStrategy: {rows.dtype} of shape {shape}")
        return PerReplicaArray(
            jax.make_array_from_process_local_data(self._mesh.by_replica, rows, shape), self._mesh
        )

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        """As `TPUStrategy.run`."""
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs or {})))
        apart = tuple(isinstance(each, PerReplicaArray) for each in leaves)
        with PropagatedErrors(self._strategy.communicator, "TPUStrategy.run"):
            arrays = [
                each.stacked if isinstance(each, PerReplicaArray) else self._on_mesh(each)
                for each in leaves
            ]
            compiled = self._compiled(fn, structure, apart)
            program = compiled, tuple(each.aval for each in arrays)
            if self._traced.recall(program) is None:
                # What `fn` raises, it raises here.
                compiled.trace(*arrays)
                self._traced.put(program, True)
        self._agree(fn, structure, arrays)
        results = self._mesh.wait_on_cpu(compiled(*arrays))
        return jax.tree.map(lambda each: PerReplicaArray(each, self._mesh), results)

    def _on_mesh(self, value: Any) -> jax.Array:
        known = isinstance(value, jax.Array)
        if known and value.sharding.device_set == self._mesh.replicated.device_set:
            return value
        return self._mesh.place(value, self._mesh.replicated)

    def _compile(self, fn: Callable[..., Any], structure: Any, apart: tuple[bool, ...]) -> Any:
        strategy = self._strategy

        def replica(*arrays: Any) -> Any:
            # As differing on the replicas: else a gradient by them would be a sum already.
            own = [
                array[0] if single else pcast(array, REPLICA, to="varying")
                for array, single in zip(arrays, apart, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(structure, own)
            with contexts.entered(strategy, JaxReplicaContext(strategy)):
                result = fn(*args, **kwargs)
            return jax.tree.map(lambda each: jnp.asarray(each)[None], result)

        specs = tuple(PartitionSpec(REPLICA) if each else PartitionSpec() for each in apart)
        mapped = shard_map(
            replica,
            mesh=self._mesh.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(REPLICA),
            axis_names={REPLICA},
        )
        return jax.jit(mapped)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """As `TPUStrategy.reduce`."""
        with PropagatedErrors(self._strategy.communicator, "TPUStrategy.reduce"):
            op = as_reduce_op(reduce_op)
            if isinstance(axis, list):
                raise TypeError(f"axis={axis}: must be None, an int or a tuple of ints")
        axes = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        what = f"reduce {op.name} axis={axis}"
        return self._over_all(lambda stacked: self._fold(stacked, op, axes), what, value)

    def gather(self, value: Any, axis: int) -> Any:
        """As `TPUStrategy.gather`."""
        what = f"gather axis={axis}"
        return self._over_all(lambda stacked: self._join(stacked, axis), what, value)

    def _over_all(self, compiled: Callable[[jax.Array], jax.Array], what: str, value: Any) -> Any:
        """The compiled function of each stacked array, which replicates it on all devices."""
        leaves, structure = jax.tree.flatten(value)
        with PropagatedErrors(self._strategy.communicator, "TPUStrategy", what):
            arrays = list(map(self._stacked, leaves))
        self._agree(what, structure, arrays)
        results = [self._mesh.wait_on_cpu(compiled(each)) for each in arrays]
        return jax.tree.unflatten(structure, results)

    def _stacked(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, PerReplicaArray):
            return leaf.stacked
        array = self._on_mesh(leaf)
        return jnp.broadcast_to(array, (self._mesh.replicas, *array.shape))


def _fold(stacked: jax.Array, op: ReduceOp, axes: tuple[Any, ...]) -> jax.Array:
    own = np.lib.array_utils.normalize_axis_tuple(axes, stacked.ndim - 1)
    over = (0, *(each + 1 for each in own))
    return stacked.mean(over) if op is ReduceOp.MEAN else stacked.sum(over)


def _join(stacked: jax.Array, axis: int) -> jax.Array:
    return jnp.concatenate(list(stacked), axis)


def _name_of(function: Any) -> str:
    """The same on all ranks, unlike addresses."""
    while isinstance(function, partial):
        function = function.func
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def _described(what: Any, structure: Any, kinds: Sequence[Any]) -> str:
    name = what if isinstance(what, str) else f"run {_name_of(what)}"
    texts = ", ".join(each.str_short() for each in kinds)
    return f"TPUStrategy.{name} of {texts} in {structure}"
