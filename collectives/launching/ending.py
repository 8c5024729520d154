"""The end of a rank with its world, where no launcher of MPI ends it.

The server of PMI closes a connection for it. While Python runs, a thread reads from it. MPI_Init
and MPI_Finalize keep Python's lock and may wait for a dead rank for ever: the kernel ends them.

The server notices the end of a rank by its closed connections. So a forked child, in which they
would stay open, closes its copies of them.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import NamedTuple


class _Connections(NamedTuple):
    """Those of this rank to the server; a forked child has none."""

    end: socket.socket
    pmi: int
    """The descriptor, which MPI closes in MPI_Finalize: another file can have the number then."""
    inode: int


_connections: _Connections | None = None


@contextmanager
def killed_with_world(connection: socket.socket) -> Iterator[None]:
    """Within the block, the kernel kills this process when the connection closes."""
    flags = _kill_with_world(connection)
    try:
        yield
    finally:
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)


def end_with_world(connection: socket.socket, pmi: int, rank: int) -> None:
    """End this process when the connection closes, as mpirun would.

    MPI_Abort returns, because it expects a launcher that ends the process. `pmi` is the descriptor
    of the connection that MPI uses.
    """
    global _connections
    _connections = _Connections(connection, pmi, os.fstat(pmi).st_ino)
    Thread(target=_await_end, args=(connection, rank), daemon=True).start()


def _await_end(connection: socket.socket, rank: int) -> None:
    # While a thread waits in `recv`, Linux sends no signal, which is to end MPI_Finalize.
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    waiting.poll()
    try:
        line = connection.recv(1 << 10).decode()
    except OSError:
        line = ""
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    culprit = words.get("rank")
    ended = "the server of PMI" if culprit is None else f"rank {culprit}"
    if culprit != str(rank):
        # The reader of stderr may have ended.
        with suppress(OSError):
            os.write(2, f"rank {rank} ends, because {ended} has ended\n".encode())
    os._exit(int(words.get("exitcode", "1")) & 0xFF or 1)


def _kill_with_world(connection: socket.socket) -> int:
    """Have the kernel do it from now on; returns the flags of before."""
    flags: int = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    return flags


@atexit.register
def _prepare_finalize() -> None:
    """MPI_Finalize follows the handlers of exit."""
    if _connections is not None:
        _kill_with_world(_connections.end)


def _close_in_child() -> None:
    global _connections
    if _connections is None:
        return
    end, pmi, inode = _connections
    _connections = None
    end.close()
    try:
        unchanged = os.fstat(pmi).st_ino == inode
    except OSError:
        unchanged = False
    if unchanged:
        # The child's MPI may still write to this number, so it must not become another file's.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, pmi, inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_close_in_child)
