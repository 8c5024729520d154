"""Where the arrays of a call lie, which the ranks tell each other before they touch any."""

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
"""A collective of a node's ranks, for arrays that lie at those places."""


class BufferAddresses(NamedTuple):
    """What each rank told of its input and of where the result goes, in rank order."""

    sources: tuple[int, ...]
    """Locations in the arena, 0 of arrays that aren't registered."""
    targets: tuple[int, ...]
    source_addresses: tuple[int, ...]
    """In the rank's own memory."""
    target_addresses: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        """Whether any rank's result goes where its input lies."""
        return any(map(int.__eq__, self.source_addresses, self.target_addresses))

    def offset_of_part(self, rank: int, start: int) -> int:
        """How many bytes into what a rank told as its input its part of the result lies.

        The part is the one from byte `start` on: a rank that gives it in place told its whole
        target.
        """
        return start if self.source_addresses[rank] == self.target_addresses[rank] else 0


NOWHERE = BufferAddresses((), (), (), ())
"""Of arrays that go through the stages, unasked."""


class AddressExchange:
    """Tells the others where this rank's arrays lie, and learns what their last call took them."""

    def __init__(self, steps: ProgressCounters, arena: Pool, *, oversubscribed: bool) -> None:
        """`crowded`: whether ranks take turns on a core, so that every wait costs much."""
        self._steps, self._arena, self._crowded = steps, arena, oversubscribed
        self.experience = OnlineTuning()
        # What was told last, and what it means: a program often makes the same call again.
        self._told: list[list[int]] = []
        self._found = NOWHERE, 0
        self._prepared = False

    @property
    def worth_asking(self) -> bool:
        """Whether the ranks should wait for each other to find a better way than the stages."""
        return self._arena.in_use or not self._crowded

    def prepare(self) -> None:
        """Before any way is tried: what is done once only must not count."""
        if not self._prepared:
            self._prepared = True
            self._steps.memory.touch_stages()

    def exchange(self, source: Array, target: Array, nbytes: int) -> tuple[BufferAddresses, int]:
        """Where everybody's arrays lie, and the largest of the numbers of bytes told."""
        own, experience = self._places_of(source, target), self.experience
        told = self._steps.tell(*own, nbytes, experience.nanoseconds)
        experience.learn(told)
        without_times = [each[:-1] for each in told]
        if without_times != self._told:
            sources, targets, first, second, sizes = zip(*without_times, strict=True)
            self._told = without_times
            self._found = BufferAddresses(sources, targets, first, second), max(sizes)
        return self._found

    def _places_of(self, source: Array, target: Array) -> tuple[int, int, int, int]:
        locate, second = self._arena.locate, address_of(target)
        second_place = locate(second, target.nbytes)
        if source is target:
            return second_place, second_place, second, second
        first = address_of(source)
        return locate(first, source.nbytes), second_place, first, second
