"""Pairwise exchange: in round d every rank sends to the rank d after it.

p−1 messages and every byte sent once (Thakur, Rabenseifner and Gropp 2005,
doi:10.1177/1094342005051521).
"""

from __future__ import annotations

from collections.abc import Iterator

from collectives.schedules.schedule import Ranks, Recv, Round, Send


def all_to_all(rank: Ranks, size: int) -> Iterator[Round]:
    """Chunk i goes to rank i; data from rank i arrive in chunk size + i."""
    for distance in range(1, size):
        receiver, sender = (rank + distance) % size, (rank - distance) % size
        yield [Send(receiver, receiver), Recv(size + sender, sender)]
