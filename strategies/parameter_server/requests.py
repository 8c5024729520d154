"""What workers and parameter servers say to each other.

A request's header is `(number, request)`; the arrays go with it. Where the number is None it is a
push: nobody waits for an answer, but for its error. Between two ranks messages keep their order, so
that whatever a worker asks comes after all that it pushed.
"""

from __future__ import annotations

import pickle
import traceback
from typing import Any, NamedTuple

import numpy as np

from collectives.shm.segment import SegmentAddress


class Place(NamedTuple):
    """Where a shard lies in a server's memory."""

    address: SegmentAddress
    start: int


class ShardInfo(NamedTuple):
    """One shard, as workers know it."""

    number: int
    server: int
    """The number of the server, not its rank."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    place: Place | None


class VariableInfo(NamedTuple):
    """One variable, as its chief made it: its shards are in the order of its rows."""

    what: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: tuple[ShardInfo, ...]
    split: bool


class Create(NamedTuple):
    """Make a shard of the array that comes with it; the answer is its `Place`, or None."""

    shard: int
    what: str


class Announce(NamedTuple):
    """Let everybody who asks for the key have the value, which is a pickle. A push."""

    key: tuple[str, int]
    value: bytes


class Find(NamedTuple):
    """The value announced under the key, once it is."""

    key: tuple[str, int]


class Serve(NamedTuple):
    """The worker runs what the chief schedules: it will `Find` nothing any more. A push."""


class Read(NamedTuple):
    """The shard's value; where an array of row numbers comes with it, these rows."""

    shard: int


class Change(NamedTuple):
    """Change the shard by a function, given as a pickle, of its value and the arrays. A push."""

    shard: int
    function: bytes


class Update(NamedTuple):
    """Apply an optimizer's rule, given as a pickle, to several shards. A push.

    Of each shard come the gradient or, where it is sparse, row numbers and their gradients.
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
    """The worker takes part no more; answered at once where it asks."""


class Answer(NamedTuple):
    """What a server sends: to a request by its number, or (None) the error of a push."""

    number: int | None
    value: Any
    error: BaseException | None = None
    trace: str = ""
    """Where the error was raised."""
    shard: int | None = None
    """What the push that failed was for."""


def trace_of(error: BaseException) -> str:
    """Where it was raised."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def as_pickle(rule: Any) -> bytes:
    """A rule, or a function, which goes by its name: the server has the same modules."""
    return pickle.dumps(rule, pickle.HIGHEST_PROTOCOL)
