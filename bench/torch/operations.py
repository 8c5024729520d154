"""Calls of torch.distributed on float32 tensors, the same for every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.sizes import parse_sizes

SIZES = parse_sizes("8,4K,64K,1M,4M,16M,64M")
_MOVED = SIZES[:-1]
_ITEMSIZE = 4

Made = tuple[Callable[[], Any], Any]
"""A call, and the tensor that it writes."""


def _all_reduce(elements: int, group: Any) -> Made:
    tensor = _numbers(elements, group)
    return lambda: dist.all_reduce(tensor, group=group), tensor


def _all_reduce_async(elements: int, group: Any) -> Made:
    tensor = _numbers(elements, group)
    return lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(), tensor


def _broadcast(elements: int, group: Any) -> Made:
    tensor = _numbers(elements, group)
    return lambda: dist.broadcast(tensor, 0, group=group), tensor


def _all_gather(elements: int, group: Any) -> Made:
    part, whole = _numbers(elements // group.size(), group), torch.empty(elements)
    return lambda: dist.all_gather_single(whole, part, group=group), whole


def _reduce_scatter(elements: int, group: Any) -> Made:
    whole, part = _numbers(elements, group), torch.empty(elements // group.size())
    return lambda: dist.reduce_scatter_single(part, whole, group=group), part


def _all_to_all(elements: int, group: Any) -> Made:
    sent, received = _numbers(elements, group), torch.empty(elements)
    return lambda: dist.all_to_all_single(received, sent, group=group), received


OPERATIONS: dict[str, tuple[Callable[[int, Any], Made], tuple[int, ...]]] = {
    "all_reduce": (_all_reduce, SIZES),
    "all_reduce(async_op=True).wait()": (_all_reduce_async, _MOVED),
    "all_gather_single": (_all_gather, _MOVED),
    "reduce_scatter_single": (_reduce_scatter, _MOVED),
    "broadcast": (_broadcast, _MOVED),
    "all_to_all_single": (_all_to_all, _MOVED),
}


def in_blocks(nbytes: int, ranks: int) -> int:
    """The number of bytes, rounded up to a block of equal size for each rank."""
    unit = _ITEMSIZE * ranks
    return -(-nbytes // unit) * unit


def make(name: str, nbytes: int, group: Any) -> Made:
    """The call of that name on so many bytes: of all ranks' parts together, or of each tensor."""
    return OPERATIONS[name][0](nbytes // _ITEMSIZE, group)


def _numbers(elements: int, group: Any) -> Any:
    """Other numbers on each rank, whose sums are exact."""
    return torch.arange(elements, dtype=torch.float32) % 1000 + group.rank()
