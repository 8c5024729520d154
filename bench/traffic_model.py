"""How much memory the schemes of all_reduce within a node touch.

All are bytes loaded and stored by one rank for each byte of the vector. A line that is written
without having been read costs a load more on most processors, which isn't counted. Large vectors
take as long as memory needs, so that times should stand in the proportion of these figures.
"""

from __future__ import annotations

_COPY, _FOLD = 2, 3


def shared_result(ranks: int) -> float:
    """Inputs lie in shared memory; the one result is for all to read."""
    return (ranks + 1) / ranks


def registered() -> float:
    """Inputs and outputs lie in shared memory: each rank folds its slice and stores it to all.

    Every input is read and every output written once, which is the least for results of one's own.
    """
    return _COPY


def copied_result(ranks: int) -> float:
    """Inputs are read where they lie, by mapping; each rank copies the others' slices."""
    return 3 - 1 / ranks


def staged(ranks: int) -> float:
    """Private arrays are copied to shared memory, but for the slice that the rank itself folds.

    The folded slices are copied from there, its own one too.
    """
    return 5 - 1 / ranks


def staged_whole(ranks: int) -> float:
    """Private arrays are copied to shared memory whole; each rank folds all that it finds there."""
    return _COPY + _FOLD * (ranks - 1)


def ring_single_copy(ranks: int, *, in_place: bool) -> float:
    """A ring that copies straight from one process's memory to another's, as by CMA."""
    return (2 * _COPY + _FOLD) * (ranks - 1) / ranks + (0 if in_place else _COPY)


def ring_two_copies(ranks: int, *, in_place: bool) -> float:
    """A ring that copies into shared memory and out again."""
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
