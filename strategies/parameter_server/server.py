"""A parameter server: it answers workers until all of them have left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from collectives import RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.remote_error import describe
from collectives.messaging.rpc import POLL_SECONDS, Call, Endpoint, Result
from strategies.parameter_server import requests
from strategies.parameter_server.registry import KeyValueStore
from strategies.parameter_server.roles import Roles
from strategies.parameter_server.shards import Shards, arrays_of_shards

_NOTHING: Result = (None, ())


class Clock:
    """The workers' steps in stale synchronous parallel training (Ho et al., NIPS 2013)."""

    def __init__(self, workers: Iterable[int]) -> None:
        self._steps = dict.fromkeys(workers, 0)

    def tick(self, worker: int) -> None:
        """Count a step of a worker."""
        if worker in self._steps:
            self._steps[worker] += 1

    def leave(self, worker: int) -> None:
        """Remove a worker: no other one waits for it."""
        self._steps.pop(worker, None)

    def ahead(self, worker: int) -> int:
        """How many steps a worker is ahead of the slowest one."""
        return self._steps[worker] - min(self._steps.values()) if worker in self._steps else 0

    def slowest(self) -> list[int]:
        """The workers with the fewest steps."""
        least = min(self._steps.values(), default=0)
        return [worker for worker, steps in self._steps.items() if steps == least]


class Server:
    """One parameter server. An error of a request is sent to its worker; the server continues."""

    def __init__(self, mailbox: Mailbox, roles: Roles, staleness: int | None) -> None:
        self._mailbox, self._roles, self._staleness = mailbox, roles, staleness
        self._endpoint = Endpoint(mailbox, self._handle, roles.name)
        self._index = {rank: place for place, rank in enumerate(roles.workers)}
        self._present = set(roles.workers)
        self._shards = Shards(len(roles.workers))
        self._clock = Clock(roles.workers)
        self._announced = KeyValueStore(set(roles.workers) - {roles.chief})
        self._finding: list[Call] = []
        self._ticking: list[Call] = []
        # Those that return None are answered later, or never.
        self._handlers: dict[type, Callable[[Call], Result | None]] = {
            requests.Create: self._create,
            requests.Announce: self._announce,
            requests.Find: self._find,
            requests.Serve: lambda call: self._announced.leave(call.source),
            requests.Read: self._read,
            requests.Change: self._change,
            requests.Update: self._update,
            requests.ReadSlots: self._read_slots,
            requests.WriteSlots: self._write_slots,
            requests.Fence: lambda call: _NOTHING,
            requests.Tick: self._tick,
            requests.Slowest: lambda call: (self._clock.slowest(), ()),
            requests.Leave: lambda call: self._drop(call.source),
        }

    def serve(self) -> None:
        """Return when every worker has left or died, and all answers are on their way."""
        while self._present:
            try:
                self._endpoint.step(POLL_SECONDS)
            except RankFailedError:
                break  # Every other rank has ended.
            for worker in self._endpoint.departed(self._present):
                self._drop(worker)
        # Release the memory: no request follows.
        self._shards = Shards(0)

    def _drop(self, worker: int) -> None:
        """Continue without a worker that has left or died."""
        self._present.discard(worker)
        self._clock.leave(worker)
        self._announced.leave(worker)
        self._finding = [call for call in self._finding if call.source != worker]
        self._ticking = [call for call in self._ticking if call.source != worker]
        self._answer_ticks()
        if worker == self._roles.chief:
            self._answer_finds()

    def _handle(self, call: Call) -> None:
        try:
            result = self._handlers[type(call.body)](call)
        except Exception as error:
            self._fail(call, error, getattr(call.body, "shard", None))
            return
        if call.number is not None and result is not None:
            self._endpoint.answer(call, *result)

    def _fail(self, call: Call, error: Exception, shard: int | None = None) -> None:
        """Send an error to the worker: as the answer, or as a notification for a push."""
        place = self._roles.name(self._mailbox.rank)
        if shard is not None and shard in self._shards:
            place = f"{self._shards[shard].what} on {place}"
        failure = describe(error, place)
        if call.number is not None:
            self._endpoint.fail(call, failure)
        else:
            with suppress(RankFailedError):
                self._endpoint.notify(call.source, requests.PushFailed(failure, shard))

    def _create(self, call: Call) -> Result:
        shard, what = call.body
        return self._shards.create(shard, what, call.arrays[0]), ()

    def _announce(self, call: Call) -> None:
        self._announced.put(*call.body)
        self._answer_finds()

    def _answer_finds(self) -> None:
        waiting, self._finding = self._finding, []
        for call in waiting:
            self._handle(call)

    def _find(self, call: Call) -> Result | None:
        key = call.body.key
        value = self._announced.get(call.source, key)
        if value is not None:
            return value, ()
        if self._roles.chief not in self._present:
            chief = self._roles.name(self._roles.chief)
            text = f"{chief}, the chief, has left before it announced {key[0]} {key[1]}"
            raise RankFailedError(text)
        self._finding.append(call)
        return None

    def _read(self, call: Call) -> Result:
        value = self._shards[call.body.shard].value
        # What is sent must not change before it has gone.
        return None, [value[call.arrays[0]] if call.arrays else value.copy()]

    def _change(self, call: Call) -> None:
        shard, function = call.body
        self._shards[shard].change(self._index[call.source], function, call.arrays)

    def _update(self, call: Call) -> None:
        """A rule that fails on one shard is applied to the others all the same."""
        request: requests.Update = call.body
        worker = self._index[call.source]
        parts = arrays_of_shards(call.arrays, request.sparse)
        for number, part in zip(request.shards, parts, strict=True):
            try:
                self._shards[number].update(worker, request.optimizer, request.rule, part)
            except Exception as error:
                self._fail(call, error, number)

    def _read_slots(self, call: Call) -> Result:
        shard, optimizer = call.body
        state = self._shards[shard].state_of(optimizer)
        copies = [slot.copy() for slot in state.slots.values()]
        return (tuple(state.slots), state.iteration), copies

    def _write_slots(self, call: Call) -> None:
        shard, optimizer, names, iteration, keep = call.body
        slots = dict(zip(names, call.arrays, strict=True))
        worker = self._index[call.source]
        self._shards[shard].set_state(worker, optimizer, slots, iteration, keep=keep)

    def _tick(self, call: Call) -> None:
        self._clock.tick(call.source)
        self._ticking.append(call)
        self._answer_ticks()

    def _answer_ticks(self) -> None:
        """Answer the workers that are not too far ahead of the slowest one."""
        waiting, self._ticking = self._ticking, []
        for call in waiting:
            if self._staleness is None or self._clock.ahead(call.source) <= self._staleness:
                self._endpoint.answer(call)
            else:
                self._ticking.append(call)
