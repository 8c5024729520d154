"""all_to_all of arrays that may differ in shape and dtype, which their receivers do not know.

An array is sent as bytes: a header with dtype and shape, then the elements. The lengths are
exchanged first.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.arrays.kinds import (
    Output,
    copied,
    flat,
    given_output,
    like,
    new_output,
    to_array,
)
from collectives.arrays.tensors import refuse_lost_gradient
from collectives.calls.arguments import received_as
from collectives.calls.objects import gather_pickles
from collectives.consistency.signature import dtype_name
from collectives.errors import DtypeMismatchError, ShapeMismatchError, in_step
from collectives.execution.engine import Engine
from collectives.reductions.buckets import check_list
from collectives.reductions.reduction import Array
from collectives.transports.parts import others, parts_by_rank

# Alignment of the elements in bytes, sufficient for every dtype.
_ALIGNMENT = 64
_PREFIX = 8


class Parts:
    """What a rank sends: an array for each rank, or one array that is divided equally."""

    def __init__(self, arrays: Any, size: int, out: Any) -> None:
        """Raises ValueError or TypeError for arrays that can't be sent, or another `out`."""
        self.whole: tuple[Array, Output] | None = None
        """The one array and where the result goes, or None."""
        if hasattr(arrays, "shape"):
            whole = to_array(arrays, "arrays")
            if out is None:
                refuse_lost_gradient(arrays, "arrays")
            if not whole.ndim or len(whole) % size:
                raise ValueError(
                    f"arrays is one array of shape {whole.shape}: its first axis must be divisible"
                    f" by {size}, the number of ranks"
                )
            rows = len(whole) // size
            self.arrays: list[Array] = list(whole.reshape(size, rows, *whole.shape[1:]))
            output = (
                new_output(whole.shape, whole.dtype, arrays)
                if out is None
                else given_output(out, whole.shape, whole.dtype)
            )
            self.whole = whole, output
            return
        arrays = check_list("arrays", arrays)
        if len(arrays) != size:
            raise ValueError(
                f"arrays has {len(arrays)} entries: must have one for each of {size} ranks"
            )
        if out is not None:
            raise ValueError("out is given: arrays must be one array then, not one for each rank")
        self.arrays = [to_array(array, f"arrays[{peer}]") for peer, array in enumerate(arrays)]
        for peer, array in enumerate(arrays):
            refuse_lost_gradient(array, f"arrays[{peer}]")
        self._converts = [like(array) for array in arrays]

    @property
    def alike(self) -> bool:
        """Whether all have one shape and dtype."""
        first = self.arrays[0]
        return all(each.shape == first.shape and each.dtype == first.dtype for each in self.arrays)

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(array.nbytes for array in self.arrays)

    def deliver(self, received: Sequence[Array]) -> Any:
        """The result of the received arrays, in rank order."""
        if self.whole is None:
            pairs = enumerate(zip(self._converts, received, strict=True))
            return [received_as(*each, f"all_to_all: rank {peer}") for peer, each in pairs]
        output = self.whole[1]
        places = output.buffer.reshape(len(self.arrays), *self.arrays[0].shape)
        store(received, list(places))
        return output.deliver()


def store(received: Sequence[Array], places: Sequence[Array]) -> None:
    """Copy what was received. ShapeMismatchError or DtypeMismatchError if a place differs."""
    for peer, (array, place) in enumerate(zip(received, places, strict=True)):
        given = f"all_to_all: rank {peer} sent {dtype_name(array.dtype)}{list(array.shape)}"
        expected = f"this rank divides one array into parts of {dtype_name(place.dtype)}"
        if array.shape != place.shape:
            raise in_step(ShapeMismatchError(f"{given}: {expected}{list(place.shape)}"))
        if array.dtype != place.dtype:
            raise in_step(DtypeMismatchError(f"{given}: {expected}"))
        place[...] = array


