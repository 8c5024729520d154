"""Announcements of the chief, such as of its variables, which the other workers find by number.

Neither side is a collective: a worker that makes its third variable waits until the chief has made
its third.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import DtypeMismatchError, ShapeMismatchError
from strategies.parameter_server import requests
from strategies.parameter_server.placement import RoundRobin
from strategies.parameter_server.requests import ShardInfo, VariableInfo
from strategies.parameter_server.roles import Roles
from strategies.parameter_server.rpc_client import RpcClient

Array = NDArray[Any]

Key = tuple[str, int]
"""A kind of announcement, and the number of this one among those."""

_HOME = 0
"""The server that keeps announcements."""


class Registry:
    """One worker's access to the announcements."""

    def __init__(self, rpc: RpcClient, roles: Roles, placement: RoundRobin) -> None:
        self._rpc, self._roles, self._placement = rpc, roles, placement
        self._shards = count()
        self._counts: dict[str, int] = {}
        self._listens = True

    def create(self, value: Array, lengths: Sequence[int] | None, what: str) -> VariableInfo:
        """As the chief: put a variable onto the servers, in parts of so many rows; announce it."""
        parts = [value] if lengths is None else np.split(value, np.cumsum(lengths)[:-1])
        names = _names_of_parts(what, lengths)
        places = [(next(self._shards), self._placement.next()) for _ in parts]
        with self._rpc.lock:
            self._rpc.poll()
            pending = [
                self._rpc.request(server, requests.Create(shard, name), [part])
                for (shard, server), part, name in zip(places, parts, names, strict=True)
            ]
            made = self._rpc.endpoint.results(pending, f"creating {what}")
            shards = tuple(
                ShardInfo(shard, server, part.shape, part.dtype, address)
                for (shard, server), part, (address, _) in zip(places, parts, made, strict=True)
            )
            info = VariableInfo(what, value.shape, value.dtype, shards, lengths is not None)
            self.announce("variable", info)
        return info

    def find(self, value: Array, what: str) -> VariableInfo:
        """As another worker: the chief's variable, once it is there.

        Raises ShapeMismatchError or DtypeMismatchError where the chief's is another,
        DeadlineExceededError where it isn't made in time, RankFailedError where the chief has left.
        """
        info: VariableInfo = self.find_announced("variable", what)
        chiefs, own = _described(info.dtype, info.shape), _described(value.dtype, value.shape)
        text = f"{what}: the chief's is {info.what}, {chiefs}; this worker's is {own}"
        if info.shape != value.shape:
            raise ShapeMismatchError(text)
        if info.dtype != value.dtype:
            raise DtypeMismatchError(text)
        return info

    def announce(self, kind: str, value: Any) -> None:
        """As the chief: publish an object for the other workers' call of that number."""
        key = (kind, self._counts.get(kind, 0))
        self._counts[kind] = key[1] + 1
        with self._rpc.lock:
            self._rpc.push(_HOME, requests.Announce(key, pickle.dumps(value)))

    def stop_listening(self) -> None:
        """As another worker, which runs what the chief schedules: find nothing from now on."""
        self._listens = False
        with self._rpc.lock:
            self._rpc.push(_HOME, requests.Serve())

    def find_announced(self, kind: str, what: str) -> Any:
        """As another worker: what the chief announced at its call of that number."""
        if not self._listens:
            raise RuntimeError(f"{what}: this worker serves the chief, which alone makes variables")
        key = (kind, self._counts.get(kind, 0))
        with self._rpc.lock:
            pending = [self._rpc.request(_HOME, requests.Find(key))]
            chief = {self._roles.chief: ", the chief"}
            [(found, _)] = self._rpc.endpoint.results(pending, what, lambda: chief)
        # A call that wasn't made in time is made again.
        self._counts[kind] = key[1] + 1
        return pickle.loads(found)


class KeyValueStore:
    """The announcements, on the server. Each listener requests those of a kind by number.

    A listener may repeat a request whose answer took too long: an announcement is kept until every
    remaining listener has requested the next one of its kind.
    """

    def __init__(self, listeners: Iterable[int]) -> None:
        self._requested: dict[int, Counter[str]] = {worker: Counter() for worker in listeners}
        self._values: dict[Key, bytes] = {}
        self._first: Counter[str] = Counter()

    def put(self, key: Key, value: bytes) -> None:
        """Keep a value, if there are listeners."""
        if self._requested:
            self._values[key] = value

    def get(self, listener: int, key: Key) -> bytes | None:
        """The value for a listener; None where it is not there yet."""
        kind, number = key
        if listener in self._requested:
            self._requested[listener][kind] = number
            self._drop(kind)
        return self._values.get(key)

    def leave(self, listener: int) -> None:
        """It requests nothing any more."""
        if self._requested.pop(listener, None) is not None:
            for kind in {kind for kind, _ in self._values}:
                self._drop(kind)

    def _drop(self, kind: str) -> None:
        if not self._requested:
            self._values.clear()
            return
        least = min(requested[kind] for requested in self._requested.values())
        while self._first[kind] < least:
            self._values.pop((kind, self._first[kind]), None)
            self._first[kind] += 1

    def __len__(self) -> int:
        return len(self._values)


def _names_of_parts(what: str, lengths: Sequence[int] | None) -> list[str]:
    if lengths is None:
        return [what]
    lasts = (int(end) - 1 for end in np.cumsum(lengths))
    return [
        f"{what}, rows {last - length + 1} to {last}"
        for length, last in zip(lengths, lasts, strict=True)
    ]


def _described(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"{dtype} of shape {shape}"
