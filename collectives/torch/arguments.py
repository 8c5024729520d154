"""The forms that torch permits for the arguments of a process group's methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.arrays.tensors import awaited


def as_list(tensors: Any) -> Any:
    """A tensor alone stands for a list of one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_lists(tensors: Any) -> Any:
    """A list of tensors stands for a list of one list."""
    return [tensors] if len(tensors) and isinstance(tensors[0], torch.Tensor) else tensors


def settled(arguments: Any) -> Any:
    """The arguments, in lists too, with those awaited that functional collectives have returned.

    For the thread of the caller: where two threads await one, the second may go on too early.
    """
    if isinstance(arguments, list | tuple):
        return [settled(each) for each in arguments]
    return awaited(arguments) if isinstance(arguments, torch.Tensor) else arguments


def options_of(kind: Any, *given: Any) -> Any:
    """The options that were given, or new ones with a root, an op or a timeout that was given."""
    if isinstance(given[0], kind):
        return given[0]
    options = kind()
    for each in given:
        if isinstance(each, dist.ReduceOp | dist.ReduceOp.RedOpType):
            options.reduceOp = each
        elif isinstance(each, timedelta):
            options.timeout = each
        elif each is not None:
            options.rootRank = each
    return options


def split(tensor: Any, lengths: Sequence[int], size: int) -> list[Any]:
    """The parts along the first dimension. The errors have torch's texts."""
    if not tensor.dim():
        raise RuntimeError("all_to_all_single: a tensor without dimensions can't be split")
    rows = len(tensor)
    if lengths and sum(lengths) != rows:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")
    if not lengths and rows % size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    return list(tensor.detach().split(list(lengths) if lengths else [rows // size] * size))


def divides_alike(output: Any, tensor: Any, size: int) -> bool:
    """Whether both tensors hold `size` equal parts, one behind the other, of the same length."""
    return bool(
        tensor.is_contiguous()
        and output.is_contiguous()
        and output.dtype == tensor.dtype
        and output.shape == tensor.shape
        and tensor.dim()
        and len(tensor) % size == 0
    )
