"""The end of a rank with its world, where no launcher of MPI ends it."""

from __future__ import annotations

import os
import select
import socket
from threading import Thread
from typing import Any


def end_with_world(descriptor: int, rank: int, mpi: Any) -> None:
    """End this process when the server of PMI closes the connection, as mpirun would.

    MPI_Abort returns, because it expects a launcher that ends the process. `descriptor` is MPI's.
    """
    connection = socket.socket(fileno=os.dup(descriptor))
    Thread(target=_await_end, args=(connection, rank, mpi), daemon=True).start()


def _await_end(connection: socket.socket, rank: int, mpi: Any) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    if mpi.Is_finalized():
        return
    try:
        # MPI may have answers to read before it.
        line = connection.recv(1 << 16, socket.MSG_PEEK).decode().splitlines()[-1:]
    except OSError:
        line = []
    words = dict(word.split("=", 1) for word in " ".join(line).split(" ") if "=" in word)
    code = int(words.get("exitcode", "1")) & 0xFF or 1
    culprit = words.get("rank")
    if culprit is None:
        os.write(2, f"rank {rank}: the server of PMI has ended; this rank ends\n".encode())
    elif culprit != str(rank):
        os.write(2, f"rank {rank} ends, because rank {culprit} has ended\n".encode())
    os._exit(code)
