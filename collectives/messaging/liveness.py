"""The process of each rank, and whether it still runs, as far as this process can find out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from collectives.shm.processes import boot_id, is_alive, process_namespace

_LOOK_SECONDS = 0.1


class Process(NamedTuple):
    """A process's number, and where that number is valid."""

    number: int
    machine: str


def this_process() -> Process:
    """The one that calls."""
    number, boot, namespace = os.getpid(), boot_id(), process_namespace()
    if boot and namespace:
        return Process(number, f"{boot} {namespace}")
    return Process(number, f"{os.uname().nodename}, unseen by others than {number}")


class Processes:
    """Those of all ranks, in rank order."""

    def __init__(self, processes: Sequence[Process], rank: int) -> None:
        own, self.count = processes[rank], len(processes)
        self._seen = {
            peer: process.number
            for peer, process in enumerate(processes)
            if process.machine == own.machine and process.number != own.number
        }
        self._next_look = dict.fromkeys(self._seen, 0.0)
        self._dead: set[int] = set()

    def died(self, peer: int) -> bool:
        """Whether a rank's process is known to have died; that of another machine never is."""
        if peer not in self._dead and peer in self._seen and not is_alive(self._seen[peer]):
            self._dead.add(peer)
        return peer in self._dead

    def died_lately(self, peer: int) -> bool:
        """As `died`, by what was seen at most a tenth of a second ago."""
        now = time.monotonic()
        if now < self._next_look.get(peer, now):
            return peer in self._dead
        self._next_look[peer] = now + _LOOK_SECONDS
        return self.died(peer)
