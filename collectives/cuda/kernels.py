"""CUDA C++ kernels that neither NCCL nor CuPy provides.

pack and unpack move many arrays to and from a flat bucket in one launch. Their table has one row of
three 64-bit numbers for each piece: the address of the piece, its first element in the bucket, and
its length in elements. One block of threads processes one row. Pieces have at most `PIECE`
elements, so that blocks have similar amounts of work.

An element of the table is a real number; a complex number counts as two. Elements that are not cast
are moved as bits, so that one kernel per width suffices and none needs the headers of 16-bit
floats. Only integers are cast, because their MEAN is float64.

Neither kernel scales: the collective divides for MEAN. Dividing a sum afterwards would overflow in
16-bit floats where NCCL's average, and therefore `all_reduce` of the same array, does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

THREADS = 256
PIECE = 4096
"""Elements that one block of threads moves. A multiple of `ALIGNMENT` bytes for every width."""
ALIGNMENT = 16
"""Bytes that a thread moves at once. Arrays in a bucket start at multiples of it."""

SOURCE = r"""
template <typename From, typename To>
__device__ void move_elements(const From* source, To* target, long long length) {
    for (long long i = threadIdx.x; i < length; i += blockDim.x) {
        target[i] = static_cast<To>(source[i]);
    }
}

// Specialization without a cast: moves 16 bytes at a time if both sides are aligned to 16 bytes.
template <typename Element>
__device__ void move_elements(const Element* source, Element* target, long long length) {
    const unsigned long long addresses = reinterpret_cast<unsigned long long>(source)
        | reinterpret_cast<unsigned long long>(target);
    const long long in_vector = sizeof(uint4) / sizeof(Element);
    const long long vectors = addresses % sizeof(uint4) == 0 ? length / in_vector : 0;
    for (long long i = threadIdx.x; i < vectors; i += blockDim.x) {
        reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
    }
    for (long long i = vectors * in_vector + threadIdx.x; i < length; i += blockDim.x) {
        target[i] = source[i];
    }
}

template <typename Element, typename Packed>
__global__ void pack(const long long* table, Packed* bucket) {
    const long long* row = table + 3 * static_cast<long long>(blockIdx.x);
    move_elements(reinterpret_cast<const Element*>(row[0]), bucket + row[1], row[2]);
}

template <typename Element, typename Packed>
__global__ void unpack(const long long* table, const Packed* bucket) {
    const long long* row = table + 3 * static_cast<long long>(blockIdx.x);
    move_elements(bucket + row[1], reinterpret_cast<Element*>(row[0]), row[2]);
}
"""

_BITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_CAST = {
    "bool": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
    "float64": "double",
}


def reals(dtype: np.dtype[Any]) -> int:
    """Number of table elements for each element of an array."""
    return 2 if dtype.kind == "c" else 1


def kernel_name(kernel: str, array: np.dtype[Any], bucket: np.dtype[Any]) -> str:
    """Name of the "pack" or "unpack" kernel for arrays and buckets of these dtypes."""
    if array == bucket:
        element = packed = _BITS[array.itemsize // reals(array)]
    else:
        element, packed = _CAST[array.name], _CAST[bucket.name]
    return f"{kernel}<{element}, {packed}>"


def lay_out(lengths: Sequence[int], itemsize: int) -> tuple[NDArray[np.int64], int]:
    """Where each array starts in a bucket, and the bucket's length, in elements of `itemsize`.

    Arrays, and therefore buckets, are padded to multiples of `ALIGNMENT` bytes.
    """
    unit = ALIGNMENT // itemsize
    stops = np.cumsum([-(-length // unit) * unit for length in (0, *lengths)], dtype=np.int64)
    return stops[:-1], int(stops[-1])


def make_table(
    addresses: Sequence[int], starts: NDArray[np.int64], lengths: Sequence[int], itemsize: int
) -> NDArray[np.int64]:
    """The rows for arrays at these addresses, with elements of `itemsize` bytes."""
    whole = np.array(lengths, np.int64)
    counts = -(-whole // PIECE)
    array = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(array)) - first) * PIECE
    begins = np.array(addresses, np.int64)[array] + offsets * itemsize
    return np.stack(
        [begins, starts[array] + offsets, np.minimum(whole[array] - offsets, PIECE)], axis=1
    )
