"""The primitive of JAX that all collectives are: its shapes, derivatives, batches and lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import effects  # exported in parts only
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from collectives.jax import host_calls, kinds
from collectives.jax.hoisting import keep_in_loops
from collectives.jax.kinds import KINDS, LINEAR, MESSAGES, PVARY, Call
from collectives.jax.lowering_in_place import Contains, lower_in_place
from collectives.jax.ordering import TOKEN, keep_last, results_before, token_of
from collectives.jax.program_order import keep_order
from collectives.jax.tokens import uncached

_primitive = Primitive("collective")
_primitive.multiple_results = True


def bind(arrays: Sequence[Any], call: Call, after: Sequence[Any] = ()) -> list[Any]:
    """Make a call in the current program, or at once outside of one.

    after: arrays that exist before the call runs; it doesn't read them.
    """
    lower_in_place(_contains_calls)
    return list(_primitive.bind(*arrays, *after, call=call, count=len(arrays)))


class _Kept(effects.Effect):
    """Keeps a call whose results the program doesn't use."""

    def __str__(self) -> str:
        return "Collective"


_KEPT = {_Kept()}
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    # A call that is computed again is made again, by all ranks.
    effects.remat_allowed_effects,
    # Older versions have no such list.
    getattr(effects, "partial_eval_kept_effects", None),
):
    if _allowed is not None:
        _allowed.add_type(_Kept)


@_primitive.def_effectful_abstract_eval
def _shapes(*arrays: Any, call: Call, count: int) -> Any:
    kind = KINDS[call.kind]
    shapes = []
    for each in arrays[:count]:
        first = [kind.length(length, call.comm.size) for length in each.shape[:1]]
        shapes.append(each.update(shape=(*first, *each.shape[1:]), weak_type=False))
    return shapes, _KEPT if kind.kept or call.kept else set()


@_primitive.def_impl
def _run_at_once(*arrays: Any, **parameters: Any) -> Any:
    if parameters["call"].kind == PVARY:
        return list(map(jnp.asarray, arrays))
    # Without it the program that is compiled would be run at once, again and again.
    with jax.disable_jit(False):
        return _compiled(**parameters)(*arrays)


@lru_cache(maxsize=1024)
def _compiled(**parameters: Any) -> Any:
    return jax.jit(partial(_primitive.bind, **parameters))


def _jvp(primals: Any, tangents: Any, *, call: Call, count: int) -> Any:
    if KINDS[call.kind].transpose is None:
        raise NotImplementedError(f"{call.kind} has no derivative: use sendrecv")
    if call.by is not None:
        raise NotImplementedError("a mean by another function has no derivative: use all_reduce")
    if call.kind == "scan" and call.op != "sum":
        raise NotImplementedError(f"scan of {call.op!r} has no derivative: only of 'sum'")
    primals, after = primals[:count], primals[count:]
    results = bind(primals, call, after)
    # All floats, and not those alone whose tangents aren't zero: which these are may differ by
    # rank.
    floats = [n for n, each in enumerate(results) if jnp.issubdtype(each.dtype, jnp.inexact)]
    given = [ad.instantiate_zeros(tangents[number]) for number in floats]
    if call.op not in LINEAR:
        slopes = [kinds.slope(call, primals[number], bind) for number in floats]
        given = [each * slope for each, slope in zip(given, slopes, strict=True)]
        call = replace(call, op="sum")
    found: list[Any] = [ad.Zero(each.aval.to_tangent_aval()) for each in results]
    if floats:
        for number, tangent in zip(floats, bind(given, call), strict=True):
            found[number] = tangent
    return results, found


def _transpose(cotangents: Any, *arrays: Any, call: Call, count: int) -> Any:
    transpose = KINDS[call.kind].transpose
    if transpose is None or call.op not in LINEAR or call.by is not None:
        raise NotImplementedError(f"{call.kind} (op={call.op!r}) has no transpose")
    found = transpose(call, [ad.instantiate_zeros(each) for each in cotangents], bind)
    pairs = zip(found, arrays[:count], strict=True)
    known = [each if ad.is_undefined_primal(array) else None for each, array in pairs]
    return [*known, *[None] * (len(arrays) - count)]


