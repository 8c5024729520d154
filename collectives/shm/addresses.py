"""Addresses of a call's arrays, which the ranks exchange before they access any."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from collectives.reductions.reduction import Array
from collectives.shm.copy_in_copy_out import Lengths
from collectives.shm.online_tuning import OnlineTuning
from collectives.shm.peer_memory import address_of
from collectives.shm.pool import Pool
from collectives.shm.progress import ProgressCounters

Way = Callable[["BufferAddresses", Array | None, Array, Lengths, int], None]
"""A collective of a node's ranks, for arrays at those addresses."""


class BufferAddresses(NamedTuple):
    """Each rank's input and output, in rank order."""

    sources: tuple[int, ...]
    """Locations in the pool of registered arrays; 0 for arrays that are not registered."""
    targets: tuple[int, ...]
    source_addresses: tuple[int, ...]
    """Addresses in the rank's own address space."""
    target_addresses: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        """Whether any rank's output is its input."""
        return any(map(int.__eq__, self.source_addresses, self.target_addresses))

    def offset_of_part(self, rank: int, start: int) -> int:
        """Offset in bytes of a rank's part, which starts at byte `start`, in its source.

        A rank that works in place has published its whole target as the source; otherwise the
        source is the part alone.
        """
        return start if self.source_addresses[rank] == self.target_addresses[rank] else 0


NOWHERE = BufferAddresses((), (), (), ())
"""Of calls through the stages, which exchange no addresses."""


class AddressExchange:
    """Exchanges the addresses of this rank's arrays, and the time of the previous call."""

    def __init__(self, steps: ProgressCounters, arena: Pool, *, oversubscribed: bool) -> None:
        """`oversubscribed`: ranks share a core, so that every wait is expensive."""
        self._steps, self._arena, self._oversubscribed = steps, arena, oversubscribed
        self.experience = OnlineTuning()
        # Cached, because programs often repeat a call with the same arrays.
        self._exchanged: list[list[int]] = []
        self._found = NOWHERE, 0
        self._prepared = False

    @property
    def worth_asking(self) -> bool:
        """Whether an exchange, to find a better path than the stages, is worth its wait."""
        return self._arena.in_use or not self._oversubscribed

    def prepare(self) -> None:
        """Touch the stages once before any path is timed, so that page faults do not count."""
        if not self._prepared:
            self._prepared = True
            self._steps.memory.touch_stages()

    def exchange(self, source: Array, target: Array, nbytes: int) -> tuple[BufferAddresses, int]:
        """The addresses of every rank's arrays, and the largest `nbytes` of any rank."""
        own, experience = self._locate(source, target), self.experience
        gathered = self._steps.exchange_numbers(*own, nbytes, experience.nanoseconds)
        experience.learn(gathered)
        without_times = [each[:-1] for each in gathered]
        if without_times != self._exchanged:
            sources, targets, first, second, sizes = zip(*without_times, strict=True)
            self._exchanged = without_times
            self._found = BufferAddresses(sources, targets, first, second), max(sizes)
        return self._found

    def _locate(self, source: Array, target: Array) -> tuple[int, int, int, int]:
        locate, second = self._arena.locate, address_of(target)
        target_location = locate(second, target.nbytes)
        if source is target:
            return target_location, target_location, second, second
        first = address_of(source)
        return locate(first, source.nbytes), target_location, first, second
