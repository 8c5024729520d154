"""What a parameter server does: it answers workers until all of them have left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from collectives import RankFailedError
from collectives.messaging.codec import Message
from collectives.messaging.mailbox import Mailbox
from strategies.core.same_error import portable
from strategies.parameter_server import requests
from strategies.parameter_server.clock import Clock
from strategies.parameter_server.key_value_store import KeyValueStore
from strategies.parameter_server.requests import Answer
from strategies.parameter_server.roles import Roles
from strategies.parameter_server.shards import Shards, shared_out

Array = NDArray[Any]
Result = tuple[Any, Sequence[Array]]
"""What a request is answered with: a value, and arrays."""

_LOOK_SECONDS = 0.2
_NOTHING: Result = (None, ())


class _Asked(NamedTuple):
    """A request, and who made it."""

    worker: int
    number: int | None
    request: Any
    arrays: Sequence[Array]


class Server:
    """One parameter server. Errors of what workers ask are sent to them; it goes on itself."""

    def __init__(self, mailbox: Mailbox, cast: Roles, staleness: int | None) -> None:
        self._mailbox, self._cast, self._staleness = mailbox, cast, staleness
        self._index = {rank: place for place, rank in enumerate(cast.workers)}
        self._present = set(cast.workers)
        self._shards = Shards(len(cast.workers))
        self._clock = Clock(cast.workers)
        self._announced = KeyValueStore(set(cast.workers) - {cast.chief})
        self._finding: list[_Asked] = []
        self._ticking: list[_Asked] = []
        # Those that give None are answered later, or never.
        self._handlers: dict[type, Callable[[_Asked], Result | None]] = {
            requests.Create: self._create,
            requests.Announce: self._announce,
            requests.Find: self._find,
            requests.Serve: lambda asked: self._announced.leave(asked.worker),
            requests.Read: self._read,
            requests.Change: self._change,
            requests.Update: self._update,
            requests.ReadSlots: self._read_slots,
            requests.WriteSlots: self._write_slots,
            requests.Fence: lambda asked: _NOTHING,
            requests.Tick: self._tick,
            requests.Slowest: lambda asked: (self._clock.slowest(), ()),
            requests.Leave: self._leave,
        }

    def serve(self) -> None:
        """Return when every worker has left or died, and all answers are on their way."""
        next_look = 0.0
        while self._present:
            try:
                message = self._mailbox.receive(timeout=_LOOK_SECONDS)
            except RankFailedError:
                break  # Nobody is left.
            if message is not None:
                self._handle(message)
            if time.monotonic() >= next_look:
                self._drop_the_absent()
                next_look = time.monotonic() + _LOOK_SECONDS
        # Nobody will ask for them any more.
        self._shards = Shards(0)

    def _drop_the_absent(self) -> None:
        for worker in list(self._present):
            if not self._mailbox.present(worker):
                self._drop(worker)

    def _drop(self, worker: int) -> None:
        """Go on without a worker that has left or died."""
        self._present.discard(worker)
        self._clock.leave(worker)
        self._announced.leave(worker)
        self._finding = [asked for asked in self._finding if asked.worker != worker]
        self._ticking = [asked for asked in self._ticking if asked.worker != worker]
        self._release()
        if worker == self._cast.chief:
            waiting, self._finding = self._finding, []
            for asked in waiting:
                self._find(asked)

    def _handle(self, message: Message) -> None:
        number, request = message.header
        asked = _Asked(message.source, number, request, message.arrays)
        try:
            result = self._handlers[type(asked.request)](asked)
        except Exception as error:
            self._refuse(asked, error)
            return
        if asked.number is not None and result is not None:
            self._answer(asked, *result)

    def _answer(self, asked: _Asked, value: Any = None, arrays: Sequence[Array] = ()) -> None:
        self._send(asked.worker, Answer(asked.number, value), arrays)

    def _refuse(self, asked: _Asked, error: Exception, shard: int | None = None) -> None:
        shard = shard if shard is not None else getattr(asked.request, "shard", None)
        place = self._cast.name(self._mailbox.rank)
        if shard is not None and shard in self._shards:
            place = f"{self._shards[shard].what} on {place}"
        sent, trace = portable(error), f"{place}: {requests.trace_of(error)}"
        self._send(asked.worker, Answer(asked.number, None, sent, trace, shard), ())

    def _send(self, worker: int, answer: Answer, arrays: Sequence[Array]) -> None:
        try:
            self._mailbox.send(worker, answer, arrays)
        except RankFailedError:
            self._drop(worker)

    def _create(self, asked: _Asked) -> Result:
        shard, what = asked.request
        return self._shards.create(shard, what, asked.arrays[0]), ()

    def _announce(self, asked: _Asked) -> None:
        self._announced.put(*asked.request)
        waiting, self._finding = self._finding, []
        for each in waiting:
            self._find(each)

    def _find(self, asked: _Asked) -> None:
        key = asked.request.key
        value = self._announced.get(asked.worker, key)
        if value is not None:
            self._answer(asked, value)
        elif self._cast.chief in self._present:
            self._finding.append(asked)
        else:
            chief = self._cast.name(self._cast.chief)
            text = f"{chief}, the chief, has left before it came to {key[0]} {key[1]}"
            self._refuse(asked, RankFailedError(text))

    def _read(self, asked: _Asked) -> Result:
        value = self._shards[asked.request.shard].value
        # What is sent must not change before it has gone.
        return None, [value[asked.arrays[0]] if asked.arrays else value.copy()]

    def _change(self, asked: _Asked) -> None:
        shard, function = asked.request
        self._shards[shard].change(self._index[asked.worker], function, asked.arrays)

    def _update(self, asked: _Asked) -> None:
        """A rule that fails on one shard is tried on the others all the same."""
        request: requests.Update = asked.request
        worker = self._index[asked.worker]
        parts = shared_out(asked.arrays, request.sparse)
        for number, part in zip(request.shards, parts, strict=True):
            try:
                self._shards[number].update(worker, request.optimizer, request.rule, part)
            except Exception as error:
                self._refuse(asked, error, number)

    def _read_slots(self, asked: _Asked) -> Result:
        shard, optimizer = asked.request
        state = self._shards[shard].state_of(optimizer)
        copies = [slot.copy() for slot in state.slots.values()]
        return (tuple(state.slots), state.iteration), copies

    def _write_slots(self, asked: _Asked) -> None:
        shard, optimizer, names, iteration, keep = asked.request
        slots = dict(zip(names, asked.arrays, strict=True))
        worker = self._index[asked.worker]
        self._shards[shard].set_state(worker, optimizer, slots, iteration, keep=keep)

    def _tick(self, asked: _Asked) -> None:
        self._clock.tick(asked.worker)
        self._ticking.append(asked)
        self._release()

    def _release(self) -> None:
        """Let those go on whom nobody holds up."""
        waiting, self._ticking = self._ticking, []
        for asked in waiting:
            if self._staleness is None or self._clock.ahead(asked.worker) <= self._staleness:
                self._answer(asked)
            else:
                self._ticking.append(asked)

    def _leave(self, asked: _Asked) -> None:
        if asked.number is not None:
            self._answer(asked)
        self._drop(asked.worker)
