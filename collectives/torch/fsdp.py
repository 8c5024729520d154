"""FSDP2 whose buffers lie in registered memory, so that no call copies them.

FSDP allocates a buffer before every call and frees it by its reference count, at other times on
every rank. So a rank takes buffers, without an exchange, from a memory that all ranks allocate at
the same call: the first one whose buffer is larger than all before. Buffers of one call may lie at
other offsets on each rank, because a call exchanges the offsets; where a rank's memory is used up,
its buffer is ordinary, and the call takes the path of ordinary arrays on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from collectives.reductions.reduction import Array
from collectives.shm.free_blocks import FreeBlocks
from collectives.torch.process_group import CollectivesProcessGroup

# Of a module whose call runs, of the next one, and of the previous one until its copies are made.
_BUFFERS = 3
_ALIGNMENT = 128


def register_buffers(model: Any) -> None:
    """Place the buffers of FSDP2's calls in registered memory, for `model` and all modules in it.

    `model` is a module to which `torch.distributed.fsdp.fully_shard` was applied, over the backend
    "collectives". Call it on every rank, after the last `fully_shard` and before the first forward.
    The memory takes up to three times the bytes of the largest module's parameters for forward,
    and as much for backward.

    Raises:
        ValueError: `fully_shard` was applied to no module, or to one with several meshes.

    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(
            f"model: fully_shard was not applied to this {type(model).__name__}, nor to a module"
            " in it"
        )
    made: dict[Any, tuple[_AllGather, _ReduceScatter]] = {}
    for module in modules:
        meshes = [each.device_mesh for each in module.parameters() if hasattr(each, "device_mesh")]
        if not meshes:
            continue
        gather, scatter = made.setdefault(meshes[0], (_AllGather(), _ReduceScatter()))
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)


class _Memory:
    """Registered memory of this rank, from which it takes blocks."""

    def __init__(self, array: Array) -> None:
        """`array` holds bytes."""
        self._array, self._blocks = array, FreeBlocks(array.nbytes)
        # A finalizer may run in any thread, also within `take`.
        self._released: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int) -> Array | None:
        """Bytes that belong to the array until it is deleted; None if there are not so many."""
        while self._released:
            self._blocks.give_back(*self._released.popleft())
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self._blocks.take(size)
        if start is None:
            return None
        block: Array = self._array[start : start + nbytes]
        weakref.finalize(block, self._released.append, (start, size)).atexit = False
        return block


class _Buffers:
    """What FSDP's interface `Comm` requires: buffers for the calls of one mesh."""

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._largest = 0

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """A tensor for a call; of registered memory, where there is enough."""
        nbytes = math.prod(size) * dtype.itemsize
        block = None
        if self._memory is not None and nbytes and torch.device(device).type == "cpu":
            block = self._memory.take(nbytes)
        if block is None:
            return torch.empty(*size, dtype=dtype, device=device)
        # The storage holds the block itself.
        return torch.from_numpy(block).view(dtype).view(*size)

    def _provide(self, buffer: Any, group: Any) -> None:
        """Allocate memory for the next calls, if this one's buffer is the largest until now.

        On a GPU no memory is registered.

        Buffers of a call have equal lengths on all ranks, so that all allocate at the same call.
        """
        nbytes = buffer.nbytes
        if nbytes <= self._largest or buffer.device.type != "cpu":
            return
        self._largest = nbytes
        if not isinstance(group, CollectivesProcessGroup):
            raise TypeError(
                f"register_buffers: the model's group has the backend {dist.get_backend(group)!r}:"
                " must be 'collectives'"
            )
        self._memory = None
        self._memory = _Memory(group.registered(_BUFFERS * (nbytes + _ALIGNMENT)))


class _AllGather(_Buffers):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self._provide(output_tensor, group)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Buffers):
    def __init__(self) -> None:
        super().__init__()
        self._has_input = False

    def allocate(self, size: Sequence[int], *, dtype: Any, device: Any) -> Any:
        """The input, or, at every other request, the output.

        The output becomes the gradient, which is kept: it would use up the memory, and no other
        rank reads it.
        """
        self._has_input = not self._has_input
        if not self._has_input:
            return torch.empty(*size, dtype=dtype, device=device)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._has_input = False
        self._provide(input_tensor, group)
        return dist.reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