def _batch(arrays: Any, axes: Any, *, call: Call, count: int) -> Any:
    """The batch is the last axis, so that the first one stays the collective's."""
    pairs = list(zip(arrays[:count], axes[:count], strict=True))
    sizes = [array.shape[axis] for array, axis in pairs if axis is not None]
    if not sizes:
        return bind(arrays[:count], call, arrays[count:]), [None] * count
    moved = [
        jnp.broadcast_to(array[..., None], (*array.shape, sizes[0]))
        if axis is None
        else jnp.moveaxis(array, axis, -1)
        for array, axis in pairs
    ]
    if call.kind not in ("barrier", *MESSAGES):
        # A square array may have the same shape without a batch.
        call = call.comparing("batched")
    results = bind(moved, call, arrays[count:])
    return results, [each.ndim - 1 for each in results]


def _lower(ctx: Any, *operands: Any, call: Call, count: int) -> Any:
    if call.kind == PVARY:
        return operands
    devices = _devices(ctx.module_context.axis_context)
    if devices > 1:
        raise NotImplementedError(
            f"{call.kind} in a program over {devices} devices of this process: must be over one"
        )
    keep_order(call.comm)
    on_cpu = set(ctx.platforms or ctx.module_context.platforms) == {"cpu"}
    lower = _lower_ffi if on_cpu and host_calls.uses_ffi() else _lower_callback
    before = results_before(ctx.module_context)
    if lower is _lower_callback:
        before = token_of(ctx, before)
    # XLA reads the dtypes of the operands from their values.
    inner = ctx.replace(
        avals_in=[*ctx.avals_in, *(TOKEN.update(shape=tuple(each.type.shape)) for each in before)],
        avals_out=[*ctx.avals_out, TOKEN],
    )
    results = lower(inner, call, count, [*operands, *before])
    keep_last(ctx.module_context, results[-1])
    return results[:-1]


def _devices(context: Any) -> int:
    """The number of devices of a program: of a sharding, of shard_map's mesh, or of pmap."""
    mesh, pmap = getattr(context, "mesh", None), getattr(context, "axis_env", None)
    of_sharding = getattr(context, "num_devices", 1)
    found = of_sharding, getattr(mesh, "size", 1), getattr(pmap, "nreps", 1)
    return max(each or 1 for each in found)


def _lower_ffi(ctx: Any, call: Call, count: int, operands: Sequence[Any]) -> Any:
    aliases = {number: number for number in range(count) if KINDS[call.kind].in_place}
    lower = jax.ffi.ffi_lowering(
        host_calls.TARGET, has_side_effect=True, operand_output_aliases=aliases
    )
    # Further operands, and a last result, only determine the order.
    kinds_in = host_calls.kinds_of(ctx.avals_in[:count])
    kinds_out = host_calls.kinds_of(ctx.avals_out[:count])
    number = host_calls.number_of(kinds.function_of(call, count), kinds_in, kinds_out)
    return lower(ctx, *operands, function=np.int64(number))


def _lower_callback(ctx: Any, call: Call, count: int, operands: Sequence[Any]) -> Any:
    function = kinds.function_of(call, count)

    def without_tokens(read: Sequence[Any], written: Sequence[Any]) -> None:
        function(read[:count], written[:count])

    def call_back(*arrays: Any) -> list[Any]:
        return host_calls.call_back(io_callback, without_tokens, arrays, ctx.avals_out)

    return mlir.lower_fun(call_back, multiple_results=True)(ctx, *operands)


ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower, **uncached)
_contains_calls = Contains(
    lambda each: each.primitive is _primitive and each.params["call"].kind != PVARY
)
lower_in_place(_contains_calls)
keep_in_loops(_contains_calls)
