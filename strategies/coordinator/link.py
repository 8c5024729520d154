"""The connection between a chief and its workers, and the messages that they exchange."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, Protocol

from collectives.errors import RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.rpc import Endpoint
from strategies.coordinator.references import MakeReferences


class Run(NamedTuple):
    """Request to a worker: call what is packed. The answer is `uses`, see `references`."""


class NewDataset(NamedTuple):
    """Notification to a worker: what is packed makes a dataset when that is first needed."""

    number: int


class Restored(NamedTuple):
    """Notification to a worker: the packed slots are an optimizer's first ones."""

    number: int


class End(NamedTuple):
    """Notification to a worker: the chief schedules nothing more."""


class Ending(Protocol):
    """What the chief ends before its workers."""

    def end(self) -> None:
        """End it; a second call does nothing."""


class Link:
    """One rank's end of the connection. Ranks are those of the whole world.

    On the chief it ends the workers' service when the program ends.
    """

    def __init__(
        self,
        box: Mailbox,
        chief: int,
        workers: Mapping[int, str],
        servers: Mapping[int, str],
        make_references: MakeReferences = MakeReferences(),  # noqa: B008 -- a constant
    ) -> None:
        """`workers` and `servers` map ranks to names."""
        self.box, self.chief, self.workers, self.servers = box, chief, workers, servers
        self.make_references = make_references
        self.coordinator: Ending | None = None
        self._ended = False
        if self.is_chief:
            atexit.register(self.end)

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that schedules."""
        return self.box.rank == self.chief

    def end(self) -> None:
        """End the workers' service, on the chief. A second call does nothing."""
        atexit.unregister(self.end)
        if self.coordinator is not None:
            self.coordinator.end()
        elif not self._ended:
            endpoint = Endpoint(self.box, lambda call: None)
            for worker in self.workers:
                with suppress(RankFailedError):
                    endpoint.notify(worker, End())
        self._ended = True
