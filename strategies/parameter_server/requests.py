"""The messages between workers and parameter servers: bodies of requests and of notifications.

A notification to a server is called a push. Messages between two ranks keep their order, so a
request is answered after all that its worker pushed before.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np

from collectives.messaging.remote_error import Failure
from collectives.shm.seqlock import ArrayAddress


class ShardInfo(NamedTuple):
    """What a worker needs to read and change a shard."""

    number: int
    server: int
    """The number of the server, not its rank."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: ArrayAddress | None
    """Where the workers of the server's host map it."""


class VariableInfo(NamedTuple):
    """One variable, as its chief made it: its shards are in the order of its rows."""

    what: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[ShardInfo, ...]
    split: bool


class Create(NamedTuple):
    """Make a shard of the array that is sent along; the answer is its address, or None."""

    shard: int
    what: str


class Announce(NamedTuple):
    """Publish a value, which is a pickle, under the key. A push."""

    key: tuple[str, int]
    value: bytes


class Find(NamedTuple):
    """Answered with the value under the key, once it is announced."""

    key: tuple[str, int]


class Serve(NamedTuple):
    """The worker runs what the chief schedules, and sends no `Find` any more. A push."""


class Read(NamedTuple):
    """The shard's value; with an array of row numbers, these rows."""

    shard: int


class Change(NamedTuple):
    """Change the shard by a function, given as a pickle, of its value and the arrays. A push."""

    shard: int
    function: bytes


class Update(NamedTuple):
    """Apply an optimizer's rule, given as a pickle, to several shards. A push.

    For each shard the gradient is sent along, or row numbers and their gradients if sparse.
    """

    optimizer: int
    rule: bytes
    shards: tuple[int, ...]
    sparse: tuple[bool, ...]


class ReadSlots(NamedTuple):
    """The names of an optimizer's slots of a shard, its count of updates, and the arrays."""

    shard: int
    optimizer: int


class WriteSlots(NamedTuple):
    """Set an optimizer's slots of a shard, unless there are any and `keep`. A push."""

    shard: int
    optimizer: int
    names: tuple[str, ...]
    iteration: int
    keep: bool


class Fence(NamedTuple):
    """Answered when all that the worker pushed before has been applied."""


class Tick(NamedTuple):
    """A step is done; answered when its worker may begin the next one."""


class Slowest(NamedTuple):
    """The ranks that have done the fewest steps."""


class Leave(NamedTuple):
    """The worker takes part no more. A push."""


class PushFailed(NamedTuple):
    """Notification to a worker: one of its pushes failed."""

    failure: Failure
    shard: int | None
    """What the push was for."""


def as_pickle(rule: Any) -> bytes:
    """A rule or function, which pickle sends by name: the server has the same modules."""
    return pickle.dumps(rule, pickle.HIGHEST_PROTOCOL)
