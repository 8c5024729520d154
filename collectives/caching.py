"""The cache of what calls have looked up or made, bounded by the number of its entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_KEPT = 1024


class LRU(OrderedDict[Key, Value]):
    """The entries that were stored or recalled last, `kept` at most.

    `get` doesn't count as use, so that a lookup costs no more than a dict's: `recall` does. Several
    threads may use it.
    """

    def __init__(self, kept: int = _KEPT) -> None:
        super().__init__()
        self.kept = kept

    def recall(self, key: Key) -> Value | None:
        """The entry, from now on the last one used; None where there is none."""
        value = self.get(key)
        if value is not None:
            try:
                self.move_to_end(key)
            except KeyError:  # another thread has evicted it
                return self.put(key, value)
        return value

    def put(self, key: Key, value: Value) -> Value:
        """Store an entry and return it; where there are too many, drop the least recently used."""
        # Also one that was there is the last one then.
        self.pop(key, None)
        self[key] = value
        if len(self) > self.kept:
            self.popitem(last=False)
        return value
