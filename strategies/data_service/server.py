"""What passes between a dataset rank and the training ranks, and the dataset rank's part in it.

A training rank asks: it gives the dataset rank so many credits for an epoch, and one more with
every batch that it takes out of what it got. A credit is worth one batch. So a rank that is slow
asks seldom, and no rank holds more batches than its credits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collectives import Mailbox, RankFailedError, SendRequest
from strategies.input import messages
from strategies.input.failures import as_told
from strategies.input.sources import iterate

_LOOK_SECONDS = 0.1
# Batches made before anybody asks for them, so that a dataset that takes time is not waited for.
_AHEAD = 1


class Ask(NamedTuple):
    """From a training rank: credits for an epoch, and the batch that it has taken, if any."""

    epoch: int
    credits: int
    taken: int | None = None


class Leave(NamedTuple):
    """From a training rank: it takes no more of an epoch, not even what it was dealt."""

    epoch: int


class Deal(NamedTuple):
    """From a dataset rank: a batch, by its number in the epoch."""

    epoch: int
    number: int
    batch: Any


class End(NamedTuple):
    """From a dataset rank: an epoch has no more batches."""

    epoch: int


class Failure(NamedTuple):
    """From a dataset rank: from this epoch on nothing comes, for this reason."""

    epoch: int
    reason: str


@dataclass
class _Training:
    """What the dataset rank knows of a training rank."""

    epoch: int = 0
    """The one that it takes batches of, or would."""
    held: dict[int, Any] = field(default_factory=dict)
    """The batches that it was dealt and has not taken, by number."""
    left: bool = False
    """Whether it has taken leave, as it does where it is told an error."""


class DatasetServer:
    """Deals a dataset to the training ranks in the order in which their credits come."""

    def __init__(
        self, box: Mailbox, training: Sequence[int], make: Callable[[], Iterable[Any]]
    ) -> None:
        self._box, self._make = box, make
        self._training = {rank: _Training() for rank in training}
        self._asks: deque[tuple[int, int]] = deque()
        self._epoch = self._number = 0
        self._source: Iterator[tuple[int, Any]] | None = None
        self._ready: deque[tuple[int, Any]] = deque()
        self._sent: list[tuple[int, int, SendRequest]] = []

    def deal(self, epochs: int | None, deadline: float | None) -> int:
        """Deal so many epochs, or until no training rank is left; how many were dealt.

        What the dataset raises is told to all training ranks before it is raised here.
        """
        try:
            while self._training and self._epoch != epochs:
                self._turn()
        except Exception as error:
            self._tell_failure(as_told(self._box.rank, error), deadline)
            raise
        if self._training:
            text = f"the dataset rank {self._box.rank} has dealt its {epochs} epochs"
            self._tell_all(Failure(self._epoch, f"{text}: there are no more"))
        while self._on_way():
            self._hear(_LOOK_SECONDS)
        return self._epoch

    def _on_way(self) -> list[SendRequest]:
        """The batches that are still wanted where they go, and have yet to come there."""
        self._sent = [
            (rank, epoch, sent)
            for rank, epoch, sent in self._sent
            if rank in self._training and self._training[rank].epoch == epoch and not sent.done()
        ]
        return [sent for _, _, sent in self._sent]

    def _turn(self) -> None:
        """Hear who asks, then deal one batch, or make one, or wait."""
        idle = not self._wanted() and not self._may_make()
        self._hear(_LOOK_SECONDS if idle else 0)
        if not self._training:
            return
        if all(each.epoch > self._epoch for each in self._training.values()):
            self._next_epoch()
        elif self._wanted():
            self._deal_next()
        elif self._may_make():
            self._make_next()

    def _hear(self, timeout: float) -> None:
        message = self._box.receive(timeout)
        if message is None:
            self._forget_gone()
        while message is not None:
            if message.source in self._training:
                self._note(message.source, message.header)
            message = self._box.receive(0)

    def _forget_gone(self) -> None:
        """What a rank was dealt before it ended is lost."""
        for rank in [rank for rank in self._training if not self._box.present(rank)]:
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        del self._training[rank]
        self._asks = deque(ask for ask in self._asks if ask[0] != rank)

    def _note(self, rank: int, said: Any) -> None:
        training = self._training[rank]
        if isinstance(said, Ask):
            self._enter(training, said.epoch)
            if said.taken is not None:
                training.held.pop(said.taken, None)
            self._asks.extend([(rank, said.epoch)] * said.credits)
        elif isinstance(said, Leave):
            self._enter(training, said.epoch + 1)
            training.left = True

    def _enter(self, training: _Training, epoch: int) -> None:
        """Give what it was dealt of an earlier epoch, and did not take, to the others."""
        if epoch > training.epoch:
            if training.epoch == self._epoch:
                self._ready.extendleft(reversed(training.held.items()))
            training.epoch = epoch
            training.held.clear()

    def _wanted(self) -> bool:
        """Whether somebody asks for a batch of this epoch; credits for earlier ones are void."""
        self._asks = deque(ask for ask in self._asks if self._valid(*ask))
        return any(epoch == self._epoch for _, epoch in self._asks)

    def _valid(self, rank: int, epoch: int) -> bool:
        return epoch >= max(self._epoch, self._training[rank].epoch)

    def _may_make(self) -> bool:
        return self._source is not None and len(self._ready) < _AHEAD

    def _deal_next(self) -> None:
        if self._source is None:
            self._source = enumerate(iterate(self._make()))
        if not self._ready and not self._make_next():
            return
        place = next(at for at, (_, epoch) in enumerate(self._asks) if epoch == self._epoch)
        rank = self._asks[place][0]
        del self._asks[place]
        number, (header, arrays) = self._ready[0]
        sent = self._send(rank, Deal(self._epoch, number, header), arrays)
        if sent is not None:
            self._ready.popleft()
            self._training[rank].held[number] = (header, arrays)
            self._on_way()
            self._sent.append((rank, self._epoch, sent))

    def _make_next(self) -> bool:
        """Whether the dataset had one more batch; where it had none, the epoch ends."""
        assert self._source is not None
        for number, batch in self._source:
            self._ready.append((number, messages.pack(batch)))
            return True
        if not self._ready:
            self._tell_all(End(self._epoch))
            self._next_epoch()
        return False

    def _next_epoch(self) -> None:
        self._epoch += 1
        self._source = None
        self._ready.clear()
        for training in self._training.values():
            training.held.clear()

    def _tell_all(self, what: End | Failure) -> None:
        for rank in list(self._training):
            self._send(rank, what)

    def _send(self, rank: int, what: Any, arrays: Sequence[Any] = ()) -> SendRequest | None:
        """None where the rank has ended, so that nothing was sent."""
        try:
            return self._box.send(rank, what, arrays)
        except RankFailedError:
            self._forget(rank)
            return None

    def _tell_failure(self, reason: str, deadline: float | None) -> None:
        """Wait until all have seen it: where nobody catches it, this rank's end is everybody's."""
        for training in self._training.values():
            training.left = False
        self._tell_all(Failure(self._epoch, reason))
        start = time.monotonic()
        while any(not each.left for each in self._training.values()):
            self._hear(_LOOK_SECONDS)
            if deadline is not None and time.monotonic() - start > deadline:
                return
