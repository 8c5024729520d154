"""Element specs: shapes and dtypes of batches, agreed on by all ranks from their first batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)
import numpy as np

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.cuda.interface import is_torch
from strategies.core import nest
from strategies.input.batches import arrays_of


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of one array of a batch, as `tf.TensorSpec`.

    shape: None for a length that varies, which the first always does.
    dtype: NumPy's, for torch tensors as well.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


class BatchFormat(NamedTuple):
    """The batches' spec, the same on all ranks, and a batch without examples.

    That batch has torch tensors where the batches have them, NumPy arrays otherwise.
    """

    element_spec: Any
    empty: Any


class FirstBatch(NamedTuple):
    """A description of a rank's first batch."""

    structure: Any  # the nest, with indices in place of arrays
    specs: list[TensorSpec]
    of_torch: list[bool]

    def __str__(self) -> str:
        kinds = [f"{spec.dtype} of shape {spec.shape}" for spec in self.specs]
        return f"{nest.structure(self.structure)} of {', '.join(kinds)}"


def agree_on_format(communicator: Communicator, first: FirstBatch | None) -> BatchFormat:
    """The batches' format from the ranks' first batches (None: the rank has none). Collective.

    At least one rank must have a batch. A length after axis 0 that differs by rank is None in the
    spec. Raises the same ValueError on every rank where structures, dtypes or numbers of axes
    differ.
    """
    firsts = communicator.all_gather_object(first)
    known = [first for first in firsts if first is not None]
    kinds = {
        (nest.structure(each.structure), *((len(spec.shape), spec.dtype) for spec in each.specs))
        for each in known
    }
    if len(kinds) > 1:
        lines = [
            f"  rank {rank}: {first}" for rank, first in enumerate(firsts) if first is not None
        ]
        text = "\n".join(["the ranks' first batches differ, * being an array", *lines])
        raise raised_on_all(ValueError(text), communicator.rank)
    specs = [_common(specs) for specs in zip(*(first.specs for first in known), strict=True)]
    own = first or known[0]
    pairs = zip(own.specs, own.of_torch, strict=True)
    empty = nest.pack_like(own.structure, [_empty_array(*pair) for pair in pairs])
    return BatchFormat(nest.pack_like(known[0].structure, specs), empty)


def describe(batch: Any) -> FirstBatch:
    """The description of a batch. ValueError where an array has no axis 0."""
    arrays = arrays_of(batch)
    specs = [TensorSpec((None, *map(int, array.shape[1:])), _dtype(array)) for array in arrays]
    structure = nest.pack_like(batch, list(range(len(arrays))))
    return FirstBatch(structure, specs, [is_torch(array) for array in arrays])


def _dtype(array: Any) -> np.dtype[Any]:
    return np.dtype(str(array.dtype).removeprefix("torch.") if is_torch(array) else array.dtype)


def _common(specs: Sequence[TensorSpec]) -> TensorSpec:
    columns = zip(*(spec.shape for spec in specs), strict=True)
    shape = tuple(column[0] if len(set(column)) == 1 else None for column in columns)
    return TensorSpec(shape, specs[0].dtype)


def _empty_array(spec: TensorSpec, of_torch: bool) -> Any:
    shape = tuple(length or 0 for length in spec.shape)
    if not of_torch:
        return np.zeros(shape, spec.dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, spec.dtype.name))
