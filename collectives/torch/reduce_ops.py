"""torch's reductions in terms of those of `collectives`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ReduceOp

NAMES = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "bitwise_and",
    ReduceOp.BOR: "bitwise_or",
    ReduceOp.BXOR: "bitwise_xor",
}
_WIDE = {torch.complex32: torch.complex64} | {
    getattr(torch, f"float8_{name}"): torch.float32
    for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
    if hasattr(torch, f"float8_{name}")
}
"""In which dtypes shorter ones are reduced."""
_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
"""torch has no division of these."""
# They are reduced as they are; AVG only if they have fractions.
_REDUCED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
}


class Reduction(NamedTuple):
    """A tensor that `collectives` can reduce, and the name of the op."""

    tensor: Any
    op: str
    finish: Callable[[Any], Any] | None = None
    """What turns a reduced tensor into the result, unless it is the result."""
    what: str | None = None
    """What the ranks must have in common, where tensor and op don't show it."""

    def store_into(self, tensor: Any) -> None:
        """Store the result, of the reduced tensor, in the given one."""
        if self.tensor is not tensor:
            tensor.detach().copy_(self.result(self.tensor))

    def result(self, reduced: Any) -> Any:
        """The result of a reduced tensor."""
        return reduced if self.finish is None else self.finish(reduced)


# By the number of the op, whose own hash takes longer.
_NAMES_OF = {kind.value: dict.fromkeys(_REDUCED, name) for kind, name in NAMES.items()}


def name_of(kind: Any, dtype: Any) -> str | None:
    """The name of the op if it reduces tensors of that dtype as they are; None otherwise."""
    names = _NAMES_OF.get(kind.value)
    return None if names is None else names.get(dtype)


def reduction(tensor: Any, reduce_op: Any, size: int) -> Reduction:
    """How `collectives` does torch's `reduce_op` on this tensor, between `size` ranks.

    The result's tensor is the given one if that can be reduced as it is. Raises TypeError for an
    op that the dtype does not have.
    """
    kind, dtype = reduce_op.op, tensor.dtype
    if (known := name_of(kind, dtype)) is not None:
        return Reduction(tensor, known)
    what = f"{kind.name} of {dtype}"
    if kind == ReduceOp.PREMUL_SUM:
        factor = reduce_op.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            # Of one element: it must not widen a tensor without axes.
            factor = factor.reshape(())
        product = tensor.to(_WIDE.get(dtype, dtype)) * factor
        return reduction(product.to(dtype), ReduceOp(ReduceOp.SUM), size)._replace(what=what)
    name = NAMES[kind]
    if dtype in _WIDE:
        return Reduction(tensor.to(_WIDE[dtype]), name, lambda reduced: reduced.to(dtype), what)
    if kind == ReduceOp.AVG and dtype == torch.bool:
        # Truncated, too: the mean is 1 where all are.
        return Reduction(tensor, "min", what=what)
    if kind == ReduceOp.AVG:
        # As NCCL: truncated.
        def divide(total: Any) -> Any:
            if dtype in _UNSIGNED:
                values = total.cpu().numpy()
                quotients = np.asarray(values // values.dtype.type(size))
                return torch.from_numpy(quotients).to(total.device)
            return total.div(size, rounding_mode="trunc").to(dtype)

        return Reduction(tensor.clone(), "sum", divide, what)
    return Reduction(tensor, name)
