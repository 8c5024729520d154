"""One round of a schedule, bound to buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from collectives.reductions.reduction import Action
from collectives.transports.base import Messages


@dataclass(frozen=True)
class BoundRound:
    """What one rank does in a round, on views of its buffers."""

    before: list[Action]
    sends: Messages
    receives: Messages
    after: list[Action]

    def in_segments(self, nbytes: int) -> Iterator[tuple[Messages, Messages]]:
        """Parts of the messages, at most so many bytes of each. Both ends cut a message alike."""
        longest = max(len(content) for _, content in (*self.sends, *self.receives))
        for start in range(0, longest, nbytes):
            yield _part(self.sends, start, nbytes), _part(self.receives, start, nbytes)


def _part(messages: Messages, start: int, nbytes: int) -> Messages:
    stop = start + nbytes
    return [(peer, content[start:stop]) for peer, content in messages if start < len(content)]
