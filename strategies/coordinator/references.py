"""What goes between the chief and the workers by name, since each has its own.

Variables travel as what they are but for their storage, which lies on the servers; optimizers as
their numbers of now, while their slots lie there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from strategies.base.strategy import Strategy
from strategies.coordinator.messages import Packed, Restored
from strategies.coordinator.packing import pack
from strategies.coordinator.per_worker import PerWorkerIterator, WorkerDatasets
from strategies.core.storage import LocalStorage
from strategies.optimizers import Optimizer
from strategies.parameter_server.client import Client
from strategies.parameter_server.requests import VariableInfo
from strategies.parameter_server.storage import ServedStorage, SplitStorage, WholeStorage
from strategies.variables.variable import Variable


class StrategyName(NamedTuple):
    """The strategy itself."""


class StorageName(NamedTuple):
    """A variable's value on the servers."""

    info: VariableInfo


class OptimizerName(NamedTuple):
    """An optimizer, by the servers' number for it."""

    number: int
    kind: type[Optimizer]
    state: dict[str, Any]


class IteratorName(NamedTuple):
    """An iterator that each worker has of its own."""

    dataset: int
    number: int


class Use(NamedTuple):
    """An optimizer has updated a value for the first time."""

    optimizer: int
    value: VariableInfo


class StrategyReferences:
    """The strategy, and the values of its variables."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._storages: dict[tuple[bool, int], ServedStorage] = {}

    @property
    def _client(self) -> Client:
        return cast(Client, self._strategy.worker.client)  # type: ignore[attr-defined]

    def name(self, thing: Any) -> Any:
        """None for what is no part of the strategy."""
        if thing is self._strategy:
            return StrategyName()
        if isinstance(thing, ServedStorage) and thing.client is self._client:
            self._storages.setdefault(_key(thing.info), thing)
            return StorageName(thing.info)
        return None

    def resolve(self, name: Any) -> Any:
        """This process's own."""
        if isinstance(name, StrategyName):
            return self._strategy
        if isinstance(name, StorageName):
            return self.storage(name.info)
        raise ValueError(f"{name!r} is not known here")

    def storage(self, info: VariableInfo) -> ServedStorage:
        """The value on the servers, always as the same object: optimizers know it by that."""
        key = _key(info)
        if key not in self._storages:
            kind = SplitStorage if info.split else WholeStorage
            self._storages[key] = kind(self._client, info)
        return self._storages[key]


class ChiefReferences(StrategyReferences):
    """And what stands for the workers' iterators; and optimizers, which workers use for it."""

    def __init__(
        self, strategy: Strategy, tell_workers: Callable[[Restored, Packed], None]
    ) -> None:
        """`tell_workers` sends a message that comes before what is scheduled later."""
        super().__init__(strategy)
        self._tell_workers = tell_workers
        self._optimizers: dict[int, Optimizer] = {}
        self._told: dict[int, dict[str, Any]] = {}
        self._uses: list[Use] = []

    def name(self, thing: Any) -> Any:
        """An ON_READ variable is put onto the servers by that: all workers share it then."""
        if isinstance(thing, PerWorkerIterator):
            return IteratorName(thing.dataset, thing.number)
        if isinstance(thing, Optimizer):
            return self._name_of(thing)
        if isinstance(thing, Variable):
            if thing.strategy is not self._strategy:
                raise TypeError(
                    f"{thing} belongs to {thing.strategy}: workers can't reach it; create it in the"
                    f" scope of {self._strategy}, or schedule the function with its value"
                )
            self._serve(thing)
        return super().name(thing)

    def _name_of(self, optimizer: Optimizer) -> OptimizerName:
        number, state = self._client.number_of(optimizer), optimizer.__getstate__()
        self._optimizers[number] = optimizer
        restored = state.pop("_restored")
        if restored and self._told.get(number) is not restored:
            # Once, since it may be as large as the model.
            self._told[number] = restored
            self._tell_workers(Restored(number), pack(restored, self))
        return OptimizerName(number, type(optimizer), state)

    def _serve(self, variable: Variable) -> None:
        if isinstance(variable.storage, LocalStorage):
            variable.storage = self._strategy.store(variable.local.copy(), repr(variable))
            self._strategy.complete(variable)

    def hear(self, uses: list[Use]) -> None:
        """Workers tell what optimizers have updated; it is kept for `learn`."""
        self._uses.extend(uses)

    def learn(self) -> None:
        """Let the chief's optimizers know what they have slots for: checkpoints ask them."""
        while self._uses:
            use = self._uses.pop(0)
            optimizer = self._optimizers[use.optimizer]
            optimizer.slots_of(self.storage(use.value), optimizer.rule.slots)


class WorkerReferences(StrategyReferences):
    """And this worker's own iterators; and its optimizers, each a copy of the chief's."""

    def __init__(self, strategy: Strategy, datasets: WorkerDatasets) -> None:
        super().__init__(strategy)
        self._datasets = datasets
        self._optimizers: dict[int, Optimizer] = {}
        self._told: set[tuple[int, int]] = set()
        self._restored: dict[int, dict[str, Any]] = {}

    def restore(self, number: int, restored: dict[str, Any]) -> None:
        """Let an optimizer begin with these slots, where it has none yet."""
        self._restored[number] = restored

    def resolve(self, name: Any) -> Any:
        """An iterator is begun here where it is not yet."""
        if isinstance(name, IteratorName):
            return self._datasets.iterator(*name)
        return self._optimizer(name) if isinstance(name, OptimizerName) else super().resolve(name)

    def _optimizer(self, name: OptimizerName) -> Optimizer:
        own = self._optimizers.get(name.number)
        if own is None:
            own = name.kind.__new__(name.kind)
            own.__setstate__({**name.state, "_restored": {}})
            self._client.adopt(own, name.number)
            self._optimizers[name.number] = own
        # What it has restored here is not restored again.
        own.__setstate__({**name.state, "_slots": own.__dict__["_slots"]})
        if name.number in self._restored:
            own.__dict__["_restored"] = self._restored.pop(name.number)
        return own

    def uses(self) -> list[Use]:
        """What optimizers have updated since this was asked last."""
        new = []
        for number, optimizer in self._optimizers.items():
            for value in optimizer.values:
                if isinstance(value, ServedStorage) and (number, id(value)) not in self._told:
                    self._told.add((number, id(value)))
                    new.append(Use(number, value.info))
        return new


def _key(info: VariableInfo) -> tuple[bool, int]:
    """By the first shard; a part of a sharded variable is a value of its own."""
    return info.split, info.shards[0].number
