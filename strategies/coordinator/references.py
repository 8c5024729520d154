"""Objects that travel between the chief and the workers by name, since each rank has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from strategies.base.strategy import Strategy
from strategies.coordinator.packing import Packed
from strategies.coordinator.per_worker import PerWorkerIterator, WorkerDatasets
from strategies.variables.variable import Variable

NotifyWorkers: TypeAlias = Callable[[Any, Packed], None]
"""Sends every worker a notification, which precedes what is scheduled later."""


class StrategyName(NamedTuple):
    """The strategy itself."""


class IteratorName(NamedTuple):
    """An iterator that each worker has of its own."""

    dataset: int
    number: int


class References:
    """The strategy travels by name. Strategies whose variables do, too, have a subclass."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def name(self, thing: Any) -> Any:
        """A picklable name; None for an object that is packed itself."""
        return StrategyName() if thing is self._strategy else None

    def resolve(self, name: Any) -> Any:
        """This process's own object of that name; ValueError for an unknown one."""
        if isinstance(name, StrategyName):
            return self._strategy
        raise ValueError(f"{name!r}: no object of this name exists here")


class ChiefReferences(References):
    """The chief's: per-worker iterators travel by name as well."""

    def __init__(self, strategy: Strategy, notify_workers: NotifyWorkers) -> None:
        super().__init__(strategy)
        self._notify_workers = notify_workers

    def name(self, thing: Any) -> Any:
        """A picklable name; None for an object that is packed itself.

        TypeError for a variable of another strategy.
        """
        if isinstance(thing, PerWorkerIterator):
            return IteratorName(thing.dataset, thing.number)
        if isinstance(thing, Variable) and thing.strategy is not self._strategy:
            raise TypeError(
                f"{thing} belongs to {thing.strategy}: workers can't reach it; create it in the"
                f" scope of {self._strategy}, or schedule the function with its value"
            )
        return super().name(thing)

    def add_uses(self, uses: Any) -> None:
        """Keep what a worker sent with a result, for `apply_uses`; called by any thread."""

    def apply_uses(self) -> None:
        """Apply what workers sent to the chief's own objects; called by the program's thread."""


class WorkerReferences(References):
    """A worker's: names of per-worker iterators are resolved to its own."""

    def __init__(self, strategy: Strategy, datasets: WorkerDatasets) -> None:
        super().__init__(strategy)
        self._datasets = datasets

    def resolve(self, name: Any) -> Any:
        """This process's own object of that name; an iterator begins here if it is new."""
        if isinstance(name, IteratorName):
            return self._datasets.iterator(*name)
        return super().resolve(name)

    def restore(self, number: int, restored: Any) -> None:
        """Keep an optimizer's first slots."""

    def uses(self) -> Any:
        """What is sent to the chief with a result."""


class MakeReferences(NamedTuple):
    """Makes a strategy's references, on either side."""

    on_chief: Callable[[Strategy, NotifyWorkers], ChiefReferences] = ChiefReferences
    on_worker: Callable[[Strategy, WorkerDatasets], WorkerReferences] = WorkerReferences
