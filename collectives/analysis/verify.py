"""Verification that a schedule reaches its collective's postcondition, by symbolic execution.

Up to 256 ranks the symbols are exact: every chunk holds the set of ranks whose contributions were
folded into it. Beyond that, every rank's contribution is a random 64-bit number, folding is
addition modulo 2⁶⁴, and the end must equal the sum that the postcondition demands: a dropped,
doubled or misplaced contribution remains undetected with a probability of about 2⁻⁶⁴.

Where several ranks receive the fold of all contributions, they must fold in the same order, operand
by operand, because rounding and NaNs depend on it. A fingerprint identifies the order of a fold.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.analysis.traffic import Ends, Indices, messages
from collectives.errors import ScheduleError, check_integer
from collectives.schedules.schedule import Ranks, Round
from collectives.schedules.spec import ANYTHING, BELOW, EVERY, UP_TO, Spec, spec_of

EXACT_UP_TO = 256

Symbols = NDArray[np.uint64]

# Odd and different, so that exchanging the operands of a fold changes the fingerprint.
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class _State:
    """Content of every (rank, chunk), as symbols of shape (rank, chunk, word)."""

    def __init__(self, spec: Spec, size: int, chunks: int) -> None:
        self.spec, self.size, self.exact = spec, size, size <= EXACT_UP_TO
        self.contribution = self._exact_symbols() if self.exact else self._random_symbols()
        rank, chunk = np.arange(size)[:, None], np.arange(chunks)
        self.filled = np.array(np.broadcast_to(spec.before(rank, chunk, size), (size, chunks)))
        self.held = np.where(self.filled[..., None], self.contribution[:, None], np.uint64(0))
        leaves = self._random_symbols() if spec.reduces else np.zeros((size, 1), np.uint64)
        self.order = np.array(np.broadcast_to(leaves, (size, chunks)))
        self.busy = np.zeros((size, chunks), dtype=bool)
        self.overwritten = np.zeros((size, chunks), dtype=bool)

    def _exact_symbols(self) -> Symbols:
        """One bit for each rank."""
        symbols = np.zeros((self.size, -(-self.size // 64)), np.uint64)
        rank = np.arange(self.size)
        symbols[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
        return symbols

    def _random_symbols(self) -> Symbols:
        generator = np.random.default_rng(20260101)
        return generator.integers(1, 2**64, (self.size, 1), np.uint64, endpoint=False)

    def fold(self, rank: Indices, chunk: Indices, arrived: _Content, number: int) -> None:
        """Fold the arrived content; the lower rank's operand is the first one."""
        present, symbols = self.held[rank, chunk], arrived.symbols
        self.refuse(~self.filled[rank, chunk], "a fold into an empty chunk", number, rank, chunk)
        both = self.overwritten[rank, chunk]
        self.refuse(both, "received and folded in one round", number, rank, chunk)
        if self.exact:
            doubled = ((present & symbols) != 0).any(axis=-1)
            self.refuse(doubled, "a contribution that is there already", number, rank, chunk)
        self.held[rank, chunk] = present | symbols if self.exact else present + symbols
        own, lower = self.order[rank, chunk], arrived.source < rank
        first: Symbols = np.where(lower, arrived.order, own)
        second: Symbols = np.where(lower, own, arrived.order)
        mixed: Symbols = first * _FIRST + second * _SECOND
        self.order[rank, chunk] = mixed ^ (mixed >> np.uint64(29))

    def overwrite(self, rank: Indices, chunk: Indices, arrived: _Content, number: int) -> None:
        """Replace the content, which must be neither sent nor written in the same round."""
        self.refuse(self.busy[rank, chunk], "overwritten while in use", number, rank, chunk)
        self.busy[rank, chunk] = self.overwritten[rank, chunk] = True
        self.filled[rank, chunk] = True
        self.held[rank, chunk], self.order[rank, chunk] = arrived.symbols, arrived.order

    def read(self, rank: Indices, chunk: Indices, number: int) -> _Content:
        """Content to be sent."""
        self.refuse(~self.filled[rank, chunk], "an empty chunk is sent", number, rank, chunk)
        self.busy[rank, chunk] = True
        return _Content(rank, self.held[rank, chunk], self.order[rank, chunk])

    def require(self, rounds: int) -> None:
        """Raise ScheduleError if the postcondition does not hold at the end."""
        size, chunks = self.filled.shape
        rank, chunk = np.arange(size)[:, None], np.arange(chunks)
        origin = np.broadcast_to(self.spec.after(rank, chunk, size), (size, chunks))
        wanted = self.contribution[np.clip(origin, 0, size - 1)]
        wanted = np.where((origin == EVERY)[..., None], self.contribution.sum(axis=0), wanted)
        up_to = self.contribution.cumsum(axis=0, dtype=np.uint64)
        for code, prefix in ((UP_TO, up_to), (BELOW, up_to - self.contribution)):
            wanted = np.where((origin == code)[..., None], prefix[:, None], wanted)
        wrong = (origin != ANYTHING) & ((self.held != wanted).any(axis=-1) | ~self.filled)
        ranks, wrong_chunks = np.nonzero(wrong)
        problem = (
            f"the condition of {self.spec.name} does not hold at the end; the buffer has {chunks}"
            f" chunk{'s' * (chunks > 1)}"
        )
        self.refuse(np.ones(len(ranks), dtype=bool), problem, rounds, ranks, wrong_chunks)
        folded = np.broadcast_to(origin == EVERY, (size, chunks))
        first = self.order[folded.argmax(axis=0), np.arange(chunks)]
        ranks, wrong_chunks = np.nonzero(folded & (self.order != first))
        problem = "folded in another order than on a rank before, which may give other bits"
        self.refuse(np.ones(len(ranks), dtype=bool), problem, rounds, ranks, wrong_chunks)

    @staticmethod
    def refuse(
        wrong: NDArray[np.bool_], problem: str, number: int, rank: Ranks, chunk: Ranks
    ) -> None:
        """Raise ScheduleError for the first place where `wrong` holds."""
        if wrong.any():
            at = int(wrong.argmax())
            raise ScheduleError(problem, round=number, rank=int(rank[at]), chunk=int(chunk[at]))


