"""How the workers come to the same variables: the chief makes them, the others find them.

Both are in the order of creation, and neither is a collective: a worker that comes to its third
variable waits until the chief has made its third.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
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

_HOME = 0
"""The server where things are announced."""


class Registry:
    """One worker's view of what the chief has made."""

    def __init__(self, correspondence: RpcClient, cast: Roles, placement: RoundRobin) -> None:
        self._mail, self._cast, self._placement = correspondence, cast, placement
        self._shards = count()
        self._counts: dict[str, int] = {}
        self._listens = True

    def create(self, value: Array, lengths: Sequence[int] | None, what: str) -> VariableInfo:
        """As the chief: put a variable onto the servers, in parts of so many rows; announce it."""
        parts = [value] if lengths is None else np.split(value, np.cumsum(lengths)[:-1])
        names = _names_of_parts(what, lengths)
        places = [(next(self._shards), self._placement.next()) for _ in parts]
        with self._mail.lock:
            self._mail.look()
            asked = [
                (self._mail.ask(server, requests.Create(shard, name), [part]), server)
                for (shard, server), part, name in zip(places, parts, names, strict=True)
            ]
            made = self._mail.answers(asked, f"creating {what}")
            shards = tuple(
                ShardInfo(shard, server, part.shape, part.dtype, place)
                for (shard, server), part, (place, _) in zip(places, parts, made, strict=True)
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
        """As the chief: let the other workers have an object, at their call of that number."""
        key = (kind, self._counts.get(kind, 0))
        self._counts[kind] = key[1] + 1
        with self._mail.lock:
            self._mail.push(_HOME, requests.Announce(key, pickle.dumps(value)))

    def stop_listening(self) -> None:
        """As another worker, which runs what the chief schedules: it finds nothing from now on."""
        self._listens = False
        with self._mail.lock:
            self._mail.push(_HOME, requests.Serve())

    def find_announced(self, kind: str, what: str) -> Any:
        """As another worker: what the chief announced at its call of that number."""
        if not self._listens:
            raise RuntimeError(f"{what}: this worker serves the chief, which alone makes variables")
        key = (kind, self._counts.get(kind, 0))
        with self._mail.lock:
            asked = [(self._mail.ask(_HOME, requests.Find(key)), _HOME)]
            chief = {self._cast.chief: ", the chief"}
            [(found, _)] = self._mail.answers(asked, what, lambda: chief)
        # A call that wasn't made in time is made again.
        self._counts[kind] = key[1] + 1
        return pickle.loads(found)


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
