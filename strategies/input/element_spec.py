"""What the batches look like: shapes and dtypes, agreed on by all ranks from their first ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 (gives NumPy the name bfloat16)
import numpy as np

from collectives import Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core import nest
from strategies.input.batches import arrays_of, is_torch

log = logging.getLogger("strategies")

# Not an error: each rank may change the same examples in a way of its own (augmentation).
_APART = (
    "each rank takes its part of every global batch (AutoShardPolicy.DATA), but the ranks' first"
    " global batches differ: where they are in another order, examples are lost or come twice."
    " Shuffle with the same seed on every rank, or use sharding='seed_offset', AutoShardPolicy.OFF"
    " or distribute_datasets_from_function, which let every rank read on its own"
)


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of one array of a batch, as `tf.TensorSpec`.

    shape: None stands for a length that isn't the same everywhere; the first always is None.
    dtype: NumPy's, for torch tensors as well.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


class Form(NamedTuple):
    """What all ranks know of the batches: their spec, and a batch without examples.

    That batch has torch tensors where the batches have them, NumPy arrays everywhere else.
    """

    element_spec: Any
    empty: Any


class First(NamedTuple):
    """A rank's first batch, described."""

    structure: Any  # the nest, with numbers for its arrays
    specs: list[TensorSpec]
    of_torch: list[bool]
    whole: str = ""  # a digest of the global batch that it is a part of, if it is

    def __str__(self) -> str:
        kinds = [f"{spec.dtype} of shape {spec.shape}" for spec in self.specs]
        return f"{nest.structure(self.structure)} of {', '.join(kinds)}"


def agree_on_form(communicator: Communicator, first: First | None) -> Form:
    """The form of the batches, of which at least one rank has one (None: no batch). Collective.

    A length after axis 0 that differs by rank is None in the spec. Raises the same ValueError
    on every rank where structures, dtypes or numbers of axes differ; rank 0 warns where the ranks
    take their parts of global batches that differ.
    """
    firsts = communicator.all_gather_object(first)
    known = [first for first in firsts if first is not None]
    if communicator.rank == 0 and len({first.whole for first in known}) > 1:
        log.warning("%s", _APART)
    if len({_unchanging(first) for first in known}) > 1:
        lines = [
            f"  rank {rank}: {first}" for rank, first in enumerate(firsts) if first is not None
        ]
        text = "\n".join(["the ranks' first batches differ, * being an array", *lines])
        raise raised_on_all(ValueError(text), communicator.rank)
    specs = [_common(specs) for specs in zip(*(first.specs for first in known), strict=True)]
    return Form(nest.pack_like(known[0].structure, specs), _empty(first or known[0]))


def described(batch: Any, whole: str = "") -> First:
    """What there is to agree on. ValueError where an array has no axis 0."""
    arrays = arrays_of(batch)
    specs = [TensorSpec((None, *map(int, array.shape[1:])), _dtype(array)) for array in arrays]
    structure = nest.pack_like(batch, list(range(len(arrays))))
    return First(structure, specs, [is_torch(array) for array in arrays], whole)


def _dtype(array: Any) -> np.dtype[Any]:
    return np.dtype(str(array.dtype).removeprefix("torch.") if is_torch(array) else array.dtype)


def _unchanging(first: First) -> tuple[Any, ...]:
    return nest.structure(first.structure), *((len(s.shape), s.dtype) for s in first.specs)


def _common(specs: Sequence[TensorSpec]) -> TensorSpec:
    columns = zip(*(spec.shape for spec in specs), strict=True)
    shape = tuple(column[0] if len(set(column)) == 1 else None for column in columns)
    return TensorSpec(shape, specs[0].dtype)


def _empty(first: First) -> Any:
    """A batch without examples, of the same kind as the one described."""
    pairs = zip(first.specs, first.of_torch, strict=True)
    return nest.pack_like(first.structure, [_empty_array(*pair) for pair in pairs])


def _empty_array(spec: TensorSpec, of_torch: bool) -> Any:
    shape = tuple(length or 0 for length in spec.shape)
    if not of_torch:
        return np.zeros(shape, spec.dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, spec.dtype.name))
