"""A server of the PMI-1 protocol, by which the processes of MPICH find each other in MPI_Init.

It is a program, `python -I -S pmi_server.py`, that imports nothing of the package and few modules,
because rank 0 waits for its start. It can't be a thread of rank 0: MPI_Init and MPI_Finalize keep
Python's lock.

Arguments: the descriptor of a socket that listens already, and "refuses_late" if it does so until
the first rank ends. stdin has five lines: the token, the address to listen on, the number of ranks,
the seconds of the start, and PMI_process_mapping; its end before all ranks are connected ends the
start. stdout receives the port.

A connection begins with a line of the client. Each rank has two, "TOKEN RANK pmi" and "TOKEN RANK
end". When all ranks have both, the first one receives "ok", or "absent RANK …" or "failed RANK"
where the start fails. PMI-1 follows on it: lines of "cmd=NAME KEY=VALUE …"
(https://github.com/pmodels/mpich, src/pmi).

A rank that calls MPI_Abort, or ends without MPI_Finalize, ends the others, as mpirun does: their
second connections receive "exitcode=CODE rank=RANK" and the end of the file.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from hmac import compare_digest

LONGEST_HELLO = 1 << 10
LONGEST_LINE = 1 << 16
_HELLO_SECONDS = 10.0
_KINDS = ("pmi", "end")
# The answer to a task's greeting, a line of JSON: all tasks have arrived.
_LATE = '{"late": true}'
# Further connections without the token than two of each rank.
_STRANGERS = 16
# A launcher that ends the other ranks itself, such as torchrun, does so first: it reports the rank
# that it has seen to fail first.
_ENDING_SECONDS = 1.0
_ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "put": "cmd=put_result rc=0 msg=success",
    "finalize": "cmd=finalize_ack rc=0",
}


class Client:
    """One connection; its rank is None before it has sent the token, its kind is "pmi" or "end"."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.descriptor = connection, connection.fileno()
        self.rank: int | None = None
        self.kind = ""
        self.since = time.monotonic()
        self.finalized = False
        self._unread = b""

    def lines(self) -> list[str] | None:
        """The complete lines that have arrived; None at the end, or after a line too long."""
        try:
            data = self.connection.recv(LONGEST_LINE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []  # an event of an earlier connection with the same descriptor
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        longest = LONGEST_HELLO if self.rank is None else LONGEST_LINE
        if not data or max(map(len, (*lines, self._unread))) > longest:
            return None
        return [line.decode("ascii", "replace") for line in lines]

    def send(self, line: str) -> None:
        """Send one line; a closed connection is noticed by `lines`."""
        try:
            self.connection.sendall(line.encode() + b"\n")
        except OSError:
            self.shut()

    def shut(self) -> None:
        """Send the end of the file."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            self.finalized = True


class Server:
    """The server of one world; `run` returns when it has ended."""

    def __init__(
        self,
        token: str,
        host: str,
        size: int,
        seconds: float,
        mapping: str,
        listener: socket.socket | None = None,
        *,
        refuses_late: bool = False,
    ) -> None:
        self._token, self._size, self._limit = token.encode(), size, time.monotonic() + seconds
        # MPICH names shared memory by it: a killed world leaves its memory behind.
        self._name = f"kvs_{os.urandom(8).hex()}"
        self._values = {"PMI_process_mapping": mapping} if mapping else {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = listener or socket.create_server(
            (host, 0), family=family, backlog=size + _STRANGERS
        )
        self._listener.setblocking(False)  # a connection may be there no longer
        self.port: int = self._listener.getsockname()[1]
        self._expected = {f"{rank} {kind}": (rank, kind) for rank in range(size) for kind in _KINDS}
        self._clients: dict[int, Client] = {}
        self._poll = select.poll()
        self._in_barrier: list[Client] = []
        self._refuses_late, self._last_line = refuses_late, ""

    def run(self, lifeline: int) -> None:
        """Connect all ranks, then serve them until all have disconnected.

        `lifeline` is a descriptor whose end of file ends the start, because rank 0 has died.
        """
        if self._connect_all(lifeline):
            while len(self._clients) > len(self._unknown()):
                for descriptor, _ in self._poll.poll(1000 * _ENDING_SECONDS):
                    if descriptor == self._listener.fileno():
                        self._accept()
                    elif client := self._clients.get(descriptor):
                        (self._greet if client.rank is None else self._serve)(client)
                self._drop_the_silent()
                if self._last_line and time.monotonic() > self._limit:
                    pmi = [each for each in self._clients.values() if each.kind == "pmi"]
                    self._dismiss(*(each.rank for each in pmi if not each.finalized))
        self._stop_listening()
        for client in list(self._clients.values()):
            self._drop(client)

    def _stop_listening(self) -> None:
        if self._listener.fileno() >= 0:
            self._poll.unregister(self._listener.fileno())
            self._listener.close()

    def _connect_all(self, lifeline: int) -> bool:
        """Accept all ranks; whether all have connected in time."""
        for descriptor in (self._listener.fileno(), lifeline):
            self._poll.register(descriptor, select.POLLIN)
        while absent := sorted({rank for rank, _ in self._expected.values()}):
            if time.monotonic() > self._limit:
                self._send_all(f"absent {' '.join(map(str, absent))}")
                return False
            for descriptor, _ in self._poll.poll(100):
                if descriptor == lifeline:
                    return False
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._clients and not self._greet(self._clients[descriptor]):
                    return False
            self._drop_the_silent()
        self._poll.unregister(lifeline)
        if not self._refuses_late:
            self._stop_listening()
        self._send_all("ok")
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(unknown := self._unknown()) >= 2 * self._size + _STRANGERS:
            self._drop(unknown[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost its power must not keep the server alive.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client = Client(connection)
        self._clients[client.descriptor] = client
        self._poll.register(client.descriptor, select.POLLIN)

    def _greet(self, client: Client) -> bool:
        """Read what a client sends before all are connected; False if the start has failed."""
        lines = client.lines()
        if client.rank is not None:
            if lines is None:
                self._drop(client)
                self._send_all(f"failed {client.rank}")
            return lines is not None
        if lines is None:
            self._drop(client)
        elif lines:
            token, _, name = lines[0].partition(" ")
            if compare_digest(token.encode(), self._token) and name in self._expected:
                client.rank, client.kind = self._expected.pop(name)
                return True
            if lines[0].startswith("{"):
                client.send(_LATE)
            self._drop(client)
        return True

    def _drop_the_silent(self) -> None:
        limit = time.monotonic() - _HELLO_SECONDS
        for client in self._unknown():
            if client.since < limit:
                self._drop(client)

    def _unknown(self) -> list[Client]:
        """Connections that have not sent the token, the oldest first."""
        return [each for each in self._clients.values() if each.rank is None]

    def _drop(self, client: Client) -> None:
        del self._clients[client.descriptor]
        self._poll.unregister(client.descriptor)
        client.connection.close()

    def _send_all(self, line: str) -> None:
        for client in self._clients.values():
            if client.kind == "pmi":
                client.send(line)

    def _serve(self, client: Client) -> None:
        lines = client.lines()
        if lines is None:
            # All tasks may be started again as soon as one has ended.
            self._stop_listening()
            self._drop(client)
            if client.kind == "pmi" and not client.finalized:
                self._end_world(client, "1")
        for line in lines or ():
            words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
            if line.startswith("cmd="):
                self._answer(client, words["cmd"], words)
            elif line == "endcmd":
                client.send("cmd=spawn_result rc=-1 msg=unsupported")
        if len(self._in_barrier) == self._size:
            for each in self._in_barrier:
                each.send("cmd=barrier_out rc=0")
            self._in_barrier = []

    def _end_world(self, client: Client, code: str) -> None:
        """End the other ranks soon, because this one has failed; the first one counts."""
        if not self._last_line:
            self._last_line = f"exitcode={code} rank={client.rank}"
            self._limit = time.monotonic() + _ENDING_SECONDS

    def _dismiss(self, *ranks: int | None) -> None:
        """Send the last line. Its reader closes the connection: closed here, it could be lost."""
        for client in self._clients.values():
            if client.kind == "end" and client.rank in ranks and not client.finalized:
                client.finalized = True
                client.send(self._last_line)
                client.shut()

    def _answer(self, client: Client, command: str, words: dict[str, str]) -> None:
        if command == "barrier_in":
            self._in_barrier.append(client)
            return
        if command == "abort":
            self._end_world(client, words.get("exitcode", "1"))
            self._dismiss(client.rank)
            return
        client.finalized = client.finalized or command == "finalize"
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
        if command == "get":
            value = self._values.get(words.get("key", ""))
            found = "rc=-1 msg=key_not_found value=unknown"
            client.send(f"cmd=get_result {found if value is None else f'rc=0 value={value}'}")
        elif command == "get_my_kvsname":
            client.send(f"cmd=my_kvsname rc=0 kvsname={self._name}")
        elif command == "get_universe_size":
            client.send(f"cmd=universe_size rc=0 size={self._size}")
        else:
            client.send(_ANSWERS.get(command, f"cmd={command}_result rc=-1 msg=unsupported"))


def main() -> None:
    """Serve the world that stdin describes, in a process that is no child of rank 0."""
    # Unbuffered: what is left in a buffer would hide the end of the file.
    with open(0, "rb", buffering=0, closefd=False) as source:
        lines = [source.readline().decode() for _ in range(5)]
    if not lines[-1]:
        return  # rank 0 has given the start up
    token, host, size, seconds, mapping = (line.rstrip("\n") for line in lines)
    listener = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
    try:
        start = int(size), float(seconds), mapping, listener
        server = Server(token, host, *start, refuses_late="refuses_late" in sys.argv)
    except OSError as error:
        os.write(1, f"{error}\n".encode())
        return
    os.write(1, f"{server.port}\n".encode())
    if os.fork():
        os._exit(0)
    os.close(1)
    server.run(0)


if __name__ == "__main__":
    main()
