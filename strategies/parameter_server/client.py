"""What a worker does with shards: it pulls and pushes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from strategies.optimizers.update_rules import UpdateRule
from strategies.parameter_server import requests
from strategies.parameter_server.correspondence import Correspondence
from strategies.parameter_server.memory import MappedMemory, MappedShard
from strategies.parameter_server.requests import ShardInfo, as_pickle
from strategies.variables.indexed_slices import Gradient, IndexedSlices
from strategies.variables.storage import Change

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

Array = NDArray[Any]
_ATTEMPTS = 4
_LONGEST_CHANGE = 1e-3


class Client:
    """One worker's pulls and pushes. A pull sees all that this worker has pushed before."""

    def __init__(
        self,
        correspondence: Correspondence,
        memory: MappedMemory,
        same_node: Callable[[int], bool],
        *,
        is_chief: bool,
    ) -> None:
        """`same_node` tells of a server's number whether its memory may be looked for here."""
        self._mail, self._memory, self._same_node = correspondence, memory, same_node
        self.is_chief = is_chief
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self._mapped: dict[int, MappedShard | None] = {}
        self._pushed: Counter[int] = Counter()
        self._unfenced: set[int] = set()

    def number_of(self, optimizer: Optimizer) -> int:
        """By what the servers know an optimizer: workers use theirs first in the same order."""
        # The optimizer is kept, so that its id stays its own.
        made = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
        return made[0]

    def adopt(self, optimizer: Optimizer, number: int) -> None:
        """Know an optimizer by another worker's number for it."""
        self._optimizers[id(optimizer)] = number, optimizer

    # Pulls

    def pull(self, wanted: Sequence[tuple[ShardInfo, Array]]) -> None:
        """Copy the shards' values into the arrays."""
        self._pull([(info, out, None) for info, out in wanted])

    def pull_rows(self, wanted: Sequence[tuple[ShardInfo, Array, Array]]) -> None:
        """Copy the rows, numbered from 0 in each shard, into the arrays."""
        self._pull(wanted)

    def _pull(self, wanted: Sequence[tuple[ShardInfo, Array, Array | None]]) -> None:
        with self._mail.lock:
            self._mail.look()
            # What needs an answer goes first, so that the servers are at work meanwhile.
            asked = [(each, self._ask(*each)) for each in wanted if self._map(each[0]) is None]
            for each in wanted:
                mapped = self._map(each[0])
                if mapped is not None and not self._copy(mapped, *each):
                    asked.append((each, self._ask(*each)))
            for (info, out, _), number in asked:
                _, arrays = self._mail.answer(number, info.server, "a pull")
                out[...] = arrays[0]

    def _ask(self, info: ShardInfo, out: Array, rows: Array | None) -> int:
        arrays = () if rows is None else (rows,)
        return self._mail.ask(info.server, requests.Read(info.number), arrays)

    def _map(self, info: ShardInfo) -> MappedShard | None:
        """The shard's memory, where it can be read in place."""
        if info.number not in self._mapped:
            near = self._same_node(info.server)
            self._mapped[info.number] = self._memory.find(info) if near else None
        return self._mapped[info.number]

    def _copy(self, mapped: MappedShard, info: ShardInfo, out: Array, rows: Array | None) -> bool:
        """Copy from the server's memory; False where it changes all the time."""
        # The memory of a dead server can still be read.
        self._mail.check_alive(info.server)
        self._await_own_pushes(mapped, info)
        for _ in range(_ATTEMPTS):
            limit = time.monotonic() + _LONGEST_CHANGE
            while not mapped.settled and time.monotonic() < limit:
                os.sched_yield()
            if mapped.copy_to(out, rows):
                return True
        return False

    def _await_own_pushes(self, mapped: MappedShard, info: ShardInfo) -> None:
        pushed = self._pushed[info.number]
        if mapped.applied < pushed:
            self._mail.wait(lambda: mapped.applied >= pushed, [info.server], "a pull")
        failures = self._mail.failures
        if mapped.failed > failures[info.number]:
            # The error is on its way.
            self._mail.wait(lambda: failures[info.number] >= mapped.failed, [info.server], "a pull")

    # Pushes

    def change(self, info: ShardInfo, change: Change, operands: Sequence[Array]) -> None:
        """Change a shard by a function of a module."""
        request = requests.Change(info.number, as_pickle(change))
        self._push(info.server, [info], request, operands)

    def update(
        self, optimizer: int, rule: UpdateRule, parts: Sequence[tuple[ShardInfo, Gradient]]
    ) -> None:
        """Apply an optimizer's rule to shards; all are on their way when it returns."""
        pickled = as_pickle(rule)
        by_server: dict[int, list[tuple[ShardInfo, Gradient]]] = {}
        for info, gradient in parts:
            by_server.setdefault(info.server, []).append((info, gradient))
        for server, own in by_server.items():
            infos = [info for info, _ in own]
            numbers = tuple(info.number for info in infos)
            sparse = tuple(isinstance(gradient, IndexedSlices) for _, gradient in own)
            arrays = [array for _, gradient in own for array in _arrays_of(gradient)]
            request = requests.Update(optimizer, pickled, numbers, sparse)
            self._push(server, infos, request, arrays)

    def write_slots(
        self,
        info: ShardInfo,
        optimizer: int,
        slots: Mapping[str, Array],
        iteration: int,
        *,
        keep: bool,
    ) -> None:
        """Set what an optimizer keeps of a shard; leave what is there if `keep`."""
        names = tuple(slots)
        request = requests.WriteSlots(info.number, optimizer, names, iteration, keep)
        self._push(info.server, [info], request, list(slots.values()))

    def _push(
        self, server: int, infos: Sequence[ShardInfo], request: Any, arrays: Sequence[Array]
    ) -> None:
        with self._mail.lock:
            self._mail.push(server, request, arrays)
            self._unfenced.add(server)
            for info in infos:
                self._pushed[info.number] += 1

    # Questions

    def read_slots(
        self, infos: Sequence[ShardInfo], optimizer: int
    ) -> list[tuple[dict[str, Array], int]]:
        """What an optimizer keeps of each shard: the slots by name, and the count of updates."""
        with self._mail.lock:
            numbers = [
                self._mail.ask(info.server, requests.ReadSlots(info.number, optimizer))
                for info in infos
            ]
            found = []
            for info, number in zip(infos, numbers, strict=True):
                (names, iteration), slots = self._mail.answer(number, info.server, "reading slots")
                found.append((dict(zip(names, slots, strict=True)), iteration))
            return found

    def tick(self) -> None:
        """Tell the first server that a step is done; return when the next one may begin."""
        with self._mail.lock:
            number = self._mail.ask(0, requests.Tick())
            what = "apply_gradients, too far ahead of the slowest worker"
            self._mail.answer(number, 0, what, self._slowest)

    def _slowest(self) -> dict[int, str]:
        """Asked only once the deadline is over."""
        ranks, _ = self._mail.answer(self._mail.ask(0, requests.Slowest()), 0, "asking who is late")
        return dict.fromkeys(ranks, "")

    def fence(self) -> None:
        """Return when all that this worker has pushed is applied; raise what went wrong."""
        with self._mail.lock:
            servers = sorted(self._unfenced)
            asked = [(self._mail.ask(server, requests.Fence()), server) for server in servers]
            for number, server in asked:
                self._mail.answer(number, server, "waiting for pushes")
                self._unfenced.discard(server)
            self._mail.look()


def _arrays_of(gradient: Gradient) -> list[Array]:
    if isinstance(gradient, IndexedSlices):
        return [gradient.indices, gradient.values]
    return [gradient]
