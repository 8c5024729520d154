"""What a worker has of the parameter servers: all its dealings with them in one hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from collectives import Communicator
from collectives.messaging.mailbox import Mailbox
from strategies.core.indexed_slices import Gradient
from strategies.core.same_error import portable
from strategies.core.storage import Storage
from strategies.parameter_server.client import Client
from strategies.parameter_server.memory import MappedMemory
from strategies.parameter_server.placement import PartitionFunction, RoundRobin, lengths_of_parts
from strategies.parameter_server.registry import Registry
from strategies.parameter_server.roles import Roles
from strategies.parameter_server.rpc_client import RpcClient
from strategies.parameter_server.storage import ServedStorage, SplitStorage, WholeStorage

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

Array = NDArray[Any]


class Worker:
    """One worker's variables and steps, as far as the servers see them."""

    def __init__(
        self,
        mailbox: Mailbox,
        cast: Roles,
        world: Communicator,
        nodes: Sequence[int],
        partitioner: PartitionFunction | None,
    ) -> None:
        """`nodes` has the node of each rank."""
        self._is_chief = world.rank == cast.chief
        self._partitioner = partitioner
        self._placement = RoundRobin(len(cast.servers))
        self._mail = RpcClient(mailbox, cast, world)
        memory = MappedMemory(cast.workers.index(world.rank), len(cast.workers))
        near = {number for number, rank in enumerate(cast.servers) if nodes[rank] == world.node}
        self.client = Client(self._mail, memory, near.__contains__, is_chief=self._is_chief)
        self._registry = Registry(self._mail, cast, self._placement)

    def store(self, value: Array, what: str) -> ServedStorage:
        """A new variable, as the chief; the chief's, as another worker."""
        if self._is_chief:
            lengths = None
            if not self._placement.colocating:
                lengths = lengths_of_parts(self._partitioner, value.shape, value.dtype)
            info = self._registry.create(value, lengths, what)
        else:
            info = self._registry.find(value, what)
        return (SplitStorage if info.split else WholeStorage)(self.client, info)

    def colocate_with(self, storage: Storage) -> AbstractContextManager[None]:
        """Within it variables are put where this one is."""
        if not isinstance(storage, ServedStorage):
            raise ValueError("the variable isn't on a parameter server: nothing can be put there")
        return self._placement.colocate_with(storage.info.shards[0].server)

    def push_gradients(
        self, optimizer: Optimizer, pairs: Sequence[tuple[Gradient, ServedStorage]]
    ) -> None:
        """Post all parts of a step's gradients; nothing is waited for."""
        rule = optimizer.rule
        for _, value in pairs:
            optimizer.slots_of(value, rule.slots)
        parts = [part for gradient, value in pairs for part in value.gradients_of(gradient)]
        self.client.update(self.client.number_of(optimizer), rule, parts)

    def end_step(self) -> None:
        """Let all that was pushed be applied, and wait for those who are too far behind."""
        self.client.end_step()

    def chief_first(self, action: Callable[[], Any]) -> Any:
        """The outcome of the chief's action, for all."""
        if not self._is_chief:
            outcome, error = self._registry.find_announced("action", "an action of the chief's")
            if error is not None:
                raise error
            return outcome
        try:
            outcome = action()
            # The others must see what it did.
            self.client.fence()
        except Exception as error:
            self._registry.announce("action", (None, portable(error)))
            raise
        self._registry.announce("action", (outcome, None))
        return outcome

    def apart(self) -> AbstractContextManager[None]:
        """Within it nothing is asked of the servers, nor read in their memory: RuntimeError."""
        return self._mail.refusing(
            "while a worker evaluates, variables on the parameter servers can't be read or changed:"
            " must be made by model_fn, in which they are the worker's own"
        )

    def begin_serving(self) -> None:
        """Make no variables any more, and hear no more of the chief's than what it schedules."""
        self._registry.stop_listening()

    def shutdown(self) -> None:
        """Let all that was pushed be applied, and leave."""
        if not self._mail.has_left:
            try:
                self.client.fence()
            finally:
                self.leave()

    def leave(self) -> None:
        """Leave without waiting for anything to be applied."""
        self._mail.leave()
