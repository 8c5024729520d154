"""The store that rank 0 serves to the other tasks, at its own address of the cluster."""

from __future__ import annotations

import errno
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any, BinaryIO, cast

from collectives.errors import LaunchError
from collectives.launch.tasks import (
    LONGEST_HELLO,
    SECRET,
    Tasks,
    addresses_of,
    beyond_loopback,
    check_secret,
    is_proof,
    prove,
    read,
    write,
)

# From the connection to the proof of the secret, whatever is sent meanwhile.
_HELLO_SECONDS = 10.0
# Further connections without proof than one of each task.
_STRANGERS = 16
# How long the end of rank 0 waits until the others have connected, and have received why.
_FAREWELL_SECONDS = 2.0


class TaskServer:
    """A store with the methods `set`, `get` and `check`, as torch's.

    A task that has another cluster, or that is there already, fails the start of all: from then on
    every method raises LaunchError, on every rank.

    Connections that have not proved that they know the secret are bounded: in number, where the
    oldest makes room for the newest, and in time.
    """

    def __init__(self, tasks: Tasks, secret: str, *, insecure: bool) -> None:
        """Listen; LaunchError if that is impossible, or would let strangers in."""
        self._tasks, self._secret, self.host = tasks, secret, tasks.host
        self.refuses_late = tasks.refuses_late
        self._values: dict[str, bytes] = {}
        self._peers: dict[int, str] = {}
        self._arrived: set[int] = set()
        """The tasks that have proved themselves, also those that were refused or have ended."""
        self._all_arrived = Event()
        self._problem = ""
        self._lock = Lock()
        self._connections: dict[socket.socket, Thread] = {}
        self._unproved: dict[socket.socket, float] = {}
        self._most_unproved = tasks.size + _STRANGERS
        self._stopped = False
        self.socket = _listen(tasks, secret, insecure=insecure)
        self._address, self._stranger = self.socket.getsockname()[0], ""
        self._acceptor = Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    @property
    def hints(self) -> str:
        """What may be the cause, to add to an error about absent tasks.

        Of processes that were refused, the last one, by its address: its name is not proved.
        """
        hints = []
        if not beyond_loopback([self._address]):
            hints.append(
                f"{self._tasks.names[0]} listens on {self._address}, which other hosts can't reach"
            )
        if self._stranger:
            hints.append(f"a process at {self._stranger} did not prove that it has this {SECRET}")
        return "".join(f". {hint}" for hint in hints)

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
        with self._lock:
            self._stopped = True
        self._acceptor.join()
        # A task that connects again gets the answer that it is late.
        self._end_unproved(most=0)
        self.socket.close()

    def close(self) -> None:
        """Close all connections, after their clients have received what has failed."""
        if not self._stopped:
            if self._problem:
                # Those that find no server would wait for one until their deadline.
                self._all_arrived.wait(_FAREWELL_SECONDS)
            self.stop()
        limit = time.monotonic() + _FAREWELL_SECONDS
        with self._lock:
            connections = dict(self._connections)
        for thread in connections.values() if self._problem else ():
            thread.join(max(0.0, limit - time.monotonic()))
        for connection in connections:
            _shut(connection)

    def _check_start(self) -> None:
        if self._problem:
            raise LaunchError(self._problem)

    def _accept(self) -> None:
        self.socket.settimeout(0.05)
        while not self._stopped:
            try:
                connection, address = self.socket.accept()
            except OSError:
                self._end_unproved()
                continue
            connection.settimeout(_HELLO_SECONDS)
            peer = f"{address[0]}:{address[1]}"
            thread = Thread(target=self._serve, args=(connection, peer), daemon=True)
            with self._lock:
                self._connections[connection] = thread
                self._unproved[connection] = time.monotonic() + _HELLO_SECONDS
            self._end_unproved()
            thread.start()

    def _end_unproved(self, most: int | None = None) -> None:
        """End the oldest connections without proof: those beyond `most`, and those over time."""
        most, now = self._most_unproved if most is None else most, time.monotonic()
        with self._lock:
            count = len(self._unproved)
            for number, (connection, limit) in enumerate(list(self._unproved.items())):
                if number < count - most or limit < now:
                    del self._unproved[connection]
                    _shut(connection)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """Serve one connection to its end."""
        rank: int | None = None
        try:
            # The client has ended then, or it is no task.
            with (
                suppress(OSError, EOFError, ValueError),
                connection,
                cast(BinaryIO, connection.makefile("rwb")) as stream,
            ):
                rank, answer = self._admit(connection, stream, peer)
                write(stream, answer)
                connection.settimeout(None)
                while rank is not None:
                    write(stream, self._answer(read(stream, list)))
        finally:
            with self._lock:
                self._unproved.pop(connection, None)
                self._connections.pop(connection, None)
                # A task that is started again may connect again.
                if rank is not None:
                    del self._peers[rank]

    def _admit(
        self, connection: socket.socket, stream: BinaryIO, peer: str
    ) -> tuple[int | None, dict[str, str]]:
        """Check the client's proof; its rank, or None for one that is refused, and the answer."""
        hello = read(stream, dict, LONGEST_HELLO)
        words = [str(hello.get(key)) for key in ("random", "rank", "name", "cluster")]
        words.append(secrets.token_hex(16))
        write(stream, {"random": words[-1]})
        if not is_proof(read(stream, str, LONGEST_HELLO), self._secret, "client", *words):
            self._stranger = peer
            return None, {}
        with self._lock:
            if self._unproved.pop(connection, None) is None or self._stopped:
                raise EOFError("too late")
            problem = self._refusal(hello.get("rank"), words, peer)
        proof = prove(self._secret, "server", *words, problem)
        return None if problem else int(hello["rank"]), {"proof": proof, "problem": problem}

    def _refusal(self, rank: Any, words: Sequence[str], peer: str) -> str:
        """Note a task that has proved itself; what fails the start of all, or ""."""
        if rank in range(1, self._tasks.size):
            self._arrived.add(rank)
            if len(self._arrived) == self._tasks.size - 1:
                self._all_arrived.set()
        if words[3] != self._tasks.digest or rank not in range(1, self._tasks.size):
            self._problem = (
                f"{words[2]} at {peer} has another cluster than {self._tasks.names[0]}, which has"
                f" {self._tasks.cluster}"
            )
        elif rank in self._peers:
            self._problem = f"{words[2]} was started twice: at {self._peers[rank]}, at {peer}"
        else:
            self._peers[rank] = peer
        return self._problem

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


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)


def _listen(tasks: Tasks, secret: str, *, insecure: bool) -> socket.socket:
    """A socket at rank 0's address, and at no other; one that other hosts reach, if it has one."""
    try:
        addresses = addresses_of(tasks.host)
        check_secret(addresses, secret, insecure=insecure)
        address = (beyond_loopback(addresses) or addresses)[0]
        if not beyond_loopback(addresses) and any(map(_is_elsewhere, tasks.hosts)):
            raise LaunchError(
                f"{tasks.names[0]}: on its own host {tasks.host} is {address}, which other hosts"
                " can't reach: write its IP address in the cluster"
            )
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server(
            (address, tasks.port), family=family, backlog=tasks.size + _STRANGERS
        )
    except OSError as error:
        reason = f"{tasks.names[0]} can't listen on its address: {error}"
        if error.errno == errno.EADDRINUSE:
            reason += ". It was started twice, or another program has the port"
        raise LaunchError(reason) from error


def _is_elsewhere(host: str) -> bool:
    """Whether the host's addresses are none of this host alone."""
    try:
        return bool(beyond_loopback(addresses_of(host)))
    except OSError:
        return True
