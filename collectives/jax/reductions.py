"""`all_reduce` of pytrees inside and outside of `jax.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from collectives.communicator import Communicator
from collectives.jax.host_calls import HostFunction, host_call
from collectives.world import world

Tree = TypeVar("Tree")


def all_reduce(
    tree: Tree, op: str = "sum", *, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The pytree's arrays folded over the ranks, element by element. Collective.

    All arrays are reduced in one call of `all_reduce_many`: in jit, eagerly, in loops and
    conditions that all ranks take, and in reverse mode. The derivative of "sum" is the identity, as
    every rank has the cotangent of the same total; that of "mean" divides by the number of ranks.

    comm: the communicator; that of all ranks without.
    after: an array of an earlier collective call in the same program. Calls that don't depend on
        each other run in any order, another one on each rank, and so must be chained.

    Raises a JaxRuntimeError with the text of a MismatchError or DeadlineExceededError on every
    rank, and that error itself within `original_errors()`; the next call works.
    NotImplementedError in reverse mode for other ops.
    """
    leaves, structure = jax.tree.flatten(tree)
    chain = jax.tree.leaves(after)[:1]
    order = [jax.lax.stop_gradient(jnp.ravel(each)[:1]) for each in chain]
    reduced = _all_reduce([jnp.asarray(each) for each in leaves], op, comm or world(), order)
    result: Tree = jax.tree.unflatten(structure, reduced)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _all_reduce(leaves: Any, op: str, comm: Communicator, order: Any) -> Any:
    return host_call(_function(comm, op), [*leaves, *order], leaves) if leaves else []


def _forward(leaves: Any, op: str, comm: Communicator, order: Any) -> Any:
    return _all_reduce(leaves, op, comm, order), order


def _backward(op: str, comm: Communicator, order: Any, cotangents: Any) -> Any:
    if op not in ("sum", "mean"):
        raise NotImplementedError(f"op={op!r} has no derivative: must be 'sum' or 'mean'")
    scale = 1 if op == "sum" else comm.size
    return [each / scale for each in cotangents], [jnp.zeros_like(each) for each in order]


_all_reduce.defvjp(_forward, _backward)


@cache
def _function(comm: Communicator, op: str) -> HostFunction:
    def reduce(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        # Further inputs only determine the order.
        comm.all_reduce_many(inputs[: len(outputs)], op, out=outputs)

    return reduce
