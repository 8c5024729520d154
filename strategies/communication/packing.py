"""Many arrays reduced as a few packs: flattened, joined, reduced, and cut into arrays again.

As TensorFlow packs gradients (`cross_device_utils.group_by_size`, `_ConcatAndSplitPacker`), except
that a pack holds arrays of one dtype, where TensorFlow fails on several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from collectives import Communicator
from collectives.calls.reductions import ReduceInput
from collectives.cuda.runtime import on_gpu
from strategies.core import nest
from strategies.core.values import Array

ON_HOSTS = frozenset({np.ndarray})

Groups: TypeAlias = list[list[int]]
"""Which arrays, by their numbers, are joined, and in what order."""


def by_bytes(inputs: Sequence[ReduceInput], bytes_per_pack: int) -> Groups:
    """Group arrays of one dtype, the last one first: gradients are computed in that order.

    A group that has more than `bytes_per_pack` bytes takes no further array; 0: all of a dtype are
    one group.
    """
    groups: Groups = []
    filling: dict[np.dtype[Any], tuple[list[int], int]] = {}
    for index in reversed(range(len(inputs))):
        given = inputs[index]
        group, nbytes = filling.get(given.dtype, ([], 0))
        if not group or nbytes > (bytes_per_pack or math.inf):
            group, nbytes = [], 0
            groups.append(group)
        group.append(index)
        filling[given.dtype] = group, nbytes + given.array.size * given.dtype.itemsize
    return groups


def reduce_apart(
    communicator: Communicator,
    arrays: Sequence[Any],
    op: str,
    of_hosts: Callable[[list[Any]], Sequence[Any]],
) -> list[Any]:
    """Arrays on GPUs reduced there, by the communicator; those of the host by `of_hosts`."""
    if ON_HOSTS.issuperset(map(type, arrays)):
        return list(of_hosts(list(arrays)))
    return nest.map_by_kind(
        arrays,
        lambda array: not on_gpu(array),
        lambda there: communicator.all_reduce_many(there, op),
        of_hosts,
    )


def reduce_packed(
    inputs: Sequence[ReduceInput],
    groups: Groups,
    all_reduce: Callable[[Array], object],
    num_packs: int = 1,
) -> list[Any]:
    """The arrays reduced, of their own kinds; each group is cut into `num_packs` packs.

    `all_reduce` reduces a contiguous array in place, and is called on all ranks alike. It gets the
    packs flat, an array that is a pack by itself in its own shape.
    """
    outputs = [each.output(None) for each in inputs]
    for group in groups:
        joined = np.concatenate([inputs[index].flat() for index in group])
        alone = len(group) == num_packs == 1
        for start, stop in _cuts(joined.size, num_packs):
            pack = joined[start:stop]
            all_reduce(pack.reshape(inputs[group[0]].shape) if alone else pack)
        start = 0
        for index in group:
            buffer = outputs[index].buffer
            buffer[...] = joined[start : start + buffer.size]
            start += buffer.size
    return [output.deliver() for output in outputs]


def _cuts(length: int, num_packs: int) -> Iterator[tuple[int, int]]:
    """Packs of equal length, the last one with the remainder, without empty ones."""
    each = length // num_packs
    for number in range(num_packs):
        start, stop = number * each, length if number == num_packs - 1 else (number + 1) * each
        if start < stop:
            yield start, stop
