"""Rebatching: cut batches to a worker's portion of a global batch, or join several to one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

from strategies.input.batches import concatenate, copied, length_of, part_of
from strategies.input.sources import check_iterable, iterate


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> list[int]:
    """The batch sizes that a worker cycles through, as TensorFlow's function of this name.

    Their sum is the global batch size, and so is, at each step, the sum over the workers. They
    differ by at most one: 4 over 3 workers is 2, 1, 1 for worker 0, and rotated for the others.
    (tensorflow/python/data/experimental/ops/distribute.py)
    """
    parts = num_workers * num_replicas_per_worker
    size, larger = divmod(global_batch_size, parts)
    of_worker_0 = [size + 1] * larger + [size] * (parts - larger)
    offset = worker_index * num_replicas_per_worker
    return of_worker_0[offset:] + of_worker_0[:offset]


def rebatched(
    batches: Iterable[Any], worker: int, workers: int, batch_size: int | None = None
) -> Iterator[Any]:
    """The same examples in the worker's batch sizes; the last batch may be shorter.

    batch_size: the global one; None takes the length of the first batch that isn't empty.
    """
    buffer = _Buffer()
    sizes: Iterator[int] | None = None
    for batch in batches:
        buffer.add(batch)
        if sizes is None and buffer.length:
            global_batch_size = batch_size or buffer.length
            sizes = cycle(batch_sizes_for_worker(global_batch_size, workers, 1, worker))
            next_size = next(sizes)
        while sizes is not None and buffer.length and next_size <= buffer.length:
            yield buffer.take(next_size)
            next_size = next(sizes)
        buffer.keep()
    if buffer.length:
        yield buffer.take(buffer.length)


class _Buffer:
    """Examples that were read and not yet yielded."""

    def __init__(self) -> None:
        self.length = 0
        self._pieces: deque[Any] = deque()
        self._empty: Any = None

    def add(self, batch: Any) -> None:
        length = length_of(batch)
        self._empty = part_of(batch, 0, 0)
        if length:
            self._pieces.append(batch)
            self.length += length

    def keep(self) -> None:
        """Keep what is left, which lies in the last batch added, while the next one is read."""
        if self._pieces:
            self._pieces.append(copied(self._pieces.pop()))

    def take(self, count: int) -> Any:
        self.length -= count
        parts = []
        while count:
            piece = self._pieces.popleft()
            length = length_of(piece)
            parts.append(part_of(piece, 0, count))
            if length > count:
                self._pieces.appendleft(part_of(piece, count, length))
            count -= min(count, length)
        return concatenate(parts or [self._empty])


def join_batches(dataset: Any, count: int) -> Iterable[Any]:
    """A dataset with `count` batches concatenated to one.

    What can't be iterated is returned unchanged, for `distribute` to refuse.
    """
    try:
        check_iterable(dataset)
    except TypeError:
        return dataset  # type: ignore[no-any-return]  # nor is it one
    return JoinedBatches(dataset, count)


class JoinedBatches:
    """A re-iterable of batches, each the concatenation of several batches of another dataset.

    Files, seeds, samplers and options are those of the other dataset, so that it is sharded in the
    same way.
    """

    _FORWARDED = (
        *("files", "is_shuffled", "options"),
        *("batch_sampler", "sampler", "num_workers", "in_order"),
    )
    _TRANSFORMING = ("auto_shard", "with_seed")

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count = dataset, count

    def __iter__(self) -> Iterator[Any]:
        source = iterate(self._dataset)
        while batches := list(map(copied, islice(source, self._count))):
            yield concatenate(batches)

    def __getattr__(self, name: str) -> Any:
        if name in self._FORWARDED:
            return getattr(self._dataset, name)
        if name in self._TRANSFORMING:
            method = getattr(self._dataset, name)
            return lambda *arguments: JoinedBatches(method(*arguments), self._count)
        if name == "batch_size":
            size = self._dataset.batch_size
            return None if size is None else size * self._count
        raise AttributeError(name)
