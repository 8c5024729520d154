"""Loops of ranks that have unequal numbers of batches: who is through goes on averaging.

Every averaging needs all ranks, and a rank whose batches have ended, or which has broken out of its
loop, doesn't know whether another one still trains. So it takes part in averagings, in which each
rank tells whether its loop is over, until all ranks have told so in the same one. The call that it
takes part in is the one that a training rank makes at the end of its round: no rank has to guess
which comes next.

Where its batches have ended a rank does so before its loop ends. Where it leaves the loop before,
by `break` or an exception, it can't know whether the program goes on; it does so as its next call
of the strategy's communicator begins, whatever that is for.

Nobody waits for ever: a rank that isn't in an averaging trains, waits for a batch, or runs the
program after its loop. A step ends, and the steps of a round are counted. Batches come from the
rank itself or from a dataset rank, which waits for no training rank but for its credits: a batch
comes, or the end, or an error. After the loop a rank comes to its next call, or ends, which raises
on those that wait.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from collectives import CollectiveError, Communicator
from collectives.uncaught import raised_on_all
from strategies.input import DatasetError
from strategies.input.failures import as_told

Batches = Generator[Any, None, None]

_END = object()


class Reason(enum.IntEnum):
    """Why a rank takes part in an averaging."""

    ROUND_ENDS = 0
    SYNCHRONIZE = 1
    SAVE = 2
    LOOP_IS_OVER = 3
    LOOP_FAILED = 4

    @property
    def in_loop(self) -> bool:
        """Whether the rank called for the averaging, and doesn't only take part in it."""
        return self not in (Reason.LOOP_IS_OVER, Reason.LOOP_FAILED)


class Part(NamedTuple):
    """What a rank tells in an averaging: why it takes part, and of which loop, from 1."""

    reason: Reason
    loop: int = 0


class Loops:
    """One rank's loops, numbered in the order in which they begin, which is the same on all."""

    def __init__(self, communicator: Communicator, average: Callable[[Part], None]) -> None:
        """`average` takes part in an averaging, and calls `note` with all ranks' parts."""
        self._communicator, self._average = communicator, average
        self._begun = 0
        self._shared: set[int] = set()
        """Those that aren't over on all ranks, as far as this one knows."""
        self._left: list[int] = []
        self._finishing = False
        self._failed: set[int] = set()
        self._failure: str | None = None

    def over(self, batches: Batches) -> Batches:
        """The batches; at their end it returns when all ranks' loops are over.

        What reading them raises is raised here, and as a DatasetError, after their next averaging,
        in the other ranks' loops.
        """
        self.finish()
        self._begun = number = self._begun + 1
        if number not in self._failed:
            self._shared.add(number)
        try:
            with closing(batches):
                while (batch := self._read(number, batches)) is not _END:
                    yield batch
                    self._check(number)
        finally:
            self._leave(number)
        self.finish()
        self._check(number)

    def _read(self, number: int, batches: Batches) -> Any:
        try:
            return next(batches, _END)
        except CollectiveError:
            raise  # the other ranks see it by themselves
        except Exception as error:
            self._failure = as_told(self._communicator.rank, error)
            self._average(Part(Reason.LOOP_FAILED, number))
            raise

    def _check(self, number: int) -> None:
        if number in self._failed:
            raise DatasetError(self._failure)

    def _leave(self, number: int) -> None:
        if number in self._shared:
            self._left.append(number)
            self._communicator.before_next_call(self.finish)

    def finish(self) -> None:
        """Average with those that are still in loops that this rank has left. Collective."""
        if self._finishing:
            return  # the averaging's own calls are next ones, too
        self._finishing = True
        try:
            while self._left:
                self._average(Part(Reason.LOOP_IS_OVER, self._left[0]))
        except CollectiveError:
            # The call counts as not made: the others go on to wait for this rank.
            self._communicator.before_next_call(self.finish)
            raise
        finally:
            self._finishing = False

    def note(self, parts: Sequence[Part]) -> None:
        """Learn from an averaging which loops are over on all ranks. Collective.

        Raises DatasetError on all ranks where each waits for the others, in different loops.
        """
        loops = {part.loop for part in parts}
        if any(part.reason is Reason.LOOP_FAILED for part in parts):
            own, self._failure = self._failure, None
            texts = self._communicator.all_gather_object(own)
            self._failure = "; ".join(dict.fromkeys(text for text in texts if text is not None))
            self._failed |= self._shared | {part.loop for part in parts if part.loop}
            self._shared.clear()
            self._left.clear()
        elif all(part.reason is Reason.LOOP_IS_OVER for part in parts):
            self._shared -= loops
            self._left = [number for number in self._left if number in self._shared]
            if len(loops) > 1:
                lines = [f"  rank {rank}: loop {part.loop}" for rank, part in enumerate(parts)]
                text = (
                    "the ranks' loops have come apart: each waits for the others to leave its own"
                )
                error = DatasetError("\n".join([text, *lines]))
                raise raised_on_all(error, self._communicator.rank)
