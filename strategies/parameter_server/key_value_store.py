"""What the chief lets the other workers know, each thing kept until nobody will ask for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Key = tuple[str, int]
"""A kind of thing, and the number of this one among those."""


class KeyValueStore:
    """By their keys. Each listener asks for those of a kind in the order of their numbers.

    One may be asked for twice, where the first answer took too long: it is kept until all listeners
    that are left have asked for the next one of its kind.
    """

    def __init__(self, listeners: Iterable[int]) -> None:
        self._asked: dict[int, Counter[str]] = {worker: Counter() for worker in listeners}
        self._values: dict[Key, bytes] = {}
        self._first: Counter[str] = Counter()

    def put(self, key: Key, value: bytes) -> None:
        """Keep one, where anybody listens."""
        if self._asked:
            self._values[key] = value

    def get(self, listener: int, key: Key) -> bytes | None:
        """One that a listener asks for; None where it is not there yet."""
        kind, number = key
        if listener in self._asked:
            self._asked[listener][kind] = number
            self._forget(kind)
        return self._values.get(key)

    def leave(self, listener: int) -> None:
        """It asks for nothing any more."""
        if self._asked.pop(listener, None) is not None:
            for kind in {kind for kind, _ in self._values}:
                self._forget(kind)

    def _forget(self, kind: str) -> None:
        if not self._asked:
            self._values.clear()
            return
        least = min(asked[kind] for asked in self._asked.values())
        while self._first[kind] < least:
            self._values.pop((kind, self._first[kind]), None)
            self._first[kind] += 1

    def __len__(self) -> int:
        return len(self._values)
