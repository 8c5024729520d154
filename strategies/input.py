"""Datasets between ranks: each rank's share, and an end that all agree on.

TensorFlow's rules for splitting (AutoShardPolicy.DATA) and for ranks whose data ends early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives import Communicator
from strategies import nest


@dataclass(frozen=True)
class InputContext:
    """What a dataset function may know, as `tf.distribute.InputContext`: one pipeline a rank."""

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The global batch size divided by the replicas; ValueError where that leaves a rest."""
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"global_batch_size={global_batch_size!r}: must be a multiple of the"
                f" {self.num_replicas_in_sync} replicas"
            )
        return size


class _AgreedDataset:
    """Iterates this rank's batches until all ranks' have ended."""

    def __init__(self, dataset: Iterable[Any], communicator: Communicator) -> None:
        if iter(dataset) is dataset:
            raise TypeError(
                f"dataset is a {type(dataset).__name__}, which can be iterated only once: must give"
                " a new iterator at every `iter`"
            )
        self._dataset, self._communicator = dataset, communicator

    def __iter__(self) -> Iterator[Any]:
        empty = None
        source = iter(self._dataset)
        while True:
            batch = next(source, _ENDED)
            if not self._anybody_has(batch):
                return
            if empty is None:
                empty = self._empty_batch(batch)
            yield empty if batch is _ENDED else self._share(batch)

    def _anybody_has(self, batch: Any) -> bool:
        having = np.array([batch is not _ENDED], np.uint8)
        return bool(self._communicator.all_reduce(having, "max")[0])

    def _empty_batch(self, batch: Any) -> Any:
        """A batch without examples, after the first one of the lowest rank that has one."""
        own = None
        if batch is not _ENDED:
            _lengths(batch)
            own = nest.map_leaves(lambda leaf: leaf[:0], batch)
        batches = self._communicator.all_gather_object(own)
        return own if own is not None else next(each for each in batches if each is not None)

    def _share(self, batch: Any) -> Any:
        return batch


_ENDED = object()


def _lengths(batch: Any) -> set[int]:
    """The lengths of a batch's arrays."""
    leaves = nest.leaves(batch)
    try:
        return {len(leaf) for leaf in leaves}
    except TypeError:
        kinds = [f"{type(leaf).__name__} of shape {np.shape(leaf)}" for leaf in leaves]
        raise ValueError(f"a batch has {', '.join(kinds)}: must be arrays with an axis 0") from None


class PerRankDataset(_AgreedDataset):
    """A dataset of this rank's own; its batches are taken whole."""


class ShardedDataset(_AgreedDataset):
    """A dataset of global batches, the same one on every rank; each takes its part of each."""

    def _share(self, batch: Any) -> Any:
        lengths = _lengths(batch)
        if len(lengths) != 1:
            raise ValueError(
                f"a batch has arrays of lengths {sorted(lengths)}: must be of one length on axis 0"
            )
        part = -(-lengths.pop() // self._communicator.size)
        start = part * self._communicator.rank
        return nest.map_leaves(lambda leaf: leaf[start : start + part], batch)
