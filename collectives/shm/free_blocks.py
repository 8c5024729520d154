"""The free part of a memory, as blocks."""

from __future__ import annotations


class FreeBlocks:
    """Free blocks of a memory of `nbytes` bytes, as (offset, nbytes)."""

    def __init__(self, nbytes: int) -> None:
        self._free = [(0, nbytes)]
        self._all = [(0, nbytes)]

    def take(self, nbytes: int) -> int | None:
        """The offset of the first free block that is large enough; None if there is none."""
        for index, (start, length) in enumerate(self._free):
            if length >= nbytes:
                rest = [(start + nbytes, length - nbytes)] if length > nbytes else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, nbytes: int) -> None:
        """Free a block, and merge it with its neighbours."""
        merged: list[tuple[int, int]] = []
        for each in sorted([*self._free, (start, nbytes)]):
            if merged and sum(merged[-1]) == each[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + each[1])
            else:
                merged.append(each)
        self._free = merged

    @property
    def empty(self) -> bool:
        """Whether no block is taken."""
        return self._free == self._all
