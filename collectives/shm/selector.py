"""How a collective of a node's ranks goes: where the arrays lie, or the way that is quickest."""

from __future__ import annotations

import time
from collections.abc import Mapping

from collectives.reductions.reduction import Array
from collectives.schedules.paths import DIRECT, NATIVE, STAGED
from collectives.shm.addresses import NOWHERE, AddressExchange, Way
from collectives.shm.copy_in_copy_out import Lengths
from collectives.shm.online_tuning import Entry
from collectives.shm.zero_copy import Attempt

LARGEST_NATIVE = (1 << 31) - 1
"""An MPI 3 library counts in 31 bits; our own ways know no such limit."""

LEAST_BYTES = 16 << 10
"""Below it, telling the places costs more than it gains."""

_clock = time.perf_counter_ns


class PathSelector:
    """One collective, of one op and dtype. Its call returns the name of the way that it went."""

    def __init__(
        self,
        places: AddressExchange,
        attempt: Attempt | None,
        ways: Mapping[str, Way],
        least_bytes: int,
        forced: bool = False,
    ) -> None:
        """Arrays of fewer bytes than `least_bytes`, which have that on all ranks, are staged.

        So are others where it isn't worth asking, unless a way is `forced`.
        """
        self._places, self._attempt, self._least_bytes = places, attempt, least_bytes
        self._ways, self._forced = dict(ways), forced
        self._abandoned: object = None
        self._entries: dict[tuple[int, bool], Entry] = {}

    def __call__(
        self, source: Array | None, target: Array, lengths: Lengths = (), root: int = 0
    ) -> str:
        """Take part in it, on arrays as a transport's native collective takes them."""
        given = target if source is None else source
        nbytes = max(given.nbytes, target.nbytes)
        if nbytes < self._least_bytes or not (self._forced or self._places.worth_asking):
            self._ways[STAGED](NOWHERE, source, target, lengths, root)
            return STAGED
        try:
            return self._run_where_they_lie(source, target, nbytes, lengths, root)
        except BaseException:
            # The others may copy from and to these arrays as long as they don't know.
            self._abandoned = (source, target)
            raise

    def _run_where_they_lie(
        self, source: Array | None, target: Array, nbytes: int, lengths: Lengths, root: int
    ) -> str:
        given = target if source is None else source
        places, nbytes = self._places.exchange(given, target, nbytes)
        if self._attempt is not None and self._attempt(places, source, target, lengths, root):
            return DIRECT
        experience = self._places.experience
        way = experience.choose(self._entry(nbytes, places.in_place))
        start = _clock()
        self._ways[way](places, source, target, lengths, root)
        experience.nanoseconds = _clock() - start
        return way

    def _entry(self, nbytes: int, in_place: bool) -> Entry:
        key = nbytes.bit_length(), in_place
        entry = self._entries.get(key)
        if entry is None:
            self._places.prepare()
            entry = self._entries[key] = Entry(self.ways_for(nbytes))
        return entry

    def ways_for(self, nbytes: int) -> list[str]:
        """The ways that arrays of so many bytes may go."""
        return [way for way in self._ways if way != NATIVE or nbytes <= LARGEST_NATIVE]

    def seconds(self, nbytes: int) -> dict[str, float]:
        """What the ways were found to take for arrays of about that size, out of place first."""
        for in_place in (False, True):
            entry = self._entries.get((nbytes.bit_length(), in_place))
            if entry is not None:
                return entry.seconds
        return {}
