"""Narrower dtypes of messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Compressor(NamedTuple):
    """Converts floating tensors to a dtype for the messages, and results back."""

    wire_dtype: Any = None
    """A torch.dtype; None for the tensor's own."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs."""
        kept = tensor.dtype
        if self.wire_dtype is None or not kept.is_floating_point:
            return tensor, kept
        return tensor.to(self.wire_dtype), kept

    def decompress(self, tensor: Any, kept: Any) -> Any:
        """The tensor in the dtype before `compress`."""
        return tensor if self.wire_dtype is None or not kept.is_floating_point else tensor.to(kept)


class Compression:
    """The choices of an argument `compression`. 16-bit floats are added in float32."""

    none = Compressor()
    fp16 = Compressor(torch.float16)
    bf16 = Compressor(torch.bfloat16)
    """Not Horovod's."""
