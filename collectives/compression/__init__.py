"""Lossy compression of gradients between hosts, for links that are slower than the computation."""

from collectives.compression.compressors import parse
from collectives.compression.reducer import CompressedReducer, ListName

__all__ = ["CompressedReducer", "ListName", "parse"]
