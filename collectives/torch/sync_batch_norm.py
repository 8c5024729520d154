"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from collectives.communicator import Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.torch.functions import all_reduce
from collectives.world import given

_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_NUMBERS = 1 << 20
"""Of settings: sums of their squares are exact."""


class SyncBatchNorm(_BatchNorm):
    """Batch normalization whose mean and variance are those of all ranks' batches together.

    Like torch.nn.SyncBatchNorm, on CPU tensors too: inputs have shape (N, C) or (N, C, …), and N
    may differ by rank, or be 0. In training mode one `all_reduce` in the forward pass and one in
    the backward pass move 2 C + 3 numbers of float64; every rank must run both. In evaluation mode
    nothing is sent. The gradients of `weight` and `bias` are this rank's part; like those of other
    parameters they are reduced by the training loop.

    Args:
        num_features: C.
        eps: added to the variance.
        momentum: the weight of a batch in the running statistics; None for their plain average.
        affine: whether there are `weight` and `bias`.
        track_running_stats: whether there are running statistics; without them evaluation mode
            normalizes by the statistics of this rank's batch.
        comm: the ranks; `collectives.world()` by default.
        options: `bias`, `device` and `dtype`, as of torch.nn.BatchNorm1d.

    Raises (from the call):
        ValueError: the input has fewer than 2 dimensions or another number of channels than C; or,
            on every rank with a CPU tensor, all ranks together have less than 2 values for each
            channel, or the ranks' settings differ.
        MismatchError: the ranks' calls or numbers of channels differ, or one rank's input is wrong;
            on every rank.

    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        comm: Communicator | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self.comm = comm

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, comm: Communicator | None = None) -> Any:
        """Replace every BatchNorm layer in `module` by one of this class, in place.

        Returns `module`, or the new layer if it is a BatchNorm layer itself. The new layers hold
        the same parameters and buffers.
        """
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            size, eps, momentum = module.num_features, module.eps, module.momentum
            converted = cls(size, eps, momentum, affine=False, track_running_stats=False, comm=comm)
            for name in ("affine", "track_running_stats", *_STATE):
                setattr(converted, name, getattr(module, name))
            converted.train(module.training)
        for name, child in module.named_children():
            converted.add_module(name, cls.convert_sync_batchnorm(child, comm))
        return converted

    def _check_input_dim(self, inputs: Any) -> None:
        if inputs.dim() < 2:
            raise ValueError(f"the input has shape {tuple(inputs.shape)}: must be (N, C, …)")
        if inputs.shape[1] != self.num_features:
            raise ValueError(
                f"the input has {inputs.shape[1]} channels (axis 1): must have num_features,"
                f" {self.num_features}"
            )

    def forward(self, input: Any) -> Any:
        """The normalized input, of its shape and dtype."""
        comm = given(self.comm)
        if not self.training or comm.size == 1:
            self._check_input_dim(input)
            return super().forward(input)
        try:
            self._check_input_dim(input)
        except ValueError as error:
            comm.barrier(f"SyncBatchNorm: {error}")  # a mismatch on all ranks
            raise
        moments = _all_moments(input, comm, self._settings())
        self._track(*(each.detach() for each in moments))
        return self._normalized(input, *moments[1:])

    def _settings(self) -> int:
        """A number that differs where the ranks would keep other statistics or results."""
        settings = self.eps, self.momentum, self.track_running_stats, self.affine
        return crc32(repr(settings).encode()) % _NUMBERS

    def _track(self, count: Any, mean: Any, variance: Any) -> None:
        """Update the running statistics; that of the variance is unbiased, as torch's."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / self.num_batches_tracked.item()
        variance = variance * count / (count - 1)
        for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
            kept.copy_(torch.lerp(kept.to(new.dtype), new, momentum))

    def _normalized(self, inputs: Any, mean: Any, variance: Any) -> Any:
        dtype = _dtype_within(inputs)
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        centred = inputs.to(dtype) - _shaped(mean.to(dtype), inputs)
        scale = _shaped(scale.to(dtype), inputs)
        if self.bias is None:
            return (centred * scale).to(inputs.dtype)
        bias = _shaped(self.bias.to(dtype), inputs)
        return torch.addcmul(bias, centred, scale).to(inputs.dtype)


def _all_moments(inputs: Any, comm: Communicator, settings: int) -> tuple[Any, Any, Any]:
    """Number of values of each channel, their mean and variance, over all ranks, in float64.

    Raises ValueError on every rank where their `settings` differ.

    The ranks' sums of squares lose what the mean exceeds the deviation by, squared, which float64
    has to spare. Each rank computes its own from the deviations, which lose nothing.
    """
    channels, axes = inputs.shape[1], [axis for axis in range(inputs.dim()) if axis != 1]
    count = inputs.numel() // channels if channels else 0
    if count:
        variance, mean = torch.var_mean(inputs.to(_dtype_within(inputs)), axes, correction=0)
        variance, mean = variance.double(), mean.double()
        sums = [mean * count, (variance + mean.square()) * count]
    else:
        sums = [inputs.new_zeros(2 * channels, dtype=torch.float64)]
    first = sums[0].new_tensor([count, settings, settings * settings])
    total = all_reduce(torch.cat([first, *sums]), comm=comm)
    counts, of_settings, of_their_squares = total[:3].detach()
    on_cpu = total.device.type == "cpu"  # on a GPU a look at the numbers waits for it
    # Equal only where all ranks' settings are.
    if on_cpu and of_settings * of_settings != of_their_squares * comm.size:
        text = "SyncBatchNorm: the ranks' eps, momentum, track_running_stats or affine differ"
        raise raised_on_all(ValueError(text), comm.rank)
    if on_cpu and counts < 2:
        raise ValueError(
            f"all {comm.size} ranks together have {int(counts)} values for each channel: must be 2"
            " or more in training mode"
        )
    mean, squares = total[3:].reshape(2, channels) / counts
    return counts, mean, (squares - mean.square()).clamp(min=0)


def _dtype_within(inputs: Any) -> Any:
    """The dtype of the arithmetic: float32 for 16-bit floats."""
    return torch.promote_types(inputs.dtype, torch.float32)


def _shaped(channels: Any, inputs: Any) -> Any:
    return channels.reshape(1, -1, *[1] * (inputs.dim() - 2))
