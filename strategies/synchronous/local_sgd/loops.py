"""Loops of ranks that have unequal numbers of batches, and the averagings at their ends.

Every averaging needs all ranks. A rank whose batches have ended, or that has left its loop, can't
see whether another rank still trains. So it takes part in averagings, in which each rank reports
whether its loop is over, until all ranks report so in the same one. An averaging is the same call
at the end of a round and after a loop.

A rank whose batches have ended takes part before its loop ends. After `break` or an exception it
does so when its next call over the strategy's communicator, or the one that the strategy was made
from, begins, or at the end of the program. A loop begins with `iter`, so that one that ends before
its first batch counts on all ranks.

The end of a loop whose iterator is kept in a variable can't be detected. Such a loop is over once
another loop over the same dataset begins, and where this rank synchronizes or saves while others
end a round: a rank in the same loop would end it, too. Then the averaging counts as one after this
rank's loop, and its own follows those of the others' loops. The program's end ends every loop.

There is no deadlock: a rank outside of an averaging trains, waits for a batch, or runs the program
after its loop. A step ends, and the steps of a round are counted. Batches are read by the rank
itself or sent by a dataset rank, which waits only for credits of training ranks: a batch, the end
or an error arrives. After the loop a rank makes its next call, or ends its program, and takes part
before it; an uncaught exception is raised on the ranks that wait. Only a call over a third
communicator, or a message, is not detected: where the other ranks make it after their loops, all
wait for the deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from collectives import CollectiveError, Communicator
from collectives.consistency.uncaught import raised_on_all
from strategies.core.same_error import by_rank
from strategies.input import DatasetError
from strategies.input.failures import text_for_others

Batches = Generator[Any, None, None]

_END = object()
_ENDED = (
    "the loop is over on this rank: it called synchronize or Checkpoint.save while others ended a"
    " round in the loop; all ranks must do so after the same number of steps"
)


class Reason(enum.IntEnum):
    """The reason why a rank takes part in an averaging."""

    ROUND_ENDS = 0
    SYNCHRONIZE = 1
    SAVE = 2
    LOOP_IS_OVER = 3
    LOOP_FAILED = 4

    @property
    def in_loop(self) -> bool:
        """Whether the rank is in a loop, or began the averaging itself."""
        return self not in (Reason.LOOP_IS_OVER, Reason.LOOP_FAILED)


class Part(NamedTuple):
    """A rank's part in an averaging: the reason, and the number of the loop, from 1."""

    reason: Reason
    loop: int = 0


def without_left(parts: Sequence[Part]) -> list[Part]:
    """The parts, where those that synchronize or save while others end a round have left a loop."""
    if all(part.reason is not Reason.ROUND_ENDS for part in parts):
        return list(parts)
    asks = (Reason.SYNCHRONIZE, Reason.SAVE)
    over = Reason.LOOP_IS_OVER
    return [Part(over, p.loop) if p.reason in asks and p.loop else p for p in parts]


class Loops:
    """One rank's loops, numbered in the order in which they begin, which is the same on all."""

    def __init__(
        self,
        communicator: Communicator,
        world: Communicator,
        average: Callable[[Part], None],
    ) -> None:
        """`average` takes part in an averaging, and calls `note` with all ranks' parts.

        `world` is what the communicator was split from.
        """
        self._communicator, self._world, self._average = communicator, world, average
        communicator.at_end(self.leave_all)
        self._begun = 0
        self._open: dict[int, Batches] = {}
        """Those that began and did not end on this rank."""
        self._shared: set[int] = set()
        """Those that have not ended on all ranks, by the last averaging."""
        self._left: list[int] = []
        self._finishing = False
        self._failed: set[int] = set()
        self._failure: str | None = None

    def over(self, batches: Batches) -> Batches:
        """The batches; at their end it returns when all ranks' loops are over.

        What reading them raises is raised here, and as a DatasetError, after their next averaging,
        in the other ranks' loops. Raises RuntimeError where it goes on after `leave_all`.
        """
        self.finish()
        self._begun = number = self._begun + 1
        if number not in self._failed:
            self._shared.add(number)
        self._open[number] = batches
        loop = self._loop(number, batches)
        # A generator that never ran would be dropped without a word.
        next(loop)
        return loop

    def _loop(self, number: int, batches: Batches) -> Batches:
        try:
            yield None
            while (batch := self._read(number, batches)) is not _END:
                yield batch
                self._check(number)
                if number not in self._open:
                    raise RuntimeError(_ENDED)
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
            self._failure = text_for_others(self._communicator.rank, error)
            self._average(Part(Reason.LOOP_FAILED, number))
            raise

    def _check(self, number: int) -> None:
        if number in self._failed:
            raise DatasetError(self._failure)

    def _leave(self, number: int) -> None:
        batches = self._open.pop(number, None)
        if batches is None:
            return
        if number in self._shared:
            self._left.append(number)
            self._make_due()
        batches.close()

    def _make_due(self) -> None:
        self._communicator.before_next_call(self.finish)
        self._world.before_next_call(self._communicator.run_deferred)

    @property
    def current(self) -> int:
        """The loop that this rank is in; 0 for none."""
        return max(self._open, default=0)

    def leave_all(self) -> None:
        """End the loops of this rank, also those with kept iterators. Not collective."""
        for number in sorted(self._open, reverse=True):
            self._leave(number)

    def finish(self) -> None:
        """Average with the ranks that are still in loops that this rank has left. Collective."""
        if self._finishing:
            return  # the averaging's own calls are next ones, too
        self._finishing = True
        try:
            while self._left:
                self._average(Part(Reason.LOOP_IS_OVER, self._left[0]))
        except CollectiveError:
            # The call counts as not made: the others still wait for this rank.
            self._make_due()
            raise
        finally:
            self._finishing = False

    def note(self, parts: Sequence[Part]) -> None:
        """Take from an averaging which loops are over on all ranks. Collective.

        Raises DatasetError on all ranks where each waits for the others, in different loops.
        """
        loops = {part.loop for part in parts}
        if any(part.reason is Reason.LOOP_FAILED for part in parts):
            own, self._failure = self._failure, None
            texts = self._communicator.all_gather_object(own)
            self._failure = "; ".join(dict.fromkeys(text for text in texts if text is not None))
            ended = {part.loop for part in parts if part.loop and not part.reason.in_loop}
            self._failed |= self._shared | ended
            self._shared.clear()
            self._left.clear()
        elif all(part.reason is Reason.LOOP_IS_OVER for part in parts):
            self._shared -= loops
            self._left = [number for number in self._left if number in self._shared]
            if len(loops) > 1:
                text = (
                    "the ranks' loops have come apart: each waits for the others to leave its own"
                )
                error = DatasetError(by_rank(text, [f"loop {part.loop}" for part in parts]))
                raise raised_on_all(error, self._communicator.rank)
