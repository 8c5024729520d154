"""Makes sure, before any data move, that all ranks of a group make the same call.

The ranks of a node meet in its memory (`shared.arrival`). Where there are several nodes, the lowest
rank of each then exchanges words with those of the others, and tells the rest of its node what came
of it. Ranks that share no memory are a node each.
"""

from __future__ import annotations

from collections.abc import Callable

from collectives.consistency.signature import FINGERPRINT_BITS, Signature, fingerprint
from collectives.errors import DeadlineExceededError, MismatchError
from collectives.shm.node_barrier import (
    ALIKE,
    DIFFERENT,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    Arrival,
    is_here,
)
from collectives.transports.base import Transport, Words
from collectives.waiting.wait_policy import Patience

# Instead of the fingerprint, in the word of a node whose own ranks differ.
_DIFFERENT = ((1 << FINGERPRINT_BITS) - 1) << SEQUENCE_BITS


class Agreement:
    """One rank's meetings with all others of its group."""

    def __init__(
        self,
        patience: Patience,
        arrival: Arrival | None,
        leaders: Transport | None,
        nodes: list[list[int]],
        describe: Callable[[Signature], MismatchError],
    ) -> None:
        """`arrival` is None for a rank alone on its node, `leaders` connects the nodes.

        `leaders` is None on one node, and on ranks that don't lead theirs. `nodes` holds the ranks
        of each node. `describe` exchanges what the ranks called, once they know that they differ.
        """
        self._patience, self.arrival, self._leaders = patience, arrival, leaders
        self._nodes, self._describe = nodes, describe
        self._several_nodes = len(nodes) > 1
        self._words = None if leaders is None else leaders.open_words()
        self.sequence = 0
        """The number of the last call that was made, or that other ranks may have seen."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.arrival is None or self.arrival.memory.rank == 0

    def meet(self, signature: Signature, line: str | None = None) -> None:
        """Return when every rank has made this call.

        Raises a MismatchError on every rank where they made different ones: the call is over then.
        Raises DeadlineExceededError where not all came in time: the call counts as not made.
        """
        self.meet_word(signature, fingerprint(signature.agreed) << SEQUENCE_BITS, line)

    def meet_word(self, signature: Signature, base: int, line: str | None = None) -> None:
        """As `meet`, for a caller that keeps the call's fingerprint where the word has it."""
        sequence = self.sequence + 1
        call = self._patience.call
        call.what, call.sequence, call.line = signature, sequence, line
        # Before any other rank can see the call: whatever ends it from here on is judged by that.
        self.sequence = sequence
        alike = self._withdrawing(self._meet, base | sequence & SEQUENCE_MASK, sequence)
        self._patience.met()
        if not alike:
            raise self._describe(signature)

    def meet_at(self, signature: Signature, word: int, sequence: int) -> None:
        """As `meet`, on one node, for a caller that has counted the call and stored its word."""
        call = self._patience.call
        call.what, call.sequence, call.line = signature, sequence, None
        assert self.arrival is not None
        if not self._withdrawing(self.arrival.await_all, word, sequence):
            raise self._describe(signature)

    def _withdrawing(self, wait: Callable[[int, int], bool], word: int, sequence: int) -> bool:
        """What `wait` returns; a call that was withdrawn is not counted."""
        try:
            return wait(word, sequence)
        except DeadlineExceededError as error:
            if error.withdrawn:
                self.sequence = sequence - 1
            raise

    def end(self) -> None:
        """Let the node's ranks know that this one makes no call any more."""
        if self.arrival is not None:
            self.arrival.end()

    def _meet(self, word: int, sequence: int) -> bool:
        if self.arrival is None:
            return self._ask_nodes(word, True)
        self.arrival.come(word, sequence)
        if not self._several_nodes:
            return self.arrival.await_all(word, sequence)
        if not self.leads:
            return self._follow(word, sequence)
        try:
            alike = self._ask_nodes(word, self.arrival.collect(word, sequence))
        except DeadlineExceededError:
            self.arrival.release()
            raise
        self.arrival.tell(ALIKE if alike else DIFFERENT, sequence)
        return alike

    def _follow(self, word: int, sequence: int) -> bool:
        assert self.arrival is not None
        return self.arrival.await_verdict(word, sequence) == ALIKE

    def _ask_nodes(self, word: int, alike: bool) -> bool:
        """Whether all nodes have the same word."""
        words = self._words
        if words is None:
            return alike
        number = word & SEQUENCE_MASK
        own = word if alike else _DIFFERENT | number
        words.post(own)

        def complete() -> bool:
            words.take()
            return not self._missing(words, number)

        try:
            for _ in range(self._patience.spins):
                if complete():
                    break
            else:
                self._patience.until(complete, lambda: self._absent(words, number))
        except DeadlineExceededError as error:
            # A node that sees this in time waits for the next word. One that has gone on already
            # finds this one in its call, if it makes the same again.
            words.post(number)
            error.withdrawn = True
            raise
        return alike and all(each == own for each in words.of(number))

    def _missing(self, words: Words, number: int) -> list[int]:
        come = words.of(number)
        return [node for node, word in enumerate(come) if not is_here(word, number)]

    def _absent(self, words: Words, number: int) -> dict[int, str]:
        missing = self._missing(words, number)
        came = words.of(number)
        # Of those, some may have left because of the others.
        missing = [node for node in missing if came[node] != number] or missing
        if self.arrival is not None:
            self.arrival.note_missing(missing)
        return ranks_of(self._nodes, missing)

    def close(self) -> None:
        """Give back what the way to the other nodes holds."""
        if self._words is not None:
            self._words.close()
        if self._leaders is not None and self.arrival is not None:
            self._leaders.close()


def ranks_of(nodes: list[list[int]], chosen: list[int]) -> dict[int, str]:
    """The ranks of some of the nodes, and what a message says of each."""
    return {
        rank: "" if len(nodes[node]) == 1 else f" of node {node}"
        for node in chosen
        for rank in nodes[node]
    }
