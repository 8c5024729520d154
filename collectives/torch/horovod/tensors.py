"""What Horovod's calls do with tensors and arguments before and after the communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.arrays.tensors import is_lazy
from collectives.horovod.joining import SERVED, ZEROS, Request
from collectives.horovod.rows import check_rows, lengths_of
from collectives.reductions.reduction import ReduceOp
from collectives.torch.closures import LOSS

LIBRARY = "torch"


def check_axes(name: str, tensor: Any) -> None:
    """ValueError for a tensor that has no rows."""
    if tensor.dim() == 0:
        raise ValueError(f"{name}: a tensor without axes: must have rows")


def request_of(name: str, tensors: Any, op: ReduceOp, what: str | None = None) -> Request:
    """The request of a reduction of tensors.

    TypeError for those that the call would refuse, after ranks that have joined have begun it.
    """
    for each in tensors:
        if each.layout != torch.strided or each.is_quantized or each.is_meta:
            raise TypeError(f"{name}: a tensor of {each.layout} on {each.device}: must be plain")
        if is_lazy(each):
            raise TypeError(f"{name}: a conjugated or negated view: must be resolved")
    described = ((tuple(each.shape), str(each.dtype), each.device.type) for each in tensors)
    return Request(name, tuple(described), op, library=LIBRARY, what=what)


def _zeros(shape: tuple[int, ...], dtype: str, device: str) -> Any:
    return torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)


ZEROS[LIBRARY] = _zeros
SERVED[LOSS] = SERVED["allreduce"]


def scaled(tensor: Any, factor: float, dtype: Any = None) -> Any:
    """The tensor times a factor, in the dtype, or its own. Integers are multiplied as float64."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor is a {type(tensor).__name__}: must be a torch.Tensor")
    kept = tensor.dtype if dtype is None else dtype
    if factor != 1.0:
        tensor = (tensor.double() if _is_integer(tensor) else tensor) * factor
    return tensor.to(kept)


def in_place(tensors: Sequence[Any], op: ReduceOp) -> bool:
    """Whether the reductions can be written into the tensors: averages of integers are float64."""
    return op is not ReduceOp.MEAN or not any(map(_is_integer, tensors))


def _is_integer(tensor: Any) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def store(result: Any, factor: float, tensor: Any) -> Any:
    """The tensor, in which the result times a factor was stored."""
    if result is not tensor or factor != 1.0:
        with torch.no_grad():
            tensor.copy_(scaled(result, factor))
    return tensor


def store_all(results: Sequence[Any], factor: float, tensors: Sequence[Any]) -> list[Any]:
    """As `store`, of each."""
    return [store(each, factor, tensor) for each, tensor in zip(results, tensors, strict=True)]


def gradient_times(tensor: Any, factor: float) -> Any:
    """The tensor, which requires grad; its gradient is multiplied by a factor."""
    view = tensor.view_as(tensor)
    view.register_hook(lambda gradient: gradient * factor)
    return view


def parts_of(tensor: Any, splits: Any, size: int) -> Any:
    """The rows for each of `size` ranks."""
    check_axes("alltoall", tensor)
    return tensor.split(lengths_of(len(tensor), splits, size))


def joined(received: Sequence[Any], splits: Any) -> Any:
    """The result of `alltoall`; a MismatchError if the ranks sent rows of different kinds."""
    check_rows(received)
    rows = torch.cat(list(received))
    if splits is None:
        return rows
    return rows, torch.tensor([len(each) for each in received], dtype=torch.int32)