def _block(array: Array) -> tuple[Array, Array]:
    """What is sent of one array: the header, and the elements, as bytes."""
    description = pickle.dumps((array.dtype, array.shape))
    header = len(description).to_bytes(_PREFIX, "little") + description
    padded = np.frombuffer(header.ljust(_aligned(len(header))), np.uint8)
    return padded, flat(array).view(np.uint8)


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _read(buffer: Array) -> Array:
    """The array in a block, with its own memory."""
    length = int.from_bytes(buffer[:_PREFIX].tobytes(), "little")
    dtype, shape = pickle.loads(buffer[_PREFIX : _PREFIX + length].data)
    start = _aligned(_PREFIX + length)
    nbytes = math.prod(shape) * dtype.itemsize
    array: Array = buffer[start : start + nbytes].copy().view(dtype).reshape(shape)
    return array


def _exchange_lengths(engine: Engine, outgoing: list[int]) -> list[int]:
    table = np.zeros(2 * engine.size, np.int64)
    table[: engine.size] = outgoing
    table[engine.size + engine.rank] = outgoing[engine.rank]
    engine.run("all_to_all", None, table, lengths=[1] * (2 * engine.size))
    incoming: list[int] = table[engine.size :].tolist()
    return incoming


def exchange(engine: Engine, arrays: Sequence[Array], algorithm: str | None = None) -> list[Array]:
    """Send arrays[i] to rank i; entry i of the result was sent by rank i, and is a copy."""
    blocks = [_block(array) for array in arrays]
    outgoing = [len(header) + _aligned(len(content)) for header, content in blocks]
    outgoing[engine.rank] = 0
    incoming = _exchange_lengths(engine, outgoing)
    found = exchange_bytes(engine, blocks, outgoing, incoming, algorithm)
    received = [arrays[engine.rank].copy()] * engine.size
    for peer in others(engine.rank, engine.size):
        received[peer] = _read(found[peer])
    return received


def exchange_bytes(
    engine: Engine,
    sent: Sequence[Sequence[Array]],
    outgoing: Sequence[int],
    incoming: Sequence[int],
    algorithm: str | None = None,
    beside: Array | None = None,
) -> list[Array]:
    """What every rank has sent to this one, in the engine's memory; this rank sends itself 0 bytes.

    `sent` has the bytes for each rank, in pieces; `outgoing` and `incoming` are the ranks' lengths,
    which may be greater.
    """
    lengths = [*outgoing, *incoming]
    buffer = engine.work(sum(lengths), np.dtype(np.uint8), beside)
    parts = parts_by_rank(buffer, lengths)
    for peer in others(engine.rank, engine.size):
        start = 0
        for piece in sent[peer]:
            parts[peer][start : start + len(piece)] = piece
            start += len(piece)
    engine.run("all_to_all", None, buffer, lengths=lengths, algorithm=algorithm)
    return parts[engine.size :]


def exchange_between_gpus(
    engine: Engine, given: Sequence[Array], algorithm: str | None
) -> list[Array]:
    """As `exchange`, of device arrays: dtypes and shapes are exchanged through the host."""
    kinds = [(array.dtype, array.shape) for array in given]
    table: list[list[tuple[np.dtype[Any], tuple[int, ...]]]]
    table = gather_pickles(engine, pickle.dumps(kinds))
    coming = [each[engine.rank] for each in table]
    outgoing = [_aligned(array.nbytes) for array in given]
    incoming = [_aligned(math.prod(shape) * dtype.itemsize) for dtype, shape in coming]
    outgoing[engine.rank] = incoming[engine.rank] = 0
    sent = [[flat(array).view(np.uint8)] for array in given]
    found = exchange_bytes(engine, sent, outgoing, incoming, algorithm, given[0])
    received = [copied(given[engine.rank])] * engine.size
    for peer in others(engine.rank, engine.size):
        dtype, shape = coming[peer]
        nbytes = math.prod(shape) * dtype.itemsize
        received[peer] = found[peer][:nbytes].copy().view(dtype).reshape(shape)
    return received
