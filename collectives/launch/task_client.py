"""A task's connection to the store that rank 0 serves."""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, BinaryIO, cast

from collectives.errors import DeadlineExceededError, LaunchError
from collectives.launch.tasks import (
    LONGEST_HELLO,
    SECRET,
    Tasks,
    addresses_of,
    check_secret,
    is_proof,
    prove,
    read,
    write,
)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5
_LONGEST_ANSWER = 60.0
# How long a refusal, which may be an earlier start's, waits for a new rank 0.
_STALE_SECONDS = 5.0


class _LateError(Exception):
    """All tasks have arrived already."""


class TaskClient:
    """A store with the methods `set`, `get` and `check`, as torch's.

    They raise LaunchError if the start of all tasks has failed, and RuntimeError if the connection
    is lost.
    """

    def __init__(self, tasks: Tasks, secret: str, seconds: float, *, insecure: bool) -> None:
        """Connect, as soon as rank 0 serves.

        Raises LaunchError if it refuses this task, or all tasks had arrived before;
        DeadlineExceededError if it can't be reached within `seconds`.
        """
        self.host = tasks.host
        limit, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
        stale = math.inf
        while True:
            try:
                left = max(limit - time.monotonic(), _SHORTEST_PAUSE)
                self._connect(tasks, secret, min(left, _LONGEST_ANSWER), insecure=insecure)
                return
            except _LateError:
                stale = min(stale, time.monotonic() + _STALE_SECONDS, limit)
                if time.monotonic() + pause > stale:
                    raise LaunchError(
                        f"{tasks.own_name} was started twice, or once more after all tasks had"
                        f" arrived at {tasks.names[0]}: none can join later. End all tasks before"
                        " one of them is started again"
                    ) from None
            # A host name may not be there yet, as a task's own host.
            except (OSError, EOFError, ValueError) as error:
                if time.monotonic() + pause > limit:
                    late = "" if tasks.refuses_late else ", or all tasks had arrived before"
                    raise DeadlineExceededError(
                        f"{tasks.own_name}: {tasks.names[0]} did not answer within {seconds:g} s:"
                        f" it was not started, or was started with other tasks{late} ({error})",
                        (0,),
                    ) from error
                stale = math.inf
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)

    def set(self, name: str, value: str) -> None:
        """Store a value."""
        self._call("set", name, value)

    def get(self, name: str) -> bytes:
        """A value that is there."""
        return str(self._call("get", name)).encode()

    def check(self, names: Sequence[str]) -> bool:
        """Whether all are there."""
        return bool(self._call("check", list(names)))

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):  # what it holds back can't be sent if rank 0 has ended
            self._stream.close()
        self._connection.close()

    def _connect(self, tasks: Tasks, secret: str, seconds: float, *, insecure: bool) -> None:
        addresses = addresses_of(tasks.host)
        check_secret(addresses, secret, insecure=insecure)
        connection = _connected(addresses, tasks.port, seconds)
        self._connection, self._stream = connection, cast(BinaryIO, connection.makefile("rwb"))
        try:
            self._greet(tasks, secret)
            connection.settimeout(_LONGEST_ANSWER)
        except BaseException:
            self.close()
            raise

    def _greet(self, tasks: Tasks, secret: str) -> None:
        """Exchange proofs, this side's first.

        LaunchError if rank 0 has another secret, or refuses this task.
        """
        own = secrets.token_hex(16)
        words = [own, str(tasks.rank), tasks.own_name, tasks.digest]
        keys = ("random", "rank", "name", "cluster")
        write(self._stream, dict(zip(keys, words, strict=True)) | {"rank": tasks.rank})
        challenge = read(self._stream, dict, LONGEST_HELLO)
        if "late" in challenge:
            raise _LateError
        words.append(str(challenge.get("random")))
        write(self._stream, prove(secret, "client", *words))
        answer = read(self._stream, dict)
        problem = str(answer.get("problem"))
        if not is_proof(answer.get("proof"), secret, "server", *words, problem):
            raise LaunchError(
                f"{tasks.own_name}: {tasks.names[0]} has another {SECRET} than this task, or none"
            )
        if problem:
            raise LaunchError(f"{problem}. This task has {tasks.cluster}")

    def _call(self, *request: object) -> Any:
        try:
            write(self._stream, request)
            answer = read(self._stream, dict)
        except (OSError, EOFError, ValueError) as error:
            raise RuntimeError(f"the connection to rank 0 is lost: {error}") from error
        if "problem" in answer:
            raise LaunchError(answer["problem"])
        return answer["result"]


def _connected(addresses: Sequence[str], port: int, seconds: float) -> socket.socket:
    """A connection to the first address that answers; OSError, of the last one, if none does."""
    *others, last = addresses
    for address in others:
        with suppress(OSError):
            return socket.create_connection((address, port), seconds)
    return socket.create_connection((last, port), seconds)
