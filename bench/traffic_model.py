"""Memory traffic of the schemes of all_reduce within a node.

All values are bytes loaded and stored by one rank for each byte of the vector. Writing a line that
was not read costs another load on most processors, which is not counted. The time of large vectors
is proportional to their memory traffic.
"""

from __future__ import annotations

_COPY, _FOLD = 2, 3


def registered() -> float:
    """Inputs and outputs are in shared memory: each rank folds its slice and stores it to all.

    Every input is read and every output written once, the minimum for separate results.
    """
    return _COPY


def staged(ranks: int) -> float:
    """Private arrays are copied to shared memory, except the slice that the rank itself folds.

    The folded slices are copied from there, including the own one.
    """
    return 5 - 1 / ranks


def staged_whole(ranks: int) -> float:
    """Private arrays are copied to shared memory as a whole; each rank folds all of them."""
    return _COPY + _FOLD * (ranks - 1)


def ring_single_copy(ranks: int, *, in_place: bool) -> float:
    """A ring that copies directly between the memories of two processes, as by CMA."""
    return (2 * _COPY + _FOLD) * (ranks - 1) / ranks + (0 if in_place else _COPY)


def ring_two_copies(ranks: int, *, in_place: bool) -> float:
    """A ring that copies into shared memory and out of it."""
    return (4 * _COPY + _FOLD) * (ranks - 1) / ranks + (0 if in_place else _COPY)


def touched(ranks: int, *, is_registered: bool) -> float:
    """What our own all_reduce touches, in place or out of place."""
    if is_registered:
        return registered()
    return staged_whole(ranks) if ranks == 2 else staged(ranks)


def ratio(ranks: int, *, is_registered: bool, in_place: bool) -> tuple[float, float]:
    """MPI's time over ours, by what each of its two rings touches."""
    ours = touched(ranks, is_registered=is_registered)
    single = ring_single_copy(ranks, in_place=in_place)
    return single / ours, ring_two_copies(ranks, in_place=in_place) / ours
