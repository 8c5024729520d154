"""all_to_all of blocks that may differ in shape and dtype, which their receivers do not know.

A block is sent as bytes: a header with dtype and shape, then the elements. The lengths are
exchanged first.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives import algorithms
from collectives.arrays.kinds import empty, flat, is_device, like, to_array
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.calls import Operation
from collectives.calls.objects import gather_pickles
from collectives.consistency.signature import Signature, forced
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array

# Alignment of the elements in bytes, sufficient for every dtype.
_ALIGNMENT = 64
_PREFIX = 8


class _Block:
    """One array to be sent."""

    def __init__(self, array: Array) -> None:
        self.content = flat(array).view(np.uint8)
        description = pickle.dumps((array.dtype, array.shape))
        header = len(description).to_bytes(_PREFIX, "little") + description
        self.header = np.frombuffer(header.ljust(_aligned(len(header))), np.uint8)
        self.nbytes = len(self.header) + _aligned(len(self.content))

    def write(self, buffer: Array) -> None:
        """Write the block to the start of `buffer`."""
        start = len(self.header)
        buffer[:start] = self.header
        buffer[start : start + len(self.content)] = self.content


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _read(buffer: Array) -> Array:
    """The array in a block, with its own memory."""
    length = int.from_bytes(buffer[:_PREFIX].tobytes(), "little")
    dtype, shape = pickle.loads(buffer[_PREFIX : _PREFIX + length].data)
    start = _aligned(_PREFIX + length)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.array(buffer[start : start + nbytes].copy().view(dtype).reshape(shape), copy=None)


def _exchange_lengths(engine: Engine, outgoing: list[int]) -> list[int]:
    table = np.zeros(2 * engine.size, np.int64)
    table[: engine.size] = outgoing
    table[engine.size + engine.rank] = outgoing[engine.rank]
    engine.run("all_to_all", None, table, lengths=[1] * (2 * engine.size))
    incoming: list[int] = table[engine.size :].tolist()
    return incoming


def all_to_all(arrays: Sequence[Any], size: int, algorithm: str | None) -> Operation:
    """Send arrays[i] to rank i; entry i of the result was sent by rank i."""
    algorithms.check_name("all_to_all", algorithm)
    if len(arrays) != size:
        raise ValueError(
            f"arrays has {len(arrays)} entries: must have one for each of {size} ranks"
        )
    given = [to_array(array, f"arrays[{peer}]") for peer, array in enumerate(arrays)]
    for peer, array in enumerate(arrays):
        refuse_lost_gradient(array, f"arrays[{peer}]")
    if any(map(is_device, given)):
        return _between_gpus(given, arrays, algorithm)
    blocks = [_Block(array) for array in given]
    converts = [like(array) for array in arrays]

    def perform(engine: Engine) -> list[Any]:
        outgoing = [block.nbytes for block in blocks]
        outgoing[engine.rank] = 0
        incoming = _exchange_lengths(engine, outgoing)
        buffer = engine.work(sum(outgoing) + sum(incoming), np.dtype(np.uint8))
        starts = np.concatenate([[0], np.cumsum(outgoing + incoming)])
        for peer in _others(engine):
            blocks[peer].write(buffer[starts[peer] :])
        lengths = outgoing + incoming
        engine.run("all_to_all", None, buffer, lengths=lengths, algorithm=algorithm)
        received = [given[engine.rank].copy()] * engine.size
        for peer in _others(engine):
            received[peer] = _read(buffer[starts[engine.size + peer] :])
        return [convert(block) for convert, block in zip(converts, received, strict=True)]

    nbytes = sum(array.nbytes for array in given)
    signature = Signature("all_to_all", detail=forced(algorithm), nbytes=nbytes)
    return Operation(signature, perform)


def _between_gpus(given: list[Array], arrays: Sequence[Any], algorithm: str | None) -> Operation:
    """Like `all_to_all`, for device arrays: dtypes and shapes are exchanged through the host."""
    if not all(map(is_device, given)):
        raise TypeError(
            "arrays: some lie on a GPU, some on the CPU: must all lie in the same memory"
        )
    converts = [like(array) for array in arrays]
    kinds = [(array.dtype, array.shape) for array in given]

    def perform(engine: Engine) -> list[Any]:
        table: list[list[tuple[np.dtype[Any], tuple[int, ...]]]]
        table = gather_pickles(engine, pickle.dumps(kinds))
        coming = [sent[engine.rank] for sent in table]
        outgoing = [_aligned(array.nbytes) for array in given]
        incoming = [_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in coming]
        outgoing[engine.rank] = incoming[engine.rank] = 0
        lengths = outgoing + incoming
        buffer = empty(sum(lengths), np.dtype(np.uint8), given[0])
        ends = np.cumsum(lengths).tolist()
        for peer in _others(engine):
            block = flat(given[peer]).view(np.uint8)
            start = ends[peer] - outgoing[peer]
            buffer[start : start + block.size] = block
        engine.run("all_to_all", None, buffer, lengths=lengths, algorithm=algorithm)
        received = [given[engine.rank].copy()] * engine.size
        for peer in _others(engine):
            dtype, shape = coming[peer]
            start = ends[engine.size + peer] - incoming[peer]
            nbytes = math.prod(shape) * dtype.itemsize
            received[peer] = buffer[start : start + nbytes].copy().view(dtype).reshape(shape)
        return [convert(block) for convert, block in zip(converts, received, strict=True)]

    nbytes = sum(array.nbytes for array in given)
    signature = Signature("all_to_all", detail=forced(algorithm), nbytes=nbytes)
    return Operation(signature, perform, on_gpu=True)


def _others(engine: Engine) -> list[int]:
    return [peer for peer in range(engine.size) if peer != engine.rank]
