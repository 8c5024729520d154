"""What `distribute` makes equal on all ranks: the chief's parameters, buffers and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch

from collectives.arrays.tensors import from_torch
from strategies.core.same_error import PropagatedErrors
from strategies.replication.replication import Replication


def mirror_model(strategy: Replication, model: Any) -> None:
    """Overwrite parameters and buffers with the chief's. Collective."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    # A rank with one more would wait for the others.
    strategy.barrier(f"distribute: {len(parameters)} parameters and {len(buffers)} buffers")
    with torch.no_grad():
        for name, tensor in [*parameters, *buffers]:
            on_cpu = tensor.detach().cpu()
            strategy.mirror(from_torch(on_cpu, name), f"distribute: {name}")
            if tensor.device.type != "cpu":
                tensor.copy_(on_cpu)


def mirror_optimizers(strategy: Replication, optimizers: Sequence[Any]) -> None:
    """Load the chief's states where any rank's differ. Collective.

    They differ where the chief alone has read a checkpoint, or ranks have stepped apart before.
    """
    communicator = strategy.communicator
    states = [each.state_dict() for each in optimizers]
    digests = communicator.all_gather_object(_digest(states, 0))
    if len(set(digests)) == 1:
        return
    states = communicator.broadcast_object(states if communicator.rank == 0 else None)
    with PropagatedErrors(communicator, "distribute"):
        if communicator.rank:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)


def _digest(value: Any, digest: int) -> int:
    if isinstance(value, torch.Tensor):
        array = np.ascontiguousarray(from_torch(value.detach().cpu(), "state"))
        digest = crc32(f"{array.dtype}{array.shape}".encode(), digest)
        return crc32(array.reshape(-1).view(np.uint8).data, digest)
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for each in value:
            digest = _digest(each, digest)
        return crc32(str(len(value)).encode(), digest)
    return crc32(repr(value).encode(), digest)
