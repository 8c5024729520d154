"""What `distribute` makes equal on all ranks: the chief's parameters, buffers and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from collectives import Communicator
from collectives.arrays.tensors import from_torch
from strategies.core.same_error import PropagatedErrors
from strategies.replication.replication import Replication
from strategies.torch.steps import parameters_of


def mirror_model(strategy: Replication, model: Any) -> None:
    """Overwrite parameters and buffers with the chief's. Collective."""
    parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
    with PropagatedErrors(strategy.communicator, "distribute"):
        for name, tensor in [*parameters, *buffers]:
            _check(name, tensor)
    # A rank with one more would wait for the others.
    strategy.barrier(f"distribute: {len(parameters)} parameters and {len(buffers)} buffers")
    with torch.no_grad():
        for name, tensor in [*parameters, *buffers]:
            on_cpu = tensor.detach().cpu()
            strategy.mirror(from_torch(on_cpu, name), f"distribute: {name}")
            if tensor.device.type != "cpu":
                tensor.copy_(on_cpu)


def _check(name: str, tensor: Any) -> None:
    """TypeError for a tensor that can't be sent."""
    if tensor.is_meta or tensor.layout != torch.strided or torch.nn.parameter.is_lazy(tensor):
        kind = "lazy or meta" if tensor.layout == torch.strided else tensor.layout
        raise TypeError(f"distribute: {name} is a {kind} tensor: must have elements of its own")
    from_torch(torch.empty(0, dtype=tensor.dtype, device="cpu"), name)


def mirror_optimizers(communicator: Communicator, optimizers: Sequence[Any]) -> None:
    """Overwrite the parameters' states with the chief's where any rank's differ. Collective.

    They differ where the chief alone has read a checkpoint, or ranks have stepped apart before.
    Tensors, numbers and texts in them are compared and copied; other objects stay each rank's own.
    """
    with PropagatedErrors(communicator, "distribute"):
        places = [(each.state, one) for each in optimizers for one in _parameters(each)]
        digest = 0
        for state, parameter in places:
            digest = _digest(_packed(state.get(parameter)), digest)
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    if communicator.rank == 0:
        communicator.broadcast_object([_packed(state.get(one)) for state, one in places])
        return
    for (state, parameter), given in zip(places, communicator.broadcast_object(), strict=True):
        if given is None:
            state.pop(parameter, None)
        else:
            own = _unpacked(given, state.get(parameter), parameter.device)
            state[parameter] = laid_out_as(parameter, own)


def laid_out_as(parameter: Any, value: Any) -> Any:
    """The state with tensors of the parameter's shape in its strides; the rest as it is.

    The CPU kernels of torch's fused optimizers take both by their order in memory.
    """
    if type(value) is dict:
        return {key: laid_out_as(parameter, each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(laid_out_as(parameter, each) for each in value)
    fits = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    if not fits or value.layout is not torch.strided or value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


class _Tensor(NamedTuple):
    dtype: Any
    shape: tuple[int, ...]
    on_cpu: bool
    content: bytes


class _Other(NamedTuple):
    """An object of a rank's own."""


def _parameters(optimizer: Any) -> list[Any]:
    """In their order; none of an optimizer that keeps its state in another way than torch's."""
    if not isinstance(getattr(optimizer, "state", None), dict):
        return []
    return parameters_of(optimizer)


def _packed(value: Any) -> Any:
    """The value with bytes for tensors, which pickle can't send of every dtype."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, dict):
        return {key: _packed(each) for key, each in value.items() if isinstance(key, str)}
    if type(value) in (list, tuple):
        return type(value)(map(_packed, value))
    if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _Tensor(value.dtype, tuple(value.shape), value.device.type == "cpu", content)
    return _Other()


def _unpacked(value: Any, own: Any, device: Any) -> Any:
    """The chief's value; `own` is this rank's, which counts for objects of a rank's own."""
    if isinstance(value, _Other):
        return own
    if isinstance(value, _Tensor):
        empty = torch.empty(0, dtype=value.dtype)
        content = (
            torch.frombuffer(bytearray(value.content), dtype=value.dtype)
            if value.content
            else empty
        )
        return content.reshape(value.shape).to("cpu" if value.on_cpu else device)
    if isinstance(value, dict):
        was = own if isinstance(own, dict) else {}
        kept = {key: each for key, each in was.items() if not isinstance(key, str)}
        return kept | {key: _unpacked(each, was.get(key), device) for key, each in value.items()}
    if isinstance(value, list | tuple):
        alike = type(own) is type(value) and len(own) == len(value)
        pairs = zip(value, own if alike else [None] * len(value), strict=True)
        return type(value)(_unpacked(*each, device) for each in pairs)
    return value


def _digest(value: Any, digest: int) -> int:
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        for each in value:
            digest = _digest(each, digest)
        return crc32(str(len(value)).encode(), digest)
    return crc32(value if isinstance(value, bytes) else repr(value).encode(), digest)
