"""The exchange through a store that precedes MPI: sessions, hosts, the server of PMI.

The store is torch's, or has its methods `set`, `get` and `check`. The store of torchrun outlives
its processes: after a restart it has the keys of the earlier attempt, and torchrun's count of
restarts can differ between hosts. So rank 0 names each attempt by a random session, and the other
ranks follow the session whose server accepts them.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from collectives.errors import (
    CollectiveError,
    DeadlineExceededError,
    LaunchError,
    RankFailedError,
)
from collectives.launching.hosts import Host, listening_address, process_mapping, this_host

_SERVER = str(Path(__file__).with_name("pmi_server.py"))
_SESSION = "session"
# Set by a rank that rank 0 waits for, if its world size is another: no process may have the others.
_MISFIT = "misfit"
# Polled, because torch's stores print a warning when a wait times out.
_SHORTEST_SLEEP, _LONGEST_SLEEP = 1e-3, 5e-2
_LONGEST_CONNECT = 10.0
# The server's deadline is the ranks' own; they wait for its message that names the absent ranks.
_GRACE_SECONDS = 5.0
# How long a published failure, which may be of an earlier attempt, waits for a newer session.
_STALE_SECONDS = 5.0


class Connection(NamedTuple):
    """The connections of one rank to the server of PMI, which all ranks have reached."""

    pmi: socket.socket
    end: socket.socket
    """It closes when the world ends before this rank."""
    session: str


class Listening(Protocol):
    """A socket of rank 0 that listens already, and that the server of PMI takes over."""

    host: str
    """The name or address by which all ranks reach it."""
    socket: socket.socket
    refuses_late: bool
    """Whether it stays open once all ranks have connected, to refuse those that come late."""

    def stop(self) -> None:
        """Accept no further connections in this process."""


class _Server(NamedTuple):
    """Where the server listens, or the problem for which there is none."""

    host: str = ""
    port: int = 0
    token: str = ""
    problem: str = ""
    absent: tuple[int, ...] = ()


class Exchange:
    """The part of one rank; `store` is for this exchange alone.

    Errors call the ranks by their `names`, if given. The server of PMI listens on `listening`,
    given on rank 0, otherwise on an address of rank 0 that all hosts reach.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        seconds: float,
        *,
        names: Sequence[str] = (),
        listening: Listening | None = None,
    ) -> None:
        self._store, self._rank, self._size, self._seconds = store, rank, size, seconds
        self._names, self._listening = names, listening
        self._own_name = names[rank] if names else f"rank {rank} of {size}"
        self._limit = time.monotonic() + seconds
        self._problem, self._pause, self._preceded = "", _SHORTEST_SLEEP, False
        self._failure: CollectiveError | None = None
        self._failure_limit = math.inf

    def connect(self, server: str | None) -> Connection:
        """Connect to the server of PMI, which rank 0 starts; `server` is the store's host.

        Raises DeadlineExceededError, which names the absent ranks, RankFailedError if a rank ends
        meanwhile, and LaunchError if the server can't be reached.
        """
        self._own = json.dumps([self._size, secrets.token_hex(4), *this_host(server)])
        try:
            return self._serve() if self._rank == 0 else self._follow()
        except CollectiveError:
            raise
        except RuntimeError as error:
            if self._failure is not None:
                # Rank 0 has ended after it published the failure, and the store with rank 0.
                raise self._failure from error
            raise RankFailedError(
                f"{self._own_name}: the store has failed while MPI started;"
                f" {self._named([0])}, or the process that serves it, has ended"
            ) from error

    def _serve(self) -> Connection:
        """Start the server and connect to it.

        The process is started first, because Python's start takes as long as the ranks' arrival.
        It ends with rank 0, or when its input is closed before all ranks are connected.
        """
        session = secrets.token_hex(8)
        listening = self._listening
        inherited = [listening.socket.fileno()] if listening else []
        late = ["refuses_late"] if listening and listening.refuses_late else []
        with subprocess.Popen(
            [sys.executable, "-I", "-S", _SERVER, *map(str, inherited), *late],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            pass_fds=inherited,
        ) as process:
            self._store.set(f"{session}/0", self._own)
            self._store.set(_SESSION, session)
            names = [f"{session}/{rank}" for rank in range(self._size)]
            self._await_all(session, names)
            ranks = [json.loads(self._store.get(name)) for name in names]
            hosts = [Host(*host) for _, _, *host in ranks]
            problem = self._other_sizes(enumerate(size for size, *_ in ranks))
            server = _Server(problem=problem) if problem else self._configure(process, hosts)
            self._store.set(f"{session}/server", json.dumps(server))
            if (failure := self._failure_of(server, session)) is not None:
                raise failure
            connected = self._greet(server)
        if connected is None:
            raise LaunchError(f"the server of PMI on rank 0 has ended{self._problem}")
        return Connection(*connected, session)

    def _await_all(self, session: str, names: list[str]) -> None:
        try:
            while not self._store.check(names):
                if self._store.check([f"{session}/{_MISFIT}"]):
                    misfit = json.loads(self._store.get(f"{session}/{_MISFIT}"))
                    raise LaunchError(self._other_sizes([misfit]))
                self._sleep(session)
        except (DeadlineExceededError, LaunchError) as error:
            server = _Server(problem=str(error), absent=getattr(error, "absent", ()))
            self._store.set(f"{session}/server", json.dumps(server))
            # The store may end with this process.
            time.sleep(4 * _LONGEST_SLEEP)
            raise

    def _configure(self, process: subprocess.Popen[bytes], hosts: list[Host]) -> _Server:
        """Send the server what it needs; it answers with its port."""
        assert process.stdin is not None
        assert process.stdout is not None
        address = self._listening.host if self._listening else listening_address(hosts)
        if self._listening:
            self._listening.stop()
        if address is None:
            return _Server(problem="rank 0 has no address that the other hosts can reach")
        token, left = secrets.token_hex(32), self._limit - time.monotonic()
        lines = (token, address, self._size, left, process_mapping(hosts))
        # A server that has ended gives no answer: that is the problem to report.
        with suppress(BrokenPipeError):
            process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        answer = process.stdout.readline().decode().strip()
        if not answer.isdigit():
            reason = answer or "the server has ended"
            return _Server(problem=f"rank 0 can't listen on {address}: {reason}")
        return _Server(address, int(answer), token)

    def _follow(self) -> Connection:
        """Connect to the server of the newest session that has one.

        A failure that is published instead may be an earlier attempt's: it is raised if no newer
        session replaces it soon.
        """
        joined = ""
        while True:
            while not self._store.check([_SESSION]):
                self._sleep(None)
            session = self._store.get(_SESSION).decode()
            if session != joined:
                self._preceded = self._store.check([f"{session}/{self._rank}"])
                self._store.set(f"{session}/{self._rank}", self._own)
                if self._rank < self._size_of_rank_0(session) != self._size:
                    self._store.set(f"{session}/{_MISFIT}", json.dumps([self._rank, self._size]))
                joined, self._failure, self._failure_limit = session, None, math.inf
            if self._failure is None and self._store.check([f"{session}/server"]):
                server = _Server(*json.loads(self._store.get(f"{session}/server")))
                self._failure = self._failure_of(server, session)
                if self._failure is not None:
                    self._failure_limit = time.monotonic() + _STALE_SECONDS
                elif (connected := self._greet(server)) is not None:
                    return Connection(*connected, session)
            self._sleep(session)

    def _sleep(self, session: str | None) -> None:
        """Wait a moment; after the limit raise the failure, or an error with the absent ranks."""
        time.sleep(self._pause)
        self._pause = min(self._pause * 1.5, _LONGEST_SLEEP)
        if time.monotonic() < min(self._limit, self._failure_limit):
            return
        if self._failure is not None:
            raise self._failure
        names = [] if session is None else [f"{session}/{rank}" for rank in range(self._size)]
        absent = [rank for rank, name in enumerate(names) if not self._store.check([name])]
        problem = ""
        if session is not None:
            sizes = self._other_sizes([(0, self._size_of_rank_0(session))])
            problem = f"; or {sizes}" if sizes else self._repetition(session)
        # The session of an earlier attempt lacks no rank; the one who replaces it is rank 0.
        raise self._late(absent or (0,), problem)

    def _repetition(self, session: str) -> str:
        """What is added to an error where another process has, or had, this one's rank."""
        repeated = self._preceded
        # The store may have ended with rank 0.
        with suppress(RuntimeError):
            repeated |= self._store.get(f"{session}/{self._rank}").decode() != self._own
        return f"; or {self._own_name} was started twice" * repeated

    def _size_of_rank_0(self, session: str) -> int:
        return int(json.loads(self._store.get(f"{session}/0"))[0])

    def _other_sizes(self, sizes: Iterable[tuple[int, int]]) -> str:
        """Which of the (rank, size) are of a world of another size than this one; "" for none."""
        others = [f"rank {r} of {size}" for r, size in sizes if size != self._size]
        what = "the ranks were started as worlds of different sizes"
        return f"{what}: {self._own_name}, but {', '.join(others)}" if others else ""

    def _late(self, absent: Sequence[int], problem: str = "") -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self._own_name}: the start of MPI timed out after {self._seconds:g} s."
            f" Absent: {self._named(absent)}{self._problem}{problem}",
            tuple(absent),
        )

    def _named(self, ranks: Sequence[int]) -> str:
        if self._names:
            return ", ".join(self._names[rank] for rank in ranks)
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"

    def _failure_of(self, server: _Server, session: str) -> CollectiveError | None:
        if server.absent:
            return self._late(server.absent, self._repetition(session))
        return LaunchError(server.problem) if server.problem else None

    def _greet(self, server: _Server) -> tuple[socket.socket, socket.socket] | None:
        """Both connections after all ranks have connected; None if the server refuses them."""
        left = max(self._limit - time.monotonic(), _LONGEST_SLEEP)
        with ExitStack() as opened:
            try:
                pmi = opened.enter_context(self._open(server, "pmi", left))
                end = opened.enter_context(self._open(server, "end", left))
                pmi.settimeout(left + _GRACE_SECONDS)
                verdict, *ranks = pmi.recv(1 << 16).decode().split() or [""]
            except OSError as error:
                self._problem = f" ({server.host}:{server.port}: {error})"
                return None
            if verdict == "ok":
                opened.pop_all()
                pmi.setblocking(True)
                end.setblocking(True)
                return pmi, end
        if verdict == "absent":
            raise self._late(tuple(map(int, ranks)))
        if verdict == "failed":
            raise RankFailedError(f"{self._named([int(ranks[0])])} has ended while MPI started")
        self._problem = f" ({server.host}:{server.port} closed the connection)"
        return None

    def _open(self, server: _Server, kind: str, left: float) -> socket.socket:
        address = (server.host, server.port)
        connection = socket.create_connection(address, min(left, _LONGEST_CONNECT))
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(f"{server.token} {self._rank} {kind}\n".encode())
        except OSError:
            connection.close()
            raise
        return connection
