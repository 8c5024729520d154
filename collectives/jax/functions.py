"""Collectives on pytrees, inside and outside of compiled programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from collectives.calls.scans import refuse_mean
from collectives.communicator import Communicator
from collectives.jax.host_calls import HostFunction
from collectives.jax.kinds import MESSAGES, PVARY, Call, is_small_float, rank_of
from collectives.jax.paths import text_of_keys
from collectives.jax.primitive import bind
from collectives.reductions.reduction import ReduceOp, as_op, reduction_for
from collectives.world import given

Tree = TypeVar("Tree")


def all_reduce(
    tree: Tree, op: ReduceOp | str = "sum", *, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The pytree's arrays reduced over the ranks, element by element. Collective.

    All arrays are reduced in one call of `all_reduce_many`. The "mean" of integers is a float;
    8-bit floats are reduced in float32.

    The derivative of "sum" is the identity, as every rank has the cotangent of the same total; that
    of "mean" divides by the number of ranks. That of "min" and "max" goes to the ranks that hold
    the result, in equal parts.
    """
    call = _of_dtypes(tree, Call("all_reduce", given(comm), as_op(op).value))
    return _made(_reducible(tree, call.op), call, after, like=tree)


def pvary(tree: Tree, *, comm: Communicator | None = None) -> Tree:
    """Return the pytree unchanged; its transpose is `all_reduce` by "sum". Nothing is sent.

    Use it on the input of a layer of which each rank computes a part, and `all_reduce`, whose
    transpose is `pvary`, on the output: the operators f and g of Megatron-LM (Shoeybi et al. 2019).
    As `jax.lax.pvary`.
    """
    return _made(tree, Call(PVARY, given(comm)), None)


def common_mean(tree: Tree, what: str, *, comm: Communicator) -> Tree:
    """As `all_reduce` to the mean, for what each rank goes on to use in a loss of its own.

    The cotangents of all ranks are averaged, too, as all their losses depend on this rank's arrays.
    The ranks compare `what`.
    """
    call = _of_dtypes(tree, Call("all_reduce", comm, "mean", what=what))
    return _made(pvary(_reducible(tree, "mean"), comm=comm), call, None, like=tree)


def mean_by(reduction: HostFunction, tree: Tree, *, comm: Communicator) -> Tree:
    """The pytree's arrays averaged over the ranks by a function of NumPy arrays. Collective.

    The function, which is collective itself and may be approximate, is called whenever the program
    runs, with the arrays and those that it fills. It is kept for the life of the process. The
    result has no derivative: NotImplementedError.
    """
    call = Call("all_reduce", comm, "mean", by=reduction)
    return _made(_reducible(tree, "mean"), call, None, like=tree)


def reduce(
    tree: Tree,
    op: ReduceOp | str = "sum",
    *,
    root: int = 0,
    comm: Communicator | None = None,
    after: Any = None,
) -> Tree:
    """As `all_reduce`, with the result on the root alone, and zeros elsewhere. Collective.

    It runs even if its result isn't used. The transpose of "sum" is `broadcast`.
    """
    root = rank_of("root", root, comm)
    call = _of_dtypes(tree, Call("reduce", given(comm), as_op(op).value, root=root))
    return _made(_reducible(tree, call.op), call, after, like=tree)


