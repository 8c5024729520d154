"""The messages of the data service, and the dataset rank's side of it.

A training rank sends a dataset rank so many requests for an epoch as it may hold batches, and one
more with every batch that it takes. Each is answered with one batch. So a slow rank gets fewer
batches, and no rank holds more than it may.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collectives import Mailbox, RankFailedError, SendRequest
from collectives.messaging.rpc import POLL_SECONDS, Call, Endpoint
from strategies.input import batches
from strategies.input.failures import text_for_others
from strategies.input.sources import iterate

# Batches made before they are requested, so that no rank waits for a slow dataset.
_AHEAD = 1


class Next(NamedTuple):
    """Request to a dataset rank: a batch of an epoch.

    The answer is its number in the epoch and its header, or None at the end of the epoch.
    """

    epoch: int
    taken: int | None = None
    """The number of the batch that the training rank has taken, if any."""


class Leave(NamedTuple):
    """Notification to a dataset rank: no more of an epoch, nor what was dealt and not taken."""

    epoch: int


class Closed(NamedTuple):
    """Notification to a training rank: from this epoch on no request is answered."""

    epoch: int
    reason: str


@dataclass
class _TrainingRank:
    """The state of a training rank."""

    epoch: int = 0
    """The one that it takes batches of, or takes next."""
    held: dict[int, Any] = field(default_factory=dict)
    """The batches that it was dealt and has not taken, by number."""
    left: bool = False
    """Whether it has left an epoch, as it does after an error."""


class DatasetServer:
    """Deals a dataset to the training ranks in the order of their requests."""

    def __init__(
        self, box: Mailbox, training: Sequence[int], make: Callable[[], Iterable[Any]]
    ) -> None:
        self._rank, self._make = box.rank, make
        self._endpoint = Endpoint(box, self._handle)
        self._training = {rank: _TrainingRank() for rank in training}
        self._requests: deque[Call] = deque()
        self._epoch = 0
        self._source: Iterator[tuple[int, Any]] | None = None
        self._ready: deque[tuple[int, Any]] = deque()
        self._under_way: list[tuple[int, int, SendRequest]] = []

    def deal(self, epochs: int | None, deadline: float | None) -> int:
        """Deal so many epochs, or until no training rank is left; how many were dealt.

        An error of the dataset is sent to all training ranks before it is raised here.
        """
        try:
            while self._training and self._epoch != epochs:
                self._turn()
        except Exception as error:
            self._send_failure(text_for_others(self._rank, error), deadline)
            raise
        if self._training:
            text = f"the dataset rank {self._rank} has dealt its {epochs} epochs"
            self._close(f"{text}: there are no more")
        while self._forget_arrived():
            self._receive(POLL_SECONDS)
        return self._epoch

    def _forget_arrived(self) -> bool:
        """Whether a batch is on its way to a rank that still wants it."""
        self._under_way = [
            (rank, epoch, sent)
            for rank, epoch, sent in self._under_way
            if rank in self._training and self._training[rank].epoch == epoch and not sent.done()
        ]
        return bool(self._under_way)

    def _turn(self) -> None:
        """Receive, then deal one batch, or make one, or wait."""
        idle = not self._wanted() and not self._may_make()
        self._receive(POLL_SECONDS if idle else 0)
        self._sort_requests()
        if not self._training:
            return
        if all(each.epoch > self._epoch for each in self._training.values()):
            self._next_epoch()
        elif self._wanted():
            self._deal_next()
        elif self._may_make():
            self._make_next()

    def _receive(self, timeout: float) -> None:
        if self._endpoint.step(timeout):
            self._endpoint.drain()
        else:
            for rank in self._endpoint.departed(list(self._training)):
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Continue without a rank that has ended; what it was dealt is lost."""
        del self._training[rank]
        self._requests = deque(call for call in self._requests if call.source != rank)

    def _handle(self, call: Call) -> None:
        training = self._training.get(call.source)
        if training is None:
            return
        body = call.body
        if isinstance(body, Next):
            self._enter(training, body.epoch)
            if body.taken is not None:
                training.held.pop(body.taken, None)
            self._requests.append(call)
        elif isinstance(body, Leave):
            self._enter(training, body.epoch + 1)
            training.left = True

    def _enter(self, training: _TrainingRank, epoch: int) -> None:
        """Give what it was dealt of an earlier epoch, and did not take, to the others."""
        if epoch > training.epoch:
            if training.epoch == self._epoch:
                self._ready.extendleft(reversed(training.held.items()))
            training.epoch = epoch
            training.held.clear()

    def _wanted(self) -> bool:
        """Whether a batch of this epoch is requested."""
        return any(call.body.epoch == self._epoch for call in self._requests)

    def _sort_requests(self) -> None:
        """Answer the requests of earlier epochs, and drop those of epochs that a rank has left."""
        wanted: deque[Call] = deque()
        for call in self._requests:
            if call.body.epoch < self._epoch:
                self._endpoint.answer(call)
            elif call.body.epoch >= self._training[call.source].epoch:
                wanted.append(call)
        self._requests = wanted

    def _may_make(self) -> bool:
        return self._source is not None and len(self._ready) < _AHEAD

    def _deal_next(self) -> None:
        if self._source is None:
            self._source = enumerate(iterate(self._make()))
        if not self._ready and not self._make_next():
            return
        call = next(call for call in self._requests if call.body.epoch == self._epoch)
        self._requests.remove(call)
        number, (header, arrays) = self._ready[0]
        sent = self._endpoint.answer(call, (number, header), arrays)
        if sent is None:
            self._forget(call.source)
            return
        self._ready.popleft()
        self._training[call.source].held[number] = (header, arrays)
        self._forget_arrived()
        self._under_way.append((call.source, self._epoch, sent))

    def _make_next(self) -> bool:
        """Whether the dataset had one more batch; without one, the epoch ends."""
        assert self._source is not None
        for number, batch in self._source:
            header, arrays = batches.pack(batch)
            # Now: the dataset may reuse what the header refers to, such as arrays of objects.
            self._ready.append((number, (pickle.dumps(header), arrays)))
            return True
        if not self._ready:
            self._next_epoch()
        return False

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._source = None
        self._ready.clear()
        for training in self._training.values():
            training.held.clear()
        self._sort_requests()

    def _close(self, reason: str) -> None:
        for rank in list(self._training):
            try:
                self._endpoint.notify(rank, Closed(self._epoch, reason))
            except RankFailedError:
                self._forget(rank)

    def _send_failure(self, reason: str, deadline: float | None) -> None:
        """Wait until all have received it: an uncaught error here would end their job before."""
        for training in self._training.values():
            training.left = False
        self._close(reason)
        start = time.monotonic()
        while any(not each.left for each in self._training.values()):
            self._receive(POLL_SECONDS)
            if deadline is not None and time.monotonic() - start > deadline:
                return
