"""Variables and optimizers as they travel between the coordinator's chief and its workers.

A variable is packed with the name of its storage, which lies on the servers. An optimizer travels
as its present settings: its slots lie on the servers as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, NamedTuple, cast

from strategies.base.membership import Membership
from strategies.base.strategy import Strategy
from strategies.coordinator.link import Keep, Link
from strategies.coordinator.packing import NotifyWorkers, References, pack
from strategies.core.storage import LocalStorage
from strategies.optimizers import Optimizer
from strategies.parameter_server.client import Client
from strategies.parameter_server.requests import Roles, VariableInfo
from strategies.parameter_server.storage import ServedStorage, stored
from strategies.variables.variable import Variable


class StorageName(NamedTuple):
    """A variable's value on the servers."""

    info: VariableInfo


class OptimizerName(NamedTuple):
    """An optimizer, by the servers' number for it."""

    number: int
    kind: type[Optimizer]
    state: dict[str, Any]
    restores: int
    """How often the chief has restored it, and 1 for its making."""


class Use(NamedTuple):
    """An optimizer has updated a value for the first time."""

    optimizer: int
    value: VariableInfo


class ServedReferences(References):
    """Storages on the servers and the chief's optimizers, of which workers have copies.

    A storage is the same object on each return: optimizers identify it by its object.
    """

    def __init__(self, strategy: Strategy, **side: Any) -> None:
        super().__init__(strategy, **side)
        self._storages: dict[tuple[bool, int], ServedStorage] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._restored: dict[int, dict[str, Any]] = {}
        self._restores: Counter[int] = Counter()
        self._uses: list[Use] = []
        self._applying = threading.Lock()
        self._sent: set[tuple[int, int]] = set()

    @property
    def client(self) -> Client:
        """This process's client of the servers."""
        return cast(Client, self._strategy.worker.client)  # type: ignore[attr-defined]  # of this strategy alone

    def name(self, thing: Any) -> Any:
        """As of every strategy; the chief moves an ON_READ variable to the servers.

        All workers share it then.
        """
        if isinstance(thing, ServedStorage) and thing.client is self.client:
            self._storages.setdefault(_key(thing.info), thing)
            return StorageName(thing.info)
        if self._notify_workers is not None and isinstance(thing, Optimizer):
            return self._name_of(thing, self._notify_workers)
        if self._notify_workers is not None and isinstance(thing, Variable):
            self._serve(thing)
        return super().name(thing)

    def resolve(self, name: Any) -> Any:
        """This process's own object of that name."""
        if isinstance(name, StorageName):
            return self.storage(name.info)
        return self._optimizer(name) if isinstance(name, OptimizerName) else super().resolve(name)

    def storage(self, info: VariableInfo) -> ServedStorage:
        """The storage of this value."""
        key = _key(info)
        found = self._storages.get(key)
        if found is None:
            # One object for each value, also where another thread has just made it.
            found = self._storages.setdefault(key, stored(self.client, info))
        return found

    # On the chief

    def _name_of(self, optimizer: Optimizer, notify_workers: NotifyWorkers) -> OptimizerName:
        number, state = self.client.number_of(optimizer), optimizer.__getstate__()
        self._optimizers[number] = optimizer
        del state["_restored"]
        restored = vars(optimizer)["_restored"]
        if self._restored.get(number) is not restored:
            self._restored[number] = restored
            self._restores[number] += 1
            if restored:
                # Once, since it may be as large as the model.
                notify_workers(Keep(number), pack(restored, self))
        return OptimizerName(number, type(optimizer), state, self._restores[number])

    def _serve(self, variable: Variable) -> None:
        if variable.strategy is self._strategy and isinstance(variable.storage, LocalStorage):
            variable.storage = self._strategy.store(variable.local.copy(), repr(variable))
            self._strategy.complete(variable)

    def add_uses(self, uses: list[Use]) -> None:
        """Keep which values the workers' optimizers have updated."""
        self._uses.extend(uses)

    def apply_uses(self) -> None:
        """Give the chief's optimizers slots for these values: checkpoints hold them."""
        with self._applying:
            while self._uses:
                use = self._uses.pop(0)
                optimizer = self._optimizers[use.optimizer]
                optimizer.slots_of(self.storage(use.value), optimizer.rule.slots)

    # On a worker

    def _optimizer(self, name: OptimizerName) -> Optimizer:
        own = self._optimizers.get(name.number)
        if own is None:
            own = name.kind.__new__(name.kind)
            own.__dict__.update({**name.state, "_restored": {}})
            self.client.adopt(own, name.number)
            self._optimizers[name.number] = own
        # What it has restored here is not restored again, and its own steps are counted.
        state = {**name.state, "_slots": own.__dict__["_slots"]}
        if name.restores > self._restores[name.number]:
            self._restores[name.number] = name.restores
        else:
            state["iterations"] = own.iterations
        own.__dict__.update(state)
        if name.number in self._restored:
            own.__dict__["_restored"] = self._restored.pop(name.number)
        return own

    def keep(self, name: int, thing: dict[str, Any]) -> None:
        """Keep an optimizer's first slots; it keeps those that it has already."""
        self._restored[name] = thing

    def uses(self) -> list[Use]:
        """The values that optimizers have updated since the last call."""
        new = []
        for number, optimizer in self._optimizers.items():
            for value in optimizer.values:
                if isinstance(value, ServedStorage) and (number, id(value)) not in self._sent:
                    self._sent.add((number, id(value)))
                    new.append(Use(number, value.info))
        return new


def open_link(membership: Membership, roles: Roles) -> Link | None:
    """Between the chief and the workers that serve it; None in a cluster without a chief.

    Collective between all ranks of the world.
    """
    if not membership.ranks_of("chief"):
        return None
    workers = {rank: roles.name(rank) for rank in membership.ranks_of("worker")}
    servers = {rank: roles.name(rank) for rank in roles.servers}
    return Link(membership.world.mailbox(), roles.chief, workers, servers, ServedReferences)


def _key(info: VariableInfo) -> tuple[bool, int]:
    """By the first shard; a part of a sharded variable is a value of its own."""
    return info.split, info.shards[0].number
