"""Worker-side access to the parameter servers: variables, steps, announcements, the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from collectives import Communicator
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.remote_error import describe, rebuild
from collectives.shm.seqlock import MappedArrays
from strategies.core.indexed_slices import Gradient
from strategies.core.storage import Storage
from strategies.parameter_server.client import Client
from strategies.parameter_server.placement import PartitionFunction, RoundRobin, lengths_of_parts
from strategies.parameter_server.registry import Registry
from strategies.parameter_server.roles import Roles
from strategies.parameter_server.rpc_client import RpcClient
from strategies.parameter_server.storage import ServedStorage, SplitStorage, WholeStorage

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

Array = NDArray[Any]


class Worker:
    """One worker's variables on the servers, and its steps."""

    def __init__(
        self,
        mailbox: Mailbox,
        roles: Roles,
        world: Communicator,
        nodes: Sequence[int],
        partitioner: PartitionFunction | None,
    ) -> None:
        """`nodes` has the node of each rank."""
        self._is_chief = world.rank == roles.chief
        self._partitioner = partitioner
        self._placement = RoundRobin(len(roles.servers))
        self._name = roles.name(world.rank)
        self._rpc = RpcClient(mailbox, roles)
        memory = MappedArrays(roles.workers.index(world.rank), len(roles.workers))
        near = {number for number, rank in enumerate(roles.servers) if nodes[rank] == world.node}
        self.client = Client(self._rpc, memory, near.__contains__, is_chief=self._is_chief)
        self._registry = Registry(self._rpc, roles, self._placement)

    def store(self, value: Array, what: str) -> ServedStorage:
        """As the chief: a new variable's storage; as another worker: that of the chief's one."""
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
        """Push all parts of a step's gradients, without waiting."""
        rule = optimizer.rule
        for _, value in pairs:
            optimizer.slots_of(value, rule.slots)
        parts = [part for gradient, value in pairs for part in value.gradients_of(gradient)]
        self.client.update(self.client.number_of(optimizer), rule, parts)

    def chief_first(self, action: Callable[[], Any]) -> Any:
        """The outcome of the chief's action, on every worker."""
        if not self._is_chief:
            outcome, failure = self._registry.find_announced("action", "an action of the chief's")
            if failure is not None:
                raise rebuild(failure)
            return outcome
        try:
            outcome = action()
            # The other workers must read what it pushed.
            self.client.fence()
        except Exception as error:
            self._registry.announce("action", (None, describe(error, self._name)))
            raise
        self._registry.announce("action", (outcome, None))
        return outcome

    def apart(self) -> AbstractContextManager[None]:
        """Within it no exchange with the servers is allowed: RuntimeError."""
        return self._rpc.refusing(
            "while a worker evaluates, variables on the parameter servers can't be read or changed:"
            " must be made by model_fn, in which they are the worker's own"
        )

    def begin_serving(self) -> None:
        """Make no variables and find no announcements any more: the chief schedules."""
        self._registry.stop_listening()

    def shutdown(self) -> None:
        """Wait until all that was pushed is applied, and leave."""
        if not self._rpc.has_left:
            try:
                self.client.fence()
            finally:
                self.leave()

    def leave(self) -> None:
        """Leave without waiting for anything to be applied."""
        self._rpc.leave()
