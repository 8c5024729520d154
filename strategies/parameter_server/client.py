"""A worker's pulls and pushes of shards."""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias

from collectives.messaging.rpc import PendingAnswer
from collectives.shm.seqlock import MappedArray, MappedArrays
from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.storage import Change
from strategies.core.values import Array
from strategies.optimizers.update_rules import Slots, UpdateRule
from strategies.parameter_server.requests import Request, ShardInfo
from strategies.parameter_server.rpc_client import RpcClient

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

_ATTEMPTS = 4
_LONGEST_CHANGE = 1e-3

Pull: TypeAlias = tuple[ShardInfo, Array, Array | None]
"""A shard, where its values are copied to, and the rows that are wanted: None for all."""

_Push: TypeAlias = tuple[int, Sequence[ShardInfo], Request, Sequence[Array]]
"""A server, and a request that changes these shards of it, with its arrays."""


class Client:
    """One worker's pulls and pushes. A pull sees all that this worker has pushed before."""

    def __init__(
        self,
        rpc: RpcClient,
        memory: MappedArrays,
        same_node: Callable[[int], bool],
        *,
        is_chief: bool,
    ) -> None:
        """`same_node(server)`: whether this process may map the server's memory."""
        self._rpc, self._memory, self._same_node = rpc, memory, same_node
        self.is_chief = is_chief
        self._optimizers: dict[int, tuple[int, Optimizer]] = {}
        self.only_adopts = False
        """Whether a chief's functions run here: optimizers are the chief's."""
        self._compared: set[int] = set()
        """The numbers of optimizers that equal those of other workers."""
        self._mapped: dict[int, MappedArray | None] = {}
        self._pushed: Counter[int] = Counter()
        self._unfenced: set[int] = set()

    def number_of(self, optimizer: Optimizer) -> int:
        """The servers' number for an optimizer: every worker first uses its own in one order.

        The first use raises MismatchError where another worker's has another rule, or other numbers
        than the learning rate; RuntimeError for one that a chief's function has made.
        """
        if self.only_adopts and id(optimizer) not in self._optimizers:
            raise RuntimeError(
                f"{type(optimizer).__name__} was made by a function that the chief has scheduled:"
                " its slots would be another optimizer's; make it on the chief"
            )
        with self._rpc.lock:
            # The optimizer is kept, so that its id stays its own. One that is refused is counted,
            # as on the other workers.
            made = self._optimizers.setdefault(id(optimizer), (len(self._optimizers), optimizer))
            number = made[0]
            if number not in self._compared:
                arguments = number, _settings_of(optimizer)
                request = self._rpc.request(0, Request("compare_optimizer", None, arguments))
                self._rpc.endpoint.results([request], "comparing optimizers")
                self._compared.add(number)
        return number

    def adopt(self, optimizer: Optimizer, number: int) -> None:
        """Use another worker's number for an optimizer."""
        self._optimizers[id(optimizer)] = number, optimizer
        self._compared.add(number)

    # Pulls

    def pull(self, wanted: Sequence[Pull]) -> None:
        """Copy the shards' values into the arrays, or some rows, numbered from 0 in each shard."""
        with self._rpc.lock:
            self._rpc.poll()
            # Requests first, so that the servers work meanwhile.
            pending = [
                (each, self._request(*each)) for each in wanted if self._map(each[0]) is None
            ]
            for each in wanted:
                mapped = self._map(each[0])
                if mapped is not None and not self._copy(mapped, *each):
                    pending.append((each, self._request(*each)))
            found = self._rpc.endpoint.results([each for _, each in pending], "a pull")
            self._rpc.poll()
            for ((_, out, _), _), (_, arrays) in zip(pending, found, strict=True):
                out[...] = arrays[0]

    def _request(self, info: ShardInfo, out: Array, rows: Array | None) -> PendingAnswer:
        arrays = () if rows is None else (rows,)
        return self._rpc.request(info.server, Request("read", info.number), arrays)

    def _map(self, info: ShardInfo) -> MappedArray | None:
        """The shard's memory, where it can be read in place."""
        if info.number not in self._mapped:
            near = self._same_node(info.server)
            address = info.address if near else None
            self._mapped[info.number] = self._memory.find(address, info.shape, info.dtype)
        return self._mapped[info.number]

    def _copy(self, mapped: MappedArray, info: ShardInfo, out: Array, rows: Array | None) -> bool:
        """Copy from the server's memory; False where it changes during every attempt."""
        # The memory of a dead server can still be read.
        self._rpc.check_present(info.server)
        self._await_own_pushes(mapped, info)
        for _ in range(_ATTEMPTS):
            limit = time.monotonic() + _LONGEST_CHANGE
            while not mapped.settled and time.monotonic() < limit:
                os.sched_yield()
            if mapped.copy_to(out, rows):
                return True
        return False

    def _await_own_pushes(self, mapped: MappedArray, info: ShardInfo) -> None:
        pushed = self._pushed[info.number]
        if mapped.applied < pushed:
            self._rpc.wait(lambda: mapped.applied >= pushed, info.server, "a pull")
        failures = self._rpc.failures
        if mapped.failed > failures[info.number]:
            # The error is on its way.
            self._rpc.wait(lambda: failures[info.number] >= mapped.failed, info.server, "a pull")

    # Pushes

    def change(self, change: Change, parts: Iterable[tuple[ShardInfo, Sequence[Array]]]) -> None:
        """Change shards by a function of a module, each with its own operands."""
        pickled = (pickle.dumps(change, pickle.HIGHEST_PROTOCOL),)
        self._push(
            (info.server, [info], Request("change", info.number, pickled), operands)
            for info, operands in parts
        )

    def update(
        self,
        optimizer: int,
        steps: int,
        rule: UpdateRule,
        parts: Sequence[tuple[ShardInfo, Gradient]],
    ) -> None:
        """Apply an optimizer's rule to shards; all are on their way when it returns.

        `steps` are those that this worker knows of. Every server counts the step, so that a rule
        finds the same number on each.
        """
        pickled = pickle.dumps(rule, pickle.HIGHEST_PROTOCOL)
        by_server: list[list[tuple[ShardInfo, Gradient]]] = [[] for _ in range(self._rpc.servers)]
        for info, gradient in parts:
            by_server[info.server].append((info, gradient))
        pushes: list[_Push] = []
        for server, own in enumerate(by_server):
            infos, gradients = [info for info, _ in own], [gradient for _, gradient in own]
            numbers = tuple(info.number for info in infos)
            sparse = tuple(isinstance(gradient, IndexedSlices) for gradient in gradients)
            arrays = [array for gradient in gradients for array in _arrays_of(gradient)]
            request = Request("update", None, (optimizer, steps, pickled, numbers, sparse))
            pushes.append((server, infos, request, arrays))
        self._push(pushes)

    def write_slots(
        self,
        optimizer: int,
        parts: Iterable[tuple[ShardInfo, Slots]],
        iteration: int,
        *,
        keep: bool,
    ) -> None:
        """Set what an optimizer keeps of shards; leave what is there if `keep`."""
        self._push(
            (
                info.server,
                [info],
                Request("write_slots", info.number, (optimizer, tuple(slots), iteration, keep)),
                list(slots.values()),
            )
            for info, slots in parts
        )

    def _push(self, pushes: Iterable[_Push]) -> None:
        """All of them; none where an earlier push has failed, whose error is raised."""
        with self._rpc.lock:
            self._rpc.prepare()
            for server, infos, request, arrays in pushes:
                self._rpc.push(server, request, arrays)
                self._unfenced.add(server)
                for info in infos:
                    self._pushed[info.number] += 1

    # Requests

    def read_slots(
        self, infos: Sequence[ShardInfo], optimizer: int
    ) -> list[tuple[dict[str, Array], int]]:
        """What an optimizer keeps of each shard: the slots by name, and the count of steps."""
        with self._rpc.lock:
            pending = [
                self._rpc.request(info.server, Request("read_slots", info.number, (optimizer,)))
                for info in infos
            ]
            found = self._rpc.endpoint.results(pending, "reading slots")
            self._rpc.poll()
        return [
            (dict(zip(names, slots, strict=True)), iteration) for (names, iteration), slots in found
        ]

    def end_step(self) -> None:
        """Return when all that was pushed is applied and the next step may begin.

        Raises errors of pushes afterwards: a failed step counts for other workers' waits.
        """
        with self._rpc.lock:
            self._await_pushes()
            tick = self._rpc.request(0, Request("tick"))
            what = "apply_gradients, too far ahead of the slowest worker"
            self._rpc.endpoint.results([tick], what, self._slowest)
            self._rpc.poll()

    def _slowest(self) -> dict[int, str]:
        """The ranks to name once the deadline is over."""
        request = self._rpc.request(0, Request("slowest"))
        [(ranks, _)] = self._rpc.endpoint.results([request], "requesting the slowest worker")
        return dict.fromkeys(ranks, "")

    def fence(self) -> None:
        """Return when all that this worker has pushed is applied; raise errors of pushes."""
        with self._rpc.lock:
            self._await_pushes()
            self._rpc.poll()

    def _await_pushes(self) -> None:
        servers = sorted(self._unfenced)
        pending = [self._rpc.request(server, Request("fence")) for server in servers]
        self._rpc.endpoint.results(pending, "waiting for pushes")
        self._unfenced.difference_update(servers)


def _settings_of(optimizer: Optimizer) -> str:
    """What must be equal on all workers: the class, and its numbers but for the learning rate."""
    rule = optimizer.rule
    limits = {"clipnorm": optimizer.clipnorm, "global_clipnorm": optimizer.global_clipnorm}
    numbers = {
        name: value if isinstance(value, bool) else f"{float(value):.6g}"
        for name, value in {**vars(rule), **limits}.items()
        if isinstance(value, Real) and name != "learning_rate"
    }
    given = ", ".join(f"{name}={value}" for name, value in numbers.items())
    return f"{type(optimizer).__name__}({given})"


def _arrays_of(gradient: Gradient) -> list[Array]:
    if isinstance(gradient, IndexedSlices):
        return [gradient.indices, gradient.values]
    return [gradient]
