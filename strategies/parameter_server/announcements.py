"""What the chief announces to the other workers, as a server keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeAlias

Key: TypeAlias = tuple[str, int]
"""A kind of announcement, and the number of this one among those."""


class KeyValueStore:
    """The chief's announcements. Each listener requests those of a kind by number.

    A listener may repeat a request whose answer took too long: an announcement is kept until every
    remaining listener has found it.
    """

    def __init__(self, listeners: Iterable[int]) -> None:
        self._found: dict[int, Counter[str]] = {worker: Counter() for worker in listeners}
        """How many of each kind a listener has found."""
        self._values: dict[Key, bytes] = {}
        self._first: Counter[str] = Counter()

    def put(self, key: Key, value: bytes) -> None:
        """Keep a value, if there are listeners."""
        if self._found:
            self._values[key] = value

    def get(self, key: Key) -> bytes | None:
        """The value; None where it is not there yet."""
        return self._values.get(key)

    def found(self, listener: int, key: Key) -> None:
        """The listener has the value."""
        kind, number = key
        if listener in self._found:
            self._found[listener][kind] = number + 1
            self._drop(kind)

    def leave(self, listener: int) -> None:
        """It requests nothing any more."""
        if self._found.pop(listener, None) is not None:
            for kind in {kind for kind, _ in self._values}:
                self._drop(kind)

    def _drop(self, kind: str) -> None:
        if not self._found:
            self._values.clear()
            return
        least = min(found[kind] for found in self._found.values())
        while self._first[kind] < least:
            self._values.pop((kind, self._first[kind]), None)
            self._first[kind] += 1

    def __len__(self) -> int:
        return len(self._values)
