"""The calls of one program in the order in which it was traced.

XLA runs operations that don't depend on each other in any order, another one on each rank. So each
call depends on the one before it in the same block of the lowered program, through an operand that
it ignores. This happens when the program is lowered, after all of JAX's transformations: it
concerns the calls of derivatives, too.
"""

from __future__ import annotations

from typing import Any

from jax.interpreters import mlir

from collectives.jax.host_calls import TARGET

_CALL, _FUNCTION_CALL = "stablehlo.custom_call", "func.call"
# Of calls, and of callbacks from JAX, which are calls where it has another FFI.
_TARGETS = (TARGET, "xla_ffi_python_cpu_callback", "xla_python_cpu_callback")


def results_before() -> list[Any]:
    """Values that exist when the calls before the current place of the program have run.

    The last result of a call is its token. Loops, conditions and inner functions that contain calls
    count as calls.
    """
    operations = mlir.ir.InsertionPoint.current.block.operations
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index].operation
        if _is_call(operation):
            return list(operation.results)[-1:]
        if _contains(operation, set()):
            return [each for each in operation.results if _is_array(each)]
    return []


def _is_call(operation: Any) -> bool:
    if operation.name != _CALL:
        return False
    return mlir.ir.StringAttr(operation.attributes["call_target_name"]).value in _TARGETS


def _is_array(value: Any) -> bool:
    return isinstance(value.type, mlir.ir.RankedTensorType)


def _contains(operation: Any, visited: set[str]) -> bool:
    if operation.name == _FUNCTION_CALL:
        name = mlir.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
        if name in visited:
            return False
        visited.add(name)
        return _contains(_function(operation, name), visited)
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                inner = each.operation
                if _is_call(inner) or _contains(inner, visited):
                    return True
    return False


def _function(operation: Any, name: str) -> Any:
    while operation.parent is not None:
        operation = operation.parent
    return mlir.ir.SymbolTable(operation)[name].operation