def scan(
    tree: Tree, op: ReduceOp | str = "sum", *, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The reduction of the arrays of ranks 0 to r, on rank r. Collective.

    Only "sum" has a derivative: each rank's cotangent is the sum of those of ranks r and above.
    """
    refuse_mean("scan", as_op(op))
    call = _of_dtypes(tree, Call("scan", given(comm), as_op(op).value))
    return _made(_reducible(tree, call.op), call, after, like=tree)


def all_gather(
    tree: Tree, *, axis: int = 0, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The ranks' arrays, of equal shapes, concatenated along the axis in rank order. Collective.

    A scalar counts as one row. The transpose is `reduce_scatter`.
    """
    return _along(tree, axis, Call("all_gather", given(comm)), after)


def reduce_scatter(
    tree: Tree,
    op: ReduceOp | str = "sum",
    *,
    axis: int = 0,
    comm: Communicator | None = None,
    after: Any = None,
) -> Tree:
    """Block r of the arrays' reduction along the axis, on rank r. Collective.

    The length of the axis must be a multiple of the number of ranks: ValueError. The transpose of
    "sum" is `all_gather`.
    """
    call = _of_dtypes(tree, Call("reduce_scatter", given(comm), as_op(op).value))
    return _along(_reducible(tree, call.op), axis, call, after, like=tree)


def all_to_all(
    tree: Tree, *, axis: int = 0, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """Block i of the arrays along the axis sent to rank i; block i received from it. Collective.

    The length of the axis must be a multiple of the number of ranks: ValueError. The call is its
    own transpose.
    """
    return _along(tree, axis, Call("all_to_all", given(comm)), after)


def broadcast(
    tree: Tree, *, root: int = 0, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The root's arrays, on every rank; the other ranks' have equal shapes. Collective.

    The transpose is `reduce`.
    """
    call = Call("broadcast", given(comm), root=rank_of("root", root, comm))
    return _made(tree, call, after)


def sendrecv(
    tree: Tree,
    *,
    source: int | None,
    dest: int | None,
    tag: int = 0,
    comm: Communicator | None = None,
    after: Any = None,
) -> Tree:
    """The arrays of rank `source`, of equal shapes, while this rank's are sent to `dest`.

    None stands for no rank: nothing is sent, or zeros are received. It runs even if its result
    isn't used. The transpose sends the other way round.
    """
    source = None if source is None else rank_of("source", source, comm)
    dest = None if dest is None else rank_of("dest", dest, comm)
    return _made(tree, Call("sendrecv", given(comm), source=source, dest=dest, tag=tag), after)


def send(
    tree: Tree, dest: int, *, tag: int = 0, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """Send the arrays to a rank, which receives them with `recv`; returns them.

    It runs even if its result isn't used. It has no derivative: NotImplementedError.
    """
    call = Call("send", given(comm), dest=rank_of("dest", dest, comm), tag=tag)
    return _made(tree, call, after)


def recv(
    like: Tree, source: int, *, tag: int = 0, comm: Communicator | None = None, after: Any = None
) -> Tree:
    """The arrays that a rank sends with `send`, of the shapes and dtypes of `like`.

    It runs even if its result isn't used. It has no derivative: NotImplementedError.
    """
    call = Call("recv", given(comm), source=rank_of("source", source, comm), tag=tag)
    return _made(like, call, after)


def barrier(tree: Any = None, *, comm: Communicator | None = None, after: Any = None) -> Any:
    """Return the pytree when every rank has called it. Collective."""
    return _made(tree, Call("barrier", given(comm)), after)


def _reducible(tree: Tree, op: str) -> Tree:
    """The arrays in dtypes that have the reduction; TypeError where there is none."""

    def converted(leaf: Any) -> Any:
        if _is_key(leaf):
            raise TypeError(f"array of dtype {leaf.dtype}: can't be reduced, only moved")
        array = jnp.asarray(leaf)
        if op == "mean" and not jnp.issubdtype(array.dtype, jnp.inexact):
            return array.astype(float)
        if is_small_float(array.dtype):
            return array.astype(jnp.float32)
        reduction_for(ReduceOp(op), array.dtype)
        return array

    arrays: Tree = jax.tree.map(converted, tree)
    return arrays


def _of_dtypes(tree: Tree, call: Call) -> Call:
    """The call on arrays of which some are reduced in another dtype: the ranks compare theirs."""
    dtypes = [jnp.result_type(leaf) for leaf in jax.tree.leaves(tree) if not _is_key(leaf)]
    return call.comparing(", ".join(str(each) for each in dtypes if _is_reduced_wider(each, call)))


def _is_reduced_wider(dtype: Any, call: Call) -> bool:
    whole = call.op == "mean" and not jnp.issubdtype(dtype, jnp.inexact)
    return whole or is_small_float(dtype)


def _is_key(leaf: Any) -> bool:
    """Whether it has keys of `jax.random.key`."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _along(tree: Tree, axis: int, call: Call, after: Any, like: Any = None) -> Tree:
    """A call along any axis: the arrays are moved so that it is the first one, and back."""
    axes = [axis % max(1, jnp.ndim(leaf)) for leaf in jax.tree.leaves(tree)]
    if any(axes):
        call = call.comparing(f"along the axes {axes}")

    def first(leaf: Any) -> Any:
        array = jnp.moveaxis(jnp.atleast_1d(leaf), axis, 0)
        if call.kind != "all_gather" and array.shape[0] % call.comm.size:
            raise ValueError(
                f"{call.kind}: axis {axis} of an array of shape {jnp.shape(leaf)}: its length must"
                f" be a multiple of the number of ranks, {call.comm.size}"
            )
        return array

    made = _made(jax.tree.map(first, tree), call, after, like=like)
    result: Tree = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, axis), made)
    return result


def _made(tree: Tree, call: Call, after: Any, like: Any = None) -> Tree:
    """The results of a call, whose small floats have the dtypes of those in `like`."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves and call.kind in (PVARY, *MESSAGES):
        return tree
    if not leaves and call.kind != "barrier":
        # Another rank may have arrays, with which this one's next call would be made.
        call = replace(call, kept=True)
    if call.kind not in (*MESSAGES, "barrier"):
        # The number of arrays is the number of calls.
        several = f"{len(leaves)} arrays" if len(leaves) != 1 and call.kind != "all_reduce" else ""
        impls = [str(jax.random.key_impl(each)) for each in leaves if _is_key(each)]
        call = call.comparing(", ".join(impls))
        call = call.comparing(text_of_keys(tree) or several)
    keys = {number: each for number, each in enumerate(leaves) if _is_key(each)}
    arrays = [jax.random.key_data(each) if _is_key(each) else jnp.asarray(each) for each in leaves]
    earlier = [jax.lax.stop_gradient(each) for each in jax.tree.leaves(after)]
    results = bind(arrays, call, earlier)
    for number, key in keys.items():
        results[number] = jax.random.wrap_key_data(results[number], impl=jax.random.key_impl(key))
    for number, leaf in enumerate(jax.tree.leaves(like)):
        dtype = jnp.asarray(leaf).dtype
        if is_small_float(dtype):
            results[number] = results[number].astype(dtype)
    result: Tree = jax.tree.unflatten(structure, results)
    return result
