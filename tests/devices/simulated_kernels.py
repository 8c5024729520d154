"""The kernels of `kernels.SOURCE` for the simulated GPU: by address, row after row."""

from functools import partial

import numpy as np

from collectives.cuda.kernels import _CAST, PIECE, kernel_name
from tests.devices.simulated import KERNELS
from tests.devices.simulated_arrays import memory_at

WIDTHS = [np.dtype(f"u{width}") for width in (1, 2, 4, 8)]
CASTS = [(np.dtype(name), np.dtype(np.float64)) for name in _CAST if name != "float64"]
PAIRS = [*((width, width) for width in WIDTHS), *CASTS]


def _move(packs, element, packed, blocks, arguments):
    table, bucket = arguments
    rows = table.reshape(-1, 3)
    assert blocks == len(rows)
    bucket = bucket.view(packed)
    for address, start, length in rows.tolist():
        assert 0 < length <= PIECE
        assert start >= 0
        assert start + length <= bucket.size
        array, slot = memory_at(address, length, element), bucket[start : start + length]
        if packs:
            slot[...] = array
        else:
            array[...] = slot


for _pair in PAIRS:
    KERNELS[kernel_name("pack", *_pair)] = partial(_move, True, *_pair)
    KERNELS[kernel_name("unpack", *_pair)] = partial(_move, False, *_pair)
