"""Compiled all-reductions: of this project, mpi4jax, and JAX over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import collectives.jax

Reduce = Callable[[Any], Any]
Absent = str
"""Why something can't be measured."""


def ways(world: Any) -> dict[str, Reduce | Absent]:
    """How a rank's array is summed over the ranks, in a program; the first one is ours."""
    return {
        "collectives": collectives.jax.all_reduce,
        "mpi4jax": _mpi4jax(world),
        "psum": _psum(world),
    }


def _mpi4jax(world: Any) -> Reduce | Absent:
    try:
        import mpi4jax
        from mpi4py import MPI
    except Exception as error:  # it needs a certain MPI, compiler and JAX
        return f"{type(error).__name__}: {error}"
    return lambda array: mpi4jax.allreduce(array, op=MPI.SUM, comm=world)


def _psum(world: Any) -> Reduce | Absent:
    if jax.process_count() != world.size:
        return f"jax.distributed has {jax.process_count()} processes"
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    spec = jax.sharding.PartitionSpec("ranks")
    mapped: Reduce = jax.shard_map(
        lambda array: jax.lax.psum(array, "ranks") + jnp.zeros_like(array),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    return mapped


def start_distributed() -> Absent:
    """Start JAX's own collectives over gloo, before JAX is used; why not, if that fails."""
    try:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(cluster_detection_method="mpi4py")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def call_of(name: str, reduce: Reduce, nbytes: int, world: Any) -> Callable[[], Any]:
    """A call of the compiled reduction, whose argument is the donated result of the last one.

    The sum of arrays that differ by rank is checked first.
    """
    compiled = jax.jit(reduce, donate_argnums=0)

    def argument(value: float) -> Any:
        own = np.full(nbytes // 4, value, np.float32)
        return (
            _global(own, world) if name == "psum" else jax.device_put(own, jax.local_devices()[0])
        )

    total = world.size * (world.size + 1) // 2
    for shard in compiled(argument(world.rank + 1)).addressable_shards:
        np.testing.assert_array_equal(shard.data, total, err_msg=f"{name}, {nbytes} bytes")
    # Zeros, which no number of calls in a row makes infinite.
    arrays: Iterator[Any] = _results(compiled, argument(0))
    return lambda: next(arrays)


def _global(own: Any, world: Any) -> Any:
    """The array of all ranks, sharded over them."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    return jax.make_array_from_single_device_arrays(
        (world.size * len(own),), sharding, [jax.device_put(own, jax.local_devices()[0])]
    )


def _results(compiled: Callable[[Any], Any], array: Any) -> Iterator[Any]:
    while True:
        array = jax.block_until_ready(compiled(array))
        yield array
