"""Worker-side access to the parameter servers: variables, steps, announcements, the end.

What the chief announces, such as its variables, the other workers find by number. Neither side is
a collective: a worker that makes its third variable waits until the chief has made its third.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from collectives import Communicator, DtypeMismatchError, MismatchError, ShapeMismatchError
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.remote_error import describe, rebuild
from collectives.shm.seqlock import MappedArrays
from strategies.core.indexed_slices import Gradient
from strategies.core.storage import Storage
from strategies.core.values import Array
from strategies.parameter_server.client import Client
from strategies.parameter_server.placement import PartitionFunction, RoundRobin, count_of_parts
from strategies.parameter_server.requests import Request, Roles, ShardInfo, VariableInfo
from strategies.parameter_server.rpc_client import RpcClient
from strategies.parameter_server.storage import ServedStorage, stored

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

Made = TypeVar("Made")

_HOME = 0
"""The server that keeps announcements."""


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
        self._roles, self._partitioner = roles, partitioner
        self._is_chief, self._name = world.rank == roles.chief, roles.name(world.rank)
        self._placement = RoundRobin(len(roles.servers))
        self._rpc = RpcClient(mailbox, roles)
        memory = MappedArrays(roles.workers.index(world.rank), len(roles.workers))
        near = {number for number, rank in enumerate(roles.servers) if nodes[rank] == world.node}
        self.client = Client(self._rpc, memory, near.__contains__, is_chief=self._is_chief)
        self.settle: Callable[[], None] = lambda: None
        """Replaces the parameters of torch models, if there are any, by the servers' values."""
        self.restored: Callable[[Iterable[Any]], None] = lambda parameters: None
        """Puts the chief's values of these parameters onto the servers; the others take them."""
        self._shards = count()
        self._announcements: Counter[str] = Counter()
        self._acting: int | None = None
        """The chief's thread that is within `chief_first`."""
        self._listens = True

    # Variables

    def store(self, value: Array, what: str) -> ServedStorage:
        """As the chief: a new variable's storage; as another worker: that of the chief's one.

        `what` has its name and what else must be equal on all workers. There it raises
        ShapeMismatchError, DtypeMismatchError or MismatchError where the chief's is another,
        DeadlineExceededError where it isn't made in time, RankFailedError where the chief has left.
        """
        if self._is_chief:
            info = self._announced("variable", lambda: self.create(value, what))
        else:
            info = self._find_announced("variable", what)
        return self.storage_of(info, value, what)

    def create(self, value: Array, what: str) -> VariableInfo:
        """As the chief: put a variable onto the servers."""
        number = 1
        if not self._placement.colocating:
            number = count_of_parts(self._partitioner, value.shape, value.dtype)
        # TensorFlow's "div" split, too, makes the first parts one row longer.
        parts = [value] if number == 1 else np.array_split(value, number)
        places = [(next(self._shards), self._placement.next()) for _ in parts]
        names = _names_of_parts(what, parts)
        with self._rpc.lock:
            self._rpc.poll()
            pending = [
                self._rpc.request(server, Request("create", shard, (name,)), [part])
                for (shard, server), part, name in zip(places, parts, names, strict=True)
            ]
            made = self._rpc.endpoint.results(pending, f"creating {what}")
            shards = tuple(
                ShardInfo(shard, server, part.shape, part.dtype, address)
                for (shard, server), part, (address, _) in zip(places, parts, made, strict=True)
            )
        return VariableInfo(what, value.shape, value.dtype, shards, number > 1)

    def storage_of(self, info: VariableInfo, value: Array, what: str) -> ServedStorage:
        """The storage of a variable that the chief has created. Raises as `store`."""
        chiefs, own = (f"{each.dtype} of shape {each.shape}" for each in (info, value))
        text = f"{what}: the chief's is {info.what}, {chiefs}; this worker's is {own}"
        if info.shape != value.shape:
            raise ShapeMismatchError(text)
        if info.dtype != value.dtype:
            raise DtypeMismatchError(text)
        if info.what != what:
            raise MismatchError(
                f"{text}: all workers must make the same models and variables in the same order"
            )
        return stored(self.client, info)

    def colocate_with(self, storage: Storage) -> AbstractContextManager[None]:
        """Within it variables are put where this one is."""
        if not isinstance(storage, ServedStorage):
            raise ValueError("the variable isn't on a parameter server: nothing can be put there")
        return self._placement.colocate_with(storage.info.shards[0].server)

    # Steps

    def push_gradients(
        self, optimizer: Optimizer, pairs: Sequence[tuple[Gradient, ServedStorage]]
    ) -> None:
        """Push all parts of a step's gradients, without waiting."""
        rule = optimizer.rule
        for _, value in pairs:
            optimizer.slots_of(value, rule.slots)
        parts = [part for gradient, value in pairs for part in value.gradients_of(gradient)]
        number = self.client.number_of(optimizer)
        self.client.update(number, optimizer.iterations, rule, parts)

    # Announcements

    def chief_first(self, action: Callable[[], Any], what: str = "") -> Any:
        """The outcome of the chief's action, on all workers; MismatchError where `what` differs.

        What the action calls in turn is a part of it.
        """
        thread = threading.get_ident()
        if self._acting == thread:
            return action()
        if not self._is_chief:
            found = self._find_announced("action", what or "an action of the chief's")
            chiefs, outcome = found
            if what and chiefs and what != chiefs:
                raise MismatchError(
                    f"{self._name} calls {what}, but the chief calls {chiefs}: all workers must"
                    " make the same calls in the same order"
                )
            return outcome

        def act() -> tuple[str, Any]:
            self._acting = thread
            try:
                outcome = action()
            finally:
                self._acting = None
            # The other workers must read what it pushed.
            self.client.fence()
            return what, outcome

        return self._announced("action", act)[1]

    def _announced(self, kind: str, make: Callable[[], Made]) -> Made:
        """As the chief: what the function makes, or its error, for the other workers' call, too.

        Of that number, among those of the kind.
        """
        try:
            made = make()
            announcement = pickle.dumps((made, None))
        except Exception as error:
            self._announce(kind, pickle.dumps((None, describe(error, self._name))))
            raise
        self._announce(kind, announcement)
        return made

    def _announce(self, kind: str, announcement: bytes) -> None:
        key = kind, self._announcements[kind]
        with self._rpc.lock:
            self._rpc.push(_HOME, Request("announce", None, (key, announcement)))
        self._announcements[kind] += 1

    def _find_announced(self, kind: str, what: str) -> Any:
        """As another worker: what the chief announced at its call of that number, or its error."""
        if not self._listens:
            raise RuntimeError(
                f"{what}: this worker serves the chief, which alone makes variables: before it"
                " schedules the function, build models (and Keras's optimizers: optimizer.build)"
            )
        key = kind, self._announcements[kind]
        with self._rpc.lock:
            pending = [self._rpc.request(_HOME, Request("find", None, (key,)))]
            chief = {self._roles.chief: ", the chief"}
            [(found, _)] = self._rpc.endpoint.results(pending, what, lambda: chief)
            self._rpc.push(_HOME, Request("found", None, (key,)))
        # A call that wasn't made in time is made again.
        self._announcements[kind] += 1
        made, failure = pickle.loads(found)
        if failure is not None:
            raise rebuild(failure)
        return made

    def stop_listening(self) -> None:
        """Make no variables and find no announcements any more: the chief schedules."""
        self._listens, self.client.only_adopts = False, True
        with self._rpc.lock:
            self._rpc.push(_HOME, Request("stop_finding"))

    # The end

    @property
    def has_left(self) -> bool:
        """Whether this worker has left the servers."""
        return self._rpc.has_left

    def apart(self) -> AbstractContextManager[None]:
        """Within it no exchange with the servers is allowed: RuntimeError."""
        return self._rpc.refusing(
            "while a worker evaluates, variables on the parameter servers can't be read or changed:"
            " must be made by model_fn, in which they are the worker's own"
        )

    def shutdown(self) -> None:
        """Wait until all that was pushed is applied, and leave."""
        if not self.has_left:
            try:
                self.client.fence()
            finally:
                self.leave()

    def leave(self) -> None:
        """Leave without waiting for anything to be applied."""
        self._rpc.leave()


def _names_of_parts(what: str, parts: Sequence[Array]) -> list[str]:
    if len(parts) == 1:
        return [what]
    ends = accumulate(map(len, parts))
    return [
        f"{what}, rows {end - len(part)} to {end - 1}"
        for part, end in zip(parts, ends, strict=True)
    ]
