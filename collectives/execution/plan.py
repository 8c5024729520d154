"""Resolution of one rank's rounds from chunks to element ranges of its buffers.

A rank has three buffers: the source (the caller's input), the target (which receives the result)
and scratch. A chunk is read from the source until it is first written, so that a call out of place
does not copy its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from collectives.schedules.schedule import Reduce, Send, Step


@dataclass(frozen=True)
class Piece:
    """A range of elements in one of the rank's buffers: "source", "target" or "scratch"."""

    buffer: str
    start: int
    stop: int


@dataclass(frozen=True)
class Fold:
    """Fold two pieces into `out`, which is one of them, or its range in the target."""

    first: Piece
    second: Piece
    out: Piece


@dataclass
class ResolvedRound:
    """A round in terms of pieces: copies, then messages, then copies and folds."""

    packs: list[tuple[Piece, Piece]] = field(default_factory=list)
    sends: list[tuple[int, Piece]] = field(default_factory=list)
    receives: list[tuple[int, Piece]] = field(default_factory=list)
    unpacks: list[tuple[Piece, Piece]] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)


class Resolver:
    """Resolves one rank's rounds, and tracks the buffer that holds each chunk's current content."""

    def __init__(self, rank: int, offsets: Sequence[int], has_source: bool) -> None:
        self.rank, self.offsets = rank, offsets
        self.chunks = len(offsets) - 1
        self.buffer_of = ["source" if has_source else "target"] * self.chunks
        self.scratch_used = self.scratch_needed = 0
        self.round = ResolvedRound()

    def resolve(self, steps: Sequence[Step]) -> ResolvedRound:
        """Resolve one round. Every round reuses the scratch, because a round ends with a wait."""
        self.round, self.scratch_used = ResolvedRound(), 0
        # Sends come first: they send the content at the start of the round. A chunk received twice
        # is folded into what was received first.
        for step in sorted(steps, key=lambda step: not isinstance(step, Send)):
            pieces = self._pieces(step)
            length = sum(piece.stop - piece.start for piece in pieces)
            if not length:
                continue
            if isinstance(step, Send):
                self.round.sends.append((step.peer, self._to_send(pieces, length)))
                continue
            if isinstance(step, Reduce):
                self._reduce(step, pieces, length)
            else:
                self._receive(step, pieces, length)
            for chunk in self._run(step):
                self.buffer_of[chunk] = "target"
        return self.round

    def _run(self, step: Step) -> list[int]:
        return [(step.chunk + offset) % self.chunks for offset in range(step.count)]

    def _pieces(self, step: Step) -> list[Piece]:
        """The run of chunks as ranges; adjacent chunks in the same buffer are joined."""
        pieces: list[Piece] = []
        for chunk in self._run(step):
            start, stop = self.offsets[chunk], self.offsets[chunk + 1]
            last = pieces[-1] if pieces else None
            if last and last.stop == start and last.buffer == self.buffer_of[chunk]:
                pieces[-1] = Piece(last.buffer, last.start, stop)
            elif stop > start:
                pieces.append(Piece(self.buffer_of[chunk], start, stop))
        return pieces

    def _scratch(self, length: int) -> Piece:
        start = self.scratch_used
        self.scratch_used += length
        self.scratch_needed = max(self.scratch_needed, self.scratch_used)
        return Piece("scratch", start, start + length)

    def _to_send(self, pieces: list[Piece], length: int) -> Piece:
        """A single piece as it is; several are packed, because a message is one range of bytes."""
        if len(pieces) == 1:
            return pieces[0]
        packed = self._scratch(length)
        self.round.packs += zip(pieces, _cut_like(packed, pieces), strict=True)
        return packed

    def _receive(self, step: Step, pieces: list[Piece], length: int) -> None:
        targets = [Piece("target", piece.start, piece.stop) for piece in pieces]
        if len(targets) == 1:
            self.round.receives.append((step.peer, targets[0]))
            return
        packed = self._scratch(length)
        self.round.receives.append((step.peer, packed))
        self.round.unpacks += zip(_cut_like(packed, targets), targets, strict=True)

    def _reduce(self, step: Step, pieces: list[Piece], length: int) -> None:
        """Fold with the lower rank's operand first, whichever of the two ranks folds."""
        packed = self._scratch(length)
        self.round.receives.append((step.peer, packed))
        for received, own in zip(_cut_like(packed, pieces), pieces, strict=True):
            first, second = (received, own) if step.peer < self.rank else (own, received)
            out = Piece("target", own.start, own.stop)
            self.round.folds.append(Fold(first, second, out))

    def remaining_in_source(self, wanted: Sequence[bool]) -> list[Piece]:
        """Parts of the result that are still in the source only."""
        return [
            Piece("source", self.offsets[chunk], self.offsets[chunk + 1])
            for chunk in range(self.chunks)
            if wanted[chunk]
            and self.buffer_of[chunk] == "source"
            and self.offsets[chunk] < self.offsets[chunk + 1]
        ]


def _cut_like(piece: Piece, pattern: Sequence[Piece]) -> list[Piece]:
    """`piece` cut into pieces of the pattern's lengths."""
    cut, start = [], piece.start
    for each in pattern:
        cut.append(Piece(piece.buffer, start, start + each.stop - each.start))
        start += each.stop - each.start
    return cut
