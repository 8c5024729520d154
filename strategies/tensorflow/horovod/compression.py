"""Narrower dtypes of messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class Compressor(NamedTuple):
    """Converts tensors of floats to a dtype for the messages, and results back."""

    wire_dtype: Any = None
    """A tf.DType; None for the tensor's own."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what `decompress` needs."""
        kept = tensor.dtype
        if self.wire_dtype is None or not kept.is_floating:
            return tensor, kept
        return tf.cast(tensor, self.wire_dtype), kept

    def decompress(self, tensor: Any, kept: Any) -> Any:
        """The tensor in the dtype before `compress`."""
        return tf.cast(tensor, kept)


class Compression:
    """The choices of an argument `compression`. 16-bit floats are added in float32."""

    none = Compressor()
    fp16 = Compressor(tf.float16)
    bf16 = Compressor(tf.bfloat16)
    """Not Horovod's."""


def check_compressor(compression: Any) -> Compressor:
    """The argument; TypeError for classes of the program's own."""
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression={compression!r}: must be one of hvd.Compression")
    return compression
