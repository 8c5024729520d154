"""The store that rank 0 serves to the other tasks, at its own address of the cluster."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, BinaryIO, cast

from collectives.errors import LaunchError
from collectives.launch.tasks import (
    LONGEST_HELLO,
    Tasks,
    check_secret,
    is_loopback,
    is_proof,
    prove,
    read,
    write,
)

_HELLO_SECONDS = 10.0
# How long the end of rank 0 waits until the others have received why.
_FAREWELL_SECONDS = 2.0


class TaskServer:
    """A store with the methods `set`, `get` and `check`, as torch's.

    A task that has another cluster, or that is there already, fails the start of all: from then on
    every method raises LaunchError, on every rank.
    """

    def __init__(self, tasks: Tasks, secret: str, *, insecure: bool) -> None:
        """Listen; LaunchError if that is impossible, or would let strangers in."""
        self._tasks, self._secret, self.host = tasks, secret, tasks.host
        self._values: dict[str, bytes] = {}
        self._peers: dict[int, str] = {}
        self._problem = ""
        self._lock = Lock()
        self._connections: list[socket.socket] = []
        self._threads: list[Thread] = []
        self._stopped = False
        self.socket = _listen(tasks, secret, insecure=insecure)
        self._acceptor = Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def set(self, name: str, value: str) -> None:
        """Store a value."""
        self._check_start()
        self._values[name] = value.encode()

    def get(self, name: str) -> bytes:
        """A value that is there."""
        self._check_start()
        return self._values[name]

    def check(self, names: Sequence[str]) -> bool:
        """Whether all are there."""
        self._check_start()
        return all(name in self._values for name in names)

    def stop(self) -> None:
        """Accept no further connections; those that are open stay so."""
        self._stopped = True
        self._acceptor.join()
        # The server of PMI, which shares the socket, expects a blocking one.
        self.socket.setblocking(True)
        self.socket.close()

    def close(self) -> None:
        """Close all connections, after their clients have received what has failed."""
        if not self._stopped:
            self.stop()
        limit = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads if self._problem else ():
            thread.join(max(0.0, limit - time.monotonic()))
        for connection in self._connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _check_start(self) -> None:
        if self._problem:
            raise LaunchError(self._problem)

    def _accept(self) -> None:
        self.socket.settimeout(0.05)
        while not self._stopped:
            try:
                connection, address = self.socket.accept()
            except OSError:
                continue
            peer = f"{address[0]}:{address[1]}"
            thread = Thread(target=self._serve, args=(connection, peer), daemon=True)
            self._connections.append(connection)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serve one connection to its end."""
        rank: int | None = None
        # The client has ended then, or it is no task.
        with suppress(OSError, EOFError, ValueError), connection:
            stream = cast(BinaryIO, connection.makefile("rwb"))
            connection.settimeout(_HELLO_SECONDS)
            rank = self._admit(stream, peer)
            connection.settimeout(None)
            while rank is not None:
                write(stream, self._answer(read(stream, list)))
        # A task that is started again may connect again.
        if rank is not None:
            del self._peers[rank]

    def _admit(self, stream: BinaryIO, peer: str) -> int | None:
        """Exchange proofs; the client's rank, or None for one that is refused."""
        hello = read(stream, dict, LONGEST_HELLO)
        words = [str(hello.get(key)) for key in ("random", "rank", "name", "cluster")]
        own = secrets.token_hex(16)
        write(stream, {"random": own, "proof": prove(self._secret, "server", own, *words)})
        proof = read(stream, str, LONGEST_HELLO)
        if not is_proof(proof, self._secret, "client", own, *words):
            return None
        rank, name = hello["rank"], f"{words[2]} at {peer}"
        with self._lock:
            if words[3] != self._tasks.digest or rank not in range(1, self._tasks.size):
                self._problem = (
                    f"{name} has another cluster than {self._tasks.names[0]}, which has"
                    f" {self._tasks.cluster}"
                )
            elif rank in self._peers:
                self._problem = f"{words[2]} was started twice: at {self._peers[rank]}, at {peer}"
            else:
                self._peers[rank] = peer
            write(stream, self._problem)
            return None if self._problem else int(rank)

    def _answer(self, request: list[Any]) -> dict[str, Any]:
        """The result of one method, or what has failed."""
        method, *arguments = request
        try:
            if method == "get":
                return {"result": self.get(*arguments).decode()}
            if method == "check":
                return {"result": self.check(*arguments)}
            self.set(*arguments)
            return {"result": None}
        except LaunchError as error:
            return {"problem": str(error)}


def _listen(tasks: Tasks, secret: str, *, insecure: bool) -> socket.socket:
    """A socket at rank 0's address, and at no other."""
    try:
        family, *_, address = socket.getaddrinfo(
            tasks.host, tasks.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        check_secret(str(address[0]), secret, insecure=insecure)
        if is_loopback(str(address[0])) and len(tasks.hosts) > 1:
            raise LaunchError(
                f"{tasks.names[0]}: on its own host {tasks.host} is {address[0]}, which other hosts"
                " can't reach: write its IP address in the cluster"
            )
        return socket.create_server(
            address[:2], family=socket.AddressFamily(family), backlog=tasks.size + 16
        )
    except OSError as error:
        raise LaunchError(
            f"{tasks.names[0]} can't listen on its address in the cluster: {error}"
        ) from error
