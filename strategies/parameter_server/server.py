"""A parameter server: it answers workers until all of them have left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from collectives import MismatchError, RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.remote_error import describe
from collectives.messaging.rpc import POLL_SECONDS, Call, Endpoint, Result
from collectives.shm.seqlock import SharedArrays
from strategies.parameter_server.announcements import Key, KeyValueStore
from strategies.parameter_server.requests import PushFailed, Request, Roles
from strategies.parameter_server.shards import Shard


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
    """One parameter server. An error of a request is sent to its worker; the server continues.

    Requests name the methods below that take a `Call`, with further arguments. They return the
    answer's value and arrays, or None where they answer later, or never.
    """

    def __init__(self, mailbox: Mailbox, roles: Roles, staleness: int | None) -> None:
        self._mailbox, self._roles, self._staleness = mailbox, roles, staleness
        self._endpoint = Endpoint(mailbox, self._handle, roles.name)
        self._index = {rank: place for place, rank in enumerate(roles.workers)}
        self._present = set(roles.workers)
        self._memory = SharedArrays(len(roles.workers))
        self._shards: dict[int, Shard] = {}
        self._optimizers: dict[int, tuple[str, str]] = {}
        """For each number, the first worker that has used it, and its optimizer's settings."""
        self._steps: Counter[int] = Counter()
        """How many an optimizer has taken, of all workers, be it with shards of other servers."""
        self._clock = Clock(roles.workers)
        self._announced = KeyValueStore(set(roles.workers) - {roles.chief})
        self._finding: list[Call] = []
        self._ticking: list[Call] = []

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
        self._shards, self._memory = {}, SharedArrays(0)

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
        request: Request = call.body
        try:
            result = getattr(self, request.method)(call, *request.arguments)
        except Exception as error:
            self._fail(call, error, request.shard)
            return
        if call.number is not None and result is not None:
            self._endpoint.answer(call, *result)

    def _fail(self, call: Call, error: Exception, shard: int | None) -> None:
        """Send an error to the worker: as the answer, or as a notification for a push."""
        place = self._roles.name(self._mailbox.rank)
        if shard in self._shards:
            place = f"{self._shards[shard].what} on {place}"
        failure = describe(error, place)
        if call.number is not None:
            self._endpoint.fail(call, failure)
        else:
            with suppress(RankFailedError):
                self._endpoint.notify(call.source, PushFailed(failure, shard))

    # Shards

    def _shard_of(self, call: Call) -> Shard:
        return self._shard(call.body.shard)

    def _shard(self, number: int) -> Shard:
        if number not in self._shards:
            raise RuntimeError(
                f"shard {number} doesn't exist here: must be one of {sorted(self._shards)}"
            )
        return self._shards[number]

    def create(self, call: Call, what: str) -> Result:
        """Make a shard of the array that is sent along; the answer is its address, or None."""
        number = call.body.shard
        if number in self._shards:
            raise RuntimeError(f"shard {number} exists already: only the chief creates variables")
        shard = self._shards[number] = Shard(self._memory.put(call.arrays[0]), what)
        return shard.address, ()

    def read(self, call: Call) -> Result:
        """The shard's value; with an array of row numbers, these rows."""
        value = self._shard_of(call).value
        # What is sent must not change before it has gone.
        return None, [value[call.arrays[0]] if call.arrays else value.copy()]

    def change(self, call: Call, function: bytes) -> None:
        """Change the shard by a pickled function of its value and the arrays. A push."""
        self._shard_of(call).change(self._index[call.source], function, call.arrays)

    def update(
        self,
        call: Call,
        optimizer: int,
        steps: int,
        rule: bytes,
        shards: tuple[int, ...],
        sparse: tuple[bool, ...],
    ) -> None:
        """Take an optimizer's step: apply its rule, given as a pickle, to these shards. A push.

        For each shard the gradient is sent along, or row numbers and their gradients if sparse. A
        rule that fails on one shard is applied to the others all the same. A step that fails on all
        of them isn't counted here, but by its worker, which has taken `steps` before, some of them
        before a restart.
        """
        arrays, worker, failed = iter(call.arrays), self._index[call.source], 0
        iteration = max(self._steps[optimizer], steps) + 1
        for number, is_sparse in zip(shards, sparse, strict=True):
            gradient = list(islice(arrays, 1 + is_sparse))
            try:
                self._shard(number).update(worker, optimizer, rule, iteration, gradient)
            except Exception as error:
                failed += 1
                self._fail(call, error, number)
        if not shards or failed < len(shards):
            self._steps[optimizer] = iteration

    def read_slots(self, call: Call, optimizer: int) -> Result:
        """The names of an optimizer's slots of a shard, its count of steps, and the arrays."""
        slots = self._shard_of(call).slots_of(optimizer)
        copies = [slot.copy() for slot in slots.values()]
        return (tuple(slots), self._steps[optimizer]), copies

    def write_slots(
        self, call: Call, optimizer: int, names: tuple[str, ...], iteration: int, keep: bool
    ) -> None:
        """Set an optimizer's slots of a shard, and its count of steps. A push.

        If `keep`, slots that are there stay, and so does a higher count.
        """
        slots = dict(zip(names, call.arrays, strict=True))
        self._shard_of(call).set_slots(self._index[call.source], optimizer, slots, keep=keep)
        self._steps[optimizer] = max(iteration, self._steps[optimizer]) if keep else iteration

    def compare_optimizer(self, call: Call, number: int, settings: str) -> Result:
        """Note an optimizer's number; MismatchError where another worker's has other settings."""
        worker = self._roles.name(call.source)
        first, known = self._optimizers.setdefault(number, (worker, settings))
        if settings != known:
            raise MismatchError(
                f"optimizer {number} is {settings} on {worker}, {known} on {first}: all workers"
                " must have equal optimizers, and use them for the first time in the same order"
            )
        return None, ()

    # Announcements

    def announce(self, call: Call, key: Key, value: bytes) -> None:
        """Publish a value, which is a pickle, under the key. A push."""
        self._announced.put(key, value)
        self._answer_finds()

    def find(self, call: Call, key: Key) -> Result | None:
        """The value under the key, once it is announced."""
        value = self._announced.get(key)
        if value is not None:
            return value, ()
        if self._roles.chief not in self._present:
            chief = self._roles.name(self._roles.chief)
            text = f"{chief}, the chief, has left before it announced {key[0]} {key[1]}"
            raise RankFailedError(text)
        self._finding.append(call)
        return None

    def _answer_finds(self) -> None:
        waiting, self._finding = self._finding, []
        for call in waiting:
            self._handle(call)

    def found(self, call: Call, key: Key) -> None:
        """The worker has the value under the key. A push."""
        self._announced.found(call.source, key)

    def stop_finding(self, call: Call) -> None:
        """The worker runs what the chief schedules, and finds nothing any more. A push."""
        self._announced.leave(call.source)

    # Steps

    def fence(self, call: Call) -> Result:
        """Answered when all that the worker pushed before has been applied."""
        return None, ()

    def tick(self, call: Call) -> None:
        """A step is done; answered when its worker may begin the next one."""
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

    def slowest(self, call: Call) -> Result:
        """The ranks that have done the fewest steps."""
        return self._clock.slowest(), ()

    def leave(self, call: Call) -> None:
        """The worker takes part no more. A push."""
        self._drop(call.source)
