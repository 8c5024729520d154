"""What a worker does while its chief schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strategies.base.strategy import Strategy
from strategies.coordinator.link import Link
from strategies.coordinator.messages import Packed
from strategies.coordinator.packing import unpack
from strategies.coordinator.per_worker import WorkerDatasets
from strategies.coordinator.references import WorkerReferences
from strategies.coordinator.scheduled import call_scheduled
from strategies.coordinator.worker import Worker


def serve_chief(strategy: Strategy, link: Link, settle: Callable[[], None]) -> None:
    """Run what the chief schedules, until it has no more. For a worker's `strategy.serve()`.

    `settle` returns once all that a function has pushed is applied: a function has not run before.
    Raises RankFailedError where the chief has died.
    """

    def unpacked(arrays: Packed) -> Any:
        return unpack(arrays, references)

    datasets = WorkerDatasets(unpacked)
    references = WorkerReferences(strategy, datasets)

    def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return call_scheduled(strategy, fn, args, kwargs)
        finally:
            settle()

    Worker(link.box, link.chief, call, references, datasets).serve()
