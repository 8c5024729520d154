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
_CALL, _LOOP = "stablehlo.custom_call", "stablehlo.while"
_FUNCTION_CALL, _FUNCTION = "func.call", "func.func"
# Of callbacks from JAX, which are calls on GPUs, and where it has another FFI.
_CALLBACKS = tuple(
    f"{way}_{platform}_callback"
    for way in ("xla_ffi_python", "xla_python")
    for platform in ("cpu", "gpu")
)


class _Last:
    """The token of the last call of a module so far, so that blocks need not be searched."""

    token: Any = None
    block: Any = None
    in_functions = False
    """Whether calls lie in other functions than the main one, which are searched for."""


def _last_of(module: Any) -> _Last:
    last: _Last = module.cached_primitive_lowerings.setdefault(_Last, _Last())
    return last


def keep_last(module: Any, token: Any) -> None:
    """Note the token of what was lowered into the current block. `module` is JAX's context."""
    last = _last_of(module)
    last.token, last.block = token, mlir.ir.InsertionPoint.current.block
    owner = last.block.owner.operation
    while owner.name != _FUNCTION:
        owner = owner.parent.operation
    if mlir.ir.StringAttr(owner.attributes["sym_name"]).value != "main":
        last.in_functions = True


def results_before(module: Any) -> list[Any]:
    """Values that exist when the calls before the current place of the program have run.

    The last result of a call is its token, and so is that of a loop or condition that contains
    calls. Within one, the calls before it are before those within. Other functions have no tokens:
    the results of one that contains calls, which XLA may know without it, count with the token
    before them. `module` is JAX's context of the module.
    """
    block, last = mlir.ir.InsertionPoint.current.block, _last_of(module)
    if last.token is not None and last.block == block and not last.in_functions:
        return [last.token]
    functions = module.symbol_table
    operations = list(block.operations)
    of_function: list[Any] = []
    while True:
        for each in reversed(operations):
            operation = each.operation
            if not contains_calls(operation, functions, set()):
                continue
            results = [result for result in operation.results if _is_array(result)]
            if results and is_token(results[-1]):
                return [*of_function, results[-1]]
            of_function = of_function or results
        owner = block.owner.operation
        if owner.name == _LOOP and is_token(block.arguments[-1]):
            return [*of_function, block.arguments[-1]]
        if owner.name == _FUNCTION or owner.parent is None:
            return of_function
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


def is_token(value: Any) -> bool:
    """Whether the value has the type of a token."""
    return str(value.type) == _TOKEN_TYPE


def contains_calls(operation: Any, functions: Any, visited: set[str]) -> bool:
    """Whether the operation is a call, or one lies in it or in a function that it calls."""
    if operation.name == _FUNCTION_CALL:
        name = mlir.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        if name in visited:
            return False
        visited.add(name)
        return contains_calls(functions[name].operation, functions, visited)
    blocks = (block for region in operation.regions for block in region.blocks)
    return _is_call(operation) or any(
        contains_calls(each.operation, functions, visited)
        for block in blocks
        for each in block.operations
    )


def _is_call(operation: Any) -> bool:
    # Callbacks of older versions return a tuple.
    if operation.name == "stablehlo.get_tuple_element":
        return is_token(operation.results[0])
    if operation.name != _CALL:
        return False
    target = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
    return target == TARGET or (target in _CALLBACKS and any(map(is_token, operation.results)))


def _is_array(value: Any) -> bool:
    return isinstance(value.type, mlir.ir.RankedTensorType)
