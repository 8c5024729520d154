"""The connection between a chief and its workers, and the messages that they exchange."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from collectives.errors import RankFailedError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.rpc import Endpoint
from strategies.coordinator.packing import References


class Run(NamedTuple):
    """Request to a worker: call what is packed. The answer: `References.uses()`, the result."""


class NewDataset(NamedTuple):
    """Notification to a worker: what is packed makes a dataset when that is first needed."""

    number: int


class Keep(NamedTuple):
    """Notification to a worker: keep what is packed under this name; see `References.keep`."""

    name: Any


class End(NamedTuple):
    """Notification to a worker: the chief schedules nothing more."""


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
        make_references: Callable[..., References] = References,
    ) -> None:
        """`workers` and `servers` map ranks to names."""
        self.box, self.chief, self.workers, self.servers = box, chief, workers, servers
        self.make_references = make_references
        self.coordinator: Any = None
        """The chief's `ClusterCoordinator`, if there is one: it ends the workers' service."""
        self.ended = False
        """Whether the chief has ended the workers' service."""
        if self.is_chief:
            atexit.register(self.end)

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that schedules."""
        return self.box.rank == self.chief

    def end(self) -> None:
        """End the workers' service, on the chief. A second call does nothing."""
        if self.coordinator is not None:
            self.coordinator.end()
        elif not self.ended:
            endpoint = Endpoint(self.box, lambda call: None)
            for worker in self.workers:
                with suppress(RankFailedError):
                    endpoint.notify(worker, End())
        self.ended = True
        atexit.unregister(self.end)
