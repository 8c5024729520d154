"""Which parameters share a bucket."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

from collectives.communicator import Communicator
from collectives.compression import CompressedReducer
from collectives.torch.buckets import Bucket, DenseBucket, Member
from collectives.torch.compressed_bucket import CompressedBucket
from collectives.torch.sparse_bucket import SparseBucket

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 8 << 20
"""The most that a bucket holds, unless a single parameter is larger."""

# Of the reducers of a communicator, which all ranks make in the same order.
_numbers: weakref.WeakKeyDictionary[Communicator, count[int]] = weakref.WeakKeyDictionary()


def make_buckets(
    comm: Communicator,
    members: Sequence[Member],
    sparse: Collection[int],
    wire: Any,
    limits: tuple[int, int],
) -> list[Bucket]:
    """Distribute the parameters to buckets, those of the last layers first. Collective.

    Their gradients arrive first. `limits` are the bytes of the first bucket and of the others: the
    first is small, so that its reduction begins early. `sparse` holds positions of parameters with
    sparse gradients. `wire` is as of DenseBucket, or compresses one bucket for each dtype.
    """
    compressed = isinstance(wire, CompressedReducer)
    closed: list[list[Member]] = []
    open_ones: dict[Any, tuple[list[Member], int]] = {}
    for position in reversed(range(len(members))):
        member = members[position]
        if position in sparse:
            continue
        parameter = member.parameter
        kind = parameter.dtype, parameter.device
        group, size = open_ones.get(kind, ([], 0))
        size += parameter.numel() * parameter.itemsize
        if group and not compressed and size > limits[min(len(closed), 1)]:
            closed.append(group)
            group, size = [], parameter.numel() * parameter.itemsize
        group.append(member)
        open_ones[kind] = group, size
    closed.extend(group for group, _ in open_ones.values())
    what = f"gradients of reducer {next(_numbers.setdefault(comm, count()))}"
    make = CompressedBucket if compressed else DenseBucket
    return [
        *(make(comm, group, wire, what) for group in closed),
        *(SparseBucket(comm, members[position], what) for position in sorted(sparse)),
    ]
