"""Selects the data path of a collective between the ranks of a node.

Zero copy where the buffers are registered, else the path that took the least time lately.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from collectives.caching import LRU
from collectives.reductions.reduction import Array
from collectives.schedules.paths import DIRECT, NATIVE, STAGED
from collectives.shm.addresses import NOWHERE, Addresses, AddressExchange, DataPath
from collectives.shm.online_tuning import PathTimes
from collectives.shm.zero_copy import ZeroCopyPath
from collectives.transports.base import Native
from collectives.transports.parts import Lengths

LARGEST_NATIVE = (1 << 31) - 1
"""An MPI 3 library counts in 31 bits; our own paths have no such limit."""

LEAST_BYTES = 16 << 10
"""Below it, the exchange of addresses costs more than it gains."""

# MPI's own reduction touches more memory than the other paths (docs/explanation/data-paths.md), and
# its temporary buffers of this size fault in new pages at every call: a trial is expensive and
# seldom of use.
_LARGE_BYTES = 32 << 20
_CALLS_BEFORE_NATIVE = 50

# The first calls find the memory of a path in the state in which other paths have left it: of 1 MiB
# by the stages, the first two calls may take four times or a third as long as the later ones.
_TRIES = 6

_clock = time.perf_counter_ns


def without_addresses(native: Native) -> DataPath:
    """The data path of what needs no addresses."""
    return lambda addresses, *arguments: native(*arguments)


class PathSelector:
    """One collective, of one op and dtype. A call returns the name of the path that it took."""

    def __init__(
        self,
        addresses: AddressExchange,
        zero_copy: ZeroCopyPath | None,
        paths: Mapping[str, DataPath],
        least_bytes: int,
        forced: bool = False,
        folds: bool = False,
    ) -> None:
        """`folds`: whether the collective is a reduction.

        Buffers of fewer bytes than `least_bytes` on all ranks are copied in and out, and so are all
        where an exchange of addresses doesn't pay, unless the path is `forced`.
        """
        self._exchange, self._zero_copy, self._least_bytes = addresses, zero_copy, least_bytes
        self._paths, self._forced = dict(paths), forced
        self._folds = folds
        self._abandoned: object = None
        self._times: LRU[tuple[int, bool], PathTimes] = LRU()

    def __call__(self, source: Array | None, target: Array, lengths: Lengths, root: int) -> str:
        """Take part in it, on buffers as a transport's native collective takes them."""
        nbytes = (sum(lengths) or len(target)) * target.itemsize
        if not self.exchanges(nbytes):
            self._paths[STAGED](NOWHERE, source, target, lengths, root)
            return STAGED
        try:
            addresses, sizes, _ = self._exchange.exchange(source, target, nbytes)
        except BaseException:
            self._abandoned = source, target
            raise
        return self.run(addresses, max(sizes), source, target, lengths, root)

    def exchanges(self, nbytes: int) -> bool:
        """Whether the ranks exchange addresses for buffers of so many bytes."""
        return nbytes >= self._least_bytes and (self._forced or self._exchange.worthwhile)

    def run(
        self,
        addresses: Addresses,
        nbytes: int,
        source: Array | None,
        target: Array,
        lengths: Lengths,
        root: int,
    ) -> str:
        """Take part in it, once the ranks have exchanged addresses.

        `nbytes` is the same on all ranks.
        """
        tuning = self._exchange.tuning
        try:
            zero_copy = self._zero_copy if addresses.registered else None
            if zero_copy is not None and zero_copy(addresses, source, target, lengths, root):
                return DIRECT
            times = self._times.get((nbytes.bit_length(), addresses.in_place))
            tuning.last = times = times or self._new_times(nbytes, addresses.in_place)
            path = times.choose()
            start = _clock()
            self._paths[path](addresses, source, target, lengths, root)
            tuning.nanoseconds = _clock() - start
            return path
        except BaseException:
            # Peers may copy from and to the buffers as long as they don't know of the failure.
            self._abandoned = source, target
            raise

    def _new_times(self, nbytes: int, in_place: bool) -> PathTimes:
        self._exchange.warm_up()
        deferred = self._folds and nbytes >= _LARGE_BYTES
        later = {NATIVE: _CALLS_BEFORE_NATIVE} if deferred else {}
        times = PathTimes(self.candidates(nbytes), later, _TRIES)
        self._times.put((nbytes.bit_length(), in_place), times)
        return times

    def candidates(self, nbytes: int) -> list[str]:
        """The paths that ordinary arrays of so many bytes may take."""
        return [path for path in self._paths if path != NATIVE or nbytes <= LARGEST_NATIVE]

    def seconds(self, nbytes: int) -> dict[str, float]:
        """The measured time of each path for arrays of about that size.

        Those of calls out of place; where there were none, those of calls in place.
        """
        for in_place in (False, True):
            times = self._times.get((nbytes.bit_length(), in_place))
            if times is not None:
                return times.seconds
        return {}
