"""The calls of one program in the order in which it was traced.

XLA runs operations that don't depend on each other in any order, another one on each rank. So each
call depends on the one before it in the same block of the lowered program, through an operand that
it ignores. This happens when the program is lowered, after all of JAX's transformations: it
concerns the calls of derivatives, too.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import mlir

from collectives.jax import ffi_structures as ffi
from collectives.jax.host_calls import TARGET

# Of the tokens by which calls depend on each other. Empty arrays would have no memory that XLA
# orders operations by. The program's own callbacks return no arrays of this shape.
TOKEN = ShapedArray((1, 1, 1), np.dtype("uint8"))
_TOKEN_TYPE = "tensor<1x1x1xui8>"
_CALL, _FUNCTION_CALL, _FUNCTION = "stablehlo.custom_call", "func.call", "func.func"
# Of callbacks from JAX, which are calls on GPUs, and where it has another FFI.
_CALLBACKS = tuple(
    f"{way}_{platform}_callback"
    for way in ("xla_ffi_python", "xla_python")
    for platform in ("cpu", "gpu")
)


def results_before(functions: Any) -> list[Any]:
    """Values that exist when the calls before the current place of the program have run.

    The last result of a call is its token. Loops, conditions and inner functions that contain calls
    count as calls. Within a loop or condition the calls before it are before those within.
    `functions` are those of the module, by name.
    """
    block = mlir.ir.InsertionPoint.current.block
    operations = list(block.operations)
    of_loop: list[Any] | None = None
    while True:
        for each in reversed(operations):
            operation = each.operation
            if _is_call(operation):
                return [*(of_loop or ()), *list(operation.results)[-1:]]
            # A loop or condition may have no results, or such as XLA knows without it.
            if of_loop is None and _contains(operation, functions, set()):
                of_loop = [result for result in operation.results if _is_array(result)]
        owner = block.owner.operation
        if owner.name == _FUNCTION or owner.parent is None:
            return of_loop or []
        block, operations = _before(owner)


def _before(operation: Any) -> tuple[Any, list[Any]]:
    """The block in which the operation lies, and the operations before it."""
    for region in operation.parent.regions:
        for block in region.blocks:
            before: list[Any] = []
            for each in block.operations:
                if each.operation == operation:
                    return block, before
                before.append(each.operation)
    raise AssertionError("an operation lies in a block of its parent")


def token_of(ctx: Any, values: list[Any]) -> list[Any]:
    """One token in place of the values, which callbacks would copy; none without values."""
    dtypes = {str(mlir.dtype_to_ir_type(each)): each for each in ffi.DTYPES}
    known = [each for each in values if str(each.type.element_type) in dtypes]
    known = [each for each in known if 0 not in each.type.shape]
    avals = [
        ShapedArray(tuple(each.type.shape), dtypes[str(each.type.element_type)]) for each in known
    ]
    if not known or avals == [TOKEN]:
        return known

    def first_bytes(*arrays: Any) -> list[Any]:
        token = jax.numpy.zeros(TOKEN.shape, TOKEN.dtype)
        for each in arrays:
            first = jax.lax.slice(each, (0,) * each.ndim, (1,) * each.ndim)
            token ^= first.real.astype(TOKEN.dtype).reshape(TOKEN.shape)
        return [token]

    lower = mlir.lower_fun(first_bytes, multiple_results=True)
    return list(lower(ctx.replace(avals_in=avals, avals_out=[TOKEN]), *known))


def _is_call(operation: Any) -> bool:
    if operation.name != _CALL:
        return False
    target = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
    last = [str(each.type) for each in operation.results][-1:]
    return target == TARGET or (target in _CALLBACKS and last == [_TOKEN_TYPE])


def _is_array(value: Any) -> bool:
    return isinstance(value.type, mlir.ir.RankedTensorType)


def _contains(operation: Any, functions: Any, visited: set[str]) -> bool:
    if operation.name == _FUNCTION_CALL:
        name = mlir.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        if name in visited:
            return False
        visited.add(name)
        return _contains(functions[name].operation, functions, visited)
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                inner = each.operation
                if _is_call(inner) or _contains(inner, functions, visited):
                    return True
    return False