class _Content(NamedTuple):
    """Content that some ranks send: the ranks, the contributions, and the order of their folds."""

    source: Indices
    symbols: Symbols
    order: Symbols


def _run_round(state: _State, steps: Round, number: int) -> None:
    size, chunks = state.filled.shape
    touched: list[tuple[Indices, Indices]] = []
    arrivals: list[tuple[bool, Indices, Indices, _Content]] = []
    for reduces, sent, received in messages(steps, size, chunks, number).by_step():
        for offset in range(int(received.count.max())):
            source, target = _nth_chunk(sent, offset, chunks), _nth_chunk(received, offset, chunks)
            differs = state.spec.block(*source, size) != state.spec.block(*target, size)
            state.refuse(differs, "another chunk's data is sent here", number, *target)
            arrivals.append((reduces, *target, state.read(*source, number)))
            touched += [source, target]
    for reduces, rank, chunk, arrived in arrivals:
        if reduces:
            state.fold(rank, chunk, arrived, number)
        else:
            state.overwrite(rank, chunk, arrived, number)
    for rank, chunk in touched:
        state.busy[rank, chunk] = state.overwritten[rank, chunk] = False


def _nth_chunk(ends: Ends, offset: int, chunks: int) -> tuple[Indices, Indices]:
    """The (rank, chunk) at `offset` in each run that is long enough."""
    long_enough = ends.count > offset
    return ends.rank[long_enough], (ends.chunk[long_enough] + offset) % chunks


def verify_schedule(spec: Spec, rounds: Iterable[Round], size: int, chunks: int) -> None:
    """Execute the rounds of all ranks at once; ScheduleError at the first rule broken."""
    state = _State(spec, size, chunks)
    number = -1
    for number, steps in enumerate(rounds):
        _run_round(state, steps, number)
    state.require(number + 1)


def verify(collective: str, algorithm: str, size: int) -> None:
    """Prove that an algorithm reaches its collective's postcondition on `size` ranks.

    Returns None. Raises ScheduleError, naming the round, rank and chunk of the first fault, and
    ValueError for an unknown collective or algorithm or a size below 1, TypeError for one that is
    no integer. The proof is exact up to 256 ranks and uses 64-bit fingerprints beyond; memory is
    about 50 bytes × ranks × chunks.
    """
    found = algorithms.find(collective, algorithm)
    size = check_integer("size", size, 1)
    rounds = found.schedule(np.arange(size), size)
    verify_schedule(spec_of(collective), rounds, size, found.chunks(size))
