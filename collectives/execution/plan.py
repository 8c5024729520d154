"""From chunks to byte ranges: what one rank's rounds mean for its buffers.

A rank has three buffers: the source (the caller's input), the target (where the result grows) and
scratch. As long as a chunk has not been written it is read from the source, so that a call out of
place costs no copy of the input.
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
    """Fold two pieces into one; `out` is one of them, or its place in the target."""

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
    """Walks one rank's rounds and notes where every chunk's current content lies."""

    def __init__(self, rank: int, offsets: Sequence[int], has_source: bool) -> None:
        self.rank, self.offsets = rank, offsets
        self.chunks = len(offsets) - 1
        self.place = ["source" if has_source else "target"] * self.chunks
        self.scratch_used = self.scratch_needed = 0
        self.round = ResolvedRound()

    def resolve(self, steps: Sequence[Step]) -> ResolvedRound:
        """Resolve one round. Scratch is used anew in every round, since a round waits for all."""
        self.round, self.scratch_used = ResolvedRound(), 0
        # What is sent is the content at the beginning of the round; what is received twice is
        # folded into what came first.
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
                self.place[chunk] = "target"
        return self.round

    def _run(self, step: Step) -> list[int]:
        return [(step.chunk + offset) % self.chunks for offset in range(step.count)]

    def _pieces(self, step: Step) -> list[Piece]:
        """The run of chunks as ranges: neighbours in the same buffer are joined."""
        pieces: list[Piece] = []
        for chunk in self._run(step):
            start, stop = self.offsets[chunk], self.offsets[chunk + 1]
            last = pieces[-1] if pieces else None
            if last and last.stop == start and last.buffer == self.place[chunk]:
                pieces[-1] = Piece(last.buffer, last.start, stop)
            elif stop > start:
                pieces.append(Piece(self.place[chunk], start, stop))
        return pieces

    def _scratch(self, length: int) -> Piece:
        start = self.scratch_used
        self.scratch_used += length
        self.scratch_needed = max(self.scratch_needed, self.scratch_used)
        return Piece("scratch", start, start + length)

    def _to_send(self, pieces: list[Piece], length: int) -> Piece:
        """One piece as it is; several are packed first, since a message is one range of bytes."""
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
        """The lower rank's part comes first, whichever of the two ranks folds."""
        packed = self._scratch(length)
        self.round.receives.append((step.peer, packed))
        for theirs, mine in zip(_cut_like(packed, pieces), pieces, strict=True):
            first, second = (theirs, mine) if step.peer < self.rank else (mine, theirs)
            out = Piece("target", mine.start, mine.stop)
            self.round.folds.append(Fold(first, second, out))

    def left_behind(self, wanted: Sequence[bool]) -> list[Piece]:
        """What the result must hold and still lies in the source alone."""
        return [
            Piece("source", self.offsets[chunk], self.offsets[chunk + 1])
            for chunk in range(self.chunks)
            if wanted[chunk]
            and self.place[chunk] == "source"
            and self.offsets[chunk] < self.offsets[chunk + 1]
        ]


def _cut_like(piece: Piece, pattern: Sequence[Piece]) -> list[Piece]:
    """`piece` cut into as many pieces, of the same lengths, as the pattern."""
    cut, start = [], piece.start
    for each in pattern:
        cut.append(Piece(piece.buffer, start, start + each.stop - each.start))
        start += each.stop - each.start
    return cut
