"""A training rank's part in what `dealing` describes: it asks, and takes batches."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

from collectives import Communicator, DeadlineExceededError, Mailbox, Message, RankFailedError
from strategies.data_service.server import Ask, End, Failure, Leave
from strategies.input import DatasetError, messages

_LOOK_SECONDS = 0.5


class DatasetClient:
    """What the dataset ranks deal to this one."""

    def __init__(
        self, box: Mailbox, servers: Sequence[int], credits: int, ranks: Communicator
    ) -> None:
        """`credits` is how many batches it may hold of each dataset rank."""
        self._box, self._servers, self._credits, self._ranks = box, servers, credits, ranks
        self._epoch = -1
        self._later: list[Message] = []
        self._failure: str | None = None

    def next_epoch(self) -> Generator[Any, None, None]:
        """The batches of the next epoch; those of an earlier one end."""
        self._epoch += 1
        return self._batches(self._epoch)

    def _batches(self, epoch: int) -> Generator[Any, None, None]:
        dealing = set(self._servers)
        try:
            for server in self._servers:
                self._tell(server, Ask(epoch, self._credits))
            while dealing:
                message = self._next(epoch, dealing)
                said = message.header
                if isinstance(said, End):
                    dealing.discard(message.source)
                else:
                    self._tell(message.source, Ask(epoch, 1, said.number))
                    yield messages.unpack(said.batch, message.arrays)
                    self._check_current(epoch)
        finally:
            for server in dealing:
                self._leave(server, epoch)

    def _check_current(self, epoch: int) -> None:
        if epoch != self._epoch:
            raise RuntimeError("another iteration of the dataset has begun: this one has ended")

    def _tell(self, server: int, what: Any) -> None:
        """What a data task said before it ended is heard first."""
        try:
            self._box.send(server, what)
        except RankFailedError:
            if self._box.present(server):
                raise

    def _leave(self, server: int, epoch: int) -> None:
        if not self._box.closed:
            self._tell(server, Leave(epoch))

    def _next(self, epoch: int, dealing: set[int]) -> Message:
        """The next batch or end of this epoch; what belongs to a later one is kept for it."""
        start = time.monotonic()
        while self._failure is None:
            message = self._kept(epoch) or self._box.receive(_LOOK_SECONDS)
            if message is None:
                self._check_waiting(dealing, time.monotonic() - start)
            elif message.header.epoch > epoch:
                self._later.append(message)
            elif isinstance(message.header, Failure):
                self._failure = message.header.reason
            elif message.header.epoch == epoch:
                return message
        raise DatasetError(self._failure)

    def _kept(self, epoch: int) -> Message | None:
        for place, message in enumerate(self._later):
            if message.header.epoch <= epoch:
                return self._later.pop(place)
        return None

    def _check_waiting(self, dealing: set[int], waited: float) -> None:
        gone = [server for server in sorted(dealing) if not self._box.present(server)]
        if gone:
            names = ", ".join(f"rank {server}" for server in gone)
            raise RankFailedError(f"the dataset of {names} has no end: its data task has ended")
        deadline = self._ranks.deadline
        if deadline is not None and waited > deadline:
            names = ", ".join(f"rank {server}" for server in sorted(dealing))
            text = f"waited the deadline of {deadline:g} s for a batch of {names}"
            raise DeadlineExceededError(text, tuple(sorted(dealing)))
