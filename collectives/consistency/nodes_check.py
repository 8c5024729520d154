"""Comparison of a call between nodes: rounds of messages while all are on time, a vote otherwise.

Once a rank has sent a message of the rounds (`dissemination`), its receiver may use the data at any
time, so that the sender can't withdraw the call any more. Therefore a leader that has waited for a
part of its deadline, the *lease*, requests a *vote*: it sends its word to all leaders, and may
withdraw at the deadline. Either the rounds or the vote may complete the call then. Once a leader
has received the words of all, it sends READY, and withdraws no more. Once all have sent READY, all
words are final: they are the same, and the rounds follow, or the calls differ.

A leader that may be late sends no message of the rounds, but votes at once, so that no data can be
used that were withdrawn. Every message of this call was sent after this leader took part in the
call before, since no leader completes a call without all others. So it is not late if it did so a
short time ago, the *gap*. A message that arrives in round k may be older than the one of round
k − 1 by another gap. After a withdrawal the data of the call are sent by new rounds.

The deadline that counts is the shortest of all ranks. The rounds send it to all leaders, for the
next call; they follow every vote on equal words. A leader whose deadline is shorter by then
votes at once: another one that began long after the call before would send its message, find itself
late when it receives this one's, and wait for an answer while this leader uses the data.

Between two nodes whose last call went well, and which are on time, the only round is a *swap*: the
same message in each direction, without the state of rounds. What is unusual goes on as rounds.

A leader completes the rounds in the first half of its deadline alone, though its process may have
been stopped meanwhile. One that completes them during a vote sends COMPLETE to all. One that had
completed them before the vote does so at its next call. If it is stopped for a deadline before
that, the others withdraw the call, and their repetition raises UnusableError.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from collectives.consistency.dissemination import DIFFERENT, Dissemination, Exchange, Rounds
from collectives.consistency.lateness import Lateness
from collectives.consistency.signature import FINGERPRINT_BITS
from collectives.errors import DeadlineExceededError, UnusableError
from collectives.shm.node_barrier import GRACE_SECONDS, SEQUENCE_BITS, SEQUENCE_MASK
from collectives.transports.base import Transport
from collectives.waiting.wait_policy import YIELDS, WaitPolicy

# In place of a fingerprint, in messages to all leaders.
_WITHDRAWN, _COMPLETE = 1, 2
# Marks the word of a leader that has withdrawn one before, and the rounds after such a vote.
_REPEATED = 1 << (SEQUENCE_BITS + FINGERPRINT_BITS - 1)
# Marks the word of a leader that has received those of all, and withdraws its own no more.
_READY = _REPEATED >> 1
_FLAGS = _REPEATED | _READY


class NodesCheck:
    """The side of one node's leader."""

    def __init__(
        self,
        leaders: Transport,
        wait_policy: WaitPolicy,
        absent: Callable[[list[int]], dict[int, str]],
    ) -> None:
        """`absent` publishes the nodes that are waited for, and returns their ranks."""
        self._wait_policy, self._absent_ranks = wait_policy, absent
        self._words = leaders.open_control_channel()
        self.rounds = Dissemination(leaders, wait_policy, absent)
        self.lateness = Lateness(wait_policy, self.rounds.count)
        self._completed = self._answered = self._withdrawn = -1
        """The last numbers of calls: by rounds alone, answered COMPLETE, withdrawn."""

    def complete(self, number: int) -> bool:
        """Note that the message of a swap has arrived; False if this process was stopped before."""
        if self.lateness.stopped():
            return False
        self._completed, self._answered = number, -1
        return True

    def wait_until_sent(self, number: int) -> None:
        """Wait until the message of a swap is sent."""
        self.rounds.wait_until_sent(self.rounds.channels[0], number, self.answer_request)

    def agree(self, word: int, exchange: Exchange | None, *, swapped: bool = False) -> bool:
        """Return when every node has sent a word of this number; whether all are the same.

        The data are exchanged if they are. At the deadline the word is withdrawn before the error
        is raised, unless its `withdrawn` is False. `swapped`: after `on_time`, the message of the
        swap has been sent.
        """
        number, wait_policy, late = word & SEQUENCE_MASK, self._wait_policy, False
        if not swapped and self.rounds.count == 1 and self.lateness.on_time():
            if self.rounds.swap(word, exchange) and self.complete(number):
                if exchange is not None:
                    self.rounds.take(exchange)
                if not self.rounds.end_swap():
                    self.wait_until_sent(number)
                return True
            swapped = True
        if swapped:
            rounds = self.rounds.after_swap(word, exchange)
        else:
            late = self.lateness.begin() or self._withdrawn == number
            rounds = Rounds(word, exchange, self.lateness.own_deadline())
        # In most calls the messages arrive while the first look for them spins.
        complete = not late and (
            self.rounds.advance(rounds, wait_policy.spins or 1) or self._run(rounds)
        )
        if not complete or self.lateness.stopped(rounds.deadline):
            rounds = self._vote(rounds, late)
            received = self._words.of(number)
            received[:] = [0] * len(received)
        else:
            self._completed, self._answered = number, -1
        if rounds.alike:
            self.lateness.settle(rounds.deadline)
        else:
            # The deadline that was sent last may be that of this call.
            self.lateness.unsettle()
        self.rounds.finish(rounds, self.answer_request)
        return rounds.alike

    def disagree(self, number: int) -> bool:
        """As `agree`, of a node whose own ranks have made different calls: False."""
        # A swap would take two nodes of this kind for alike.
        self.lateness.unsettle()
        return self.agree(DIFFERENT << SEQUENCE_BITS | number, None)

    def _run(self, rounds: Rounds) -> bool:
        """Run the rounds; False if the lease has passed, or a vote is requested."""
        advance = self.rounds.advance
        # Most messages are here after a few yields: a look for requests takes longer than they do.
        for _ in range(YIELDS):
            if advance(rounds):
                return True
            os.sched_yield()
        complete = False

        def over() -> bool:
            nonlocal complete
            complete = advance(rounds)
            ends = complete or self.lateness.lease_is_over(rounds.deadline)
            return ends or self._vote_requested(rounds.number)

        absent, began = partial(self.rounds.absent, rounds), self.lateness.began
        in_transit = self._wait_policy.call.moves_data(rounds.exchange)
        self._wait_policy.until(over, absent, start=began, in_transit=in_transit)
        return complete

    def _vote_requested(self, number: int) -> bool:
        """Whether any leader requests a vote on the call; answers requests for the one before."""
        self.answer_request(number)
        return self._is_requested(number)

    def _take(self, number: int) -> None:
        """Receive words, and drop those of calls that are over: numbers return after 2^16 calls."""
        if self._words.take():
            kept = number, number + 1 & SEQUENCE_MASK, self._completed
            for received in map(self._words.of, (number, number + 1)):
                for node, word in enumerate(received):
                    if word & SEQUENCE_MASK not in kept:
                        received[node] = 0

    def answer_request(self, number: int) -> None:
        """Answer a request for the last call that was completed, if there is one."""
        self._take(number)
        if self._completed != self._answered and self._is_requested(self._completed):
            self._answer(self._completed)

    def _is_requested(self, number: int) -> bool:
        """Even by a word that was withdrawn since."""
        withdrawn = _WITHDRAWN << SEQUENCE_BITS | number
        return any(_is_word(each, number) or each == withdrawn for each in self._words.of(number))

    def _answer(self, number: int) -> None:
        self._answered = number
        self._words.post(_COMPLETE << SEQUENCE_BITS | number)

    def _vote(self, rounds: Rounds, late: bool) -> Rounds:
        """Vote on the call; its rounds, completed if the words are the same.

        If `late` none has been sent yet.
        """
        number, word = rounds.number, rounds.word & ~_FLAGS
        repeated = self._withdrawn == number
        received, by_rounds = self._words.of(number), False

        def decided() -> bool:
            nonlocal by_rounds
            self.answer_request(number)
            by_rounds = (
                not late
                and self.rounds.advance(rounds)
                and not self.lateness.stopped(rounds.deadline)
                and not self._was_withdrawn(number)
            )
            return by_rounds or not self._missing(number) or self._was_completed(number)

        self._words.post(word | _REPEATED if repeated else word)
        try:
            self._wait_policy.spin_until(decided, lambda: self._absent(number), self.lateness.began)
        except DeadlineExceededError as error:
            # The others wait for the next word: those that are READY already, for longer than their
            # deadlines.
            self._words.post(_WITHDRAWN << SEQUENCE_BITS | number)
            self._withdrawn, error.withdrawn = number, True
            self.lateness.unsettle()
            raise
        self._withdrawn = -1
        self._wait_policy.limit = None
        again = False
        if not by_rounds and not self._was_completed(number):
            again = self._confirm(word, repeated)
        by_rounds = by_rounds or self._was_completed(number)
        if by_rounds:
            if repeated:
                raise UnusableError(f"other nodes have made call {number} with withdrawn data")
            self._completed = number
            self._answer(number)
        elif any((each ^ word) & ~_FLAGS for each in received):
            rounds.differ()
        elif again and rounds.alike:
            rounds = Rounds(rounds.word ^ _REPEATED, rounds.exchange, rounds.deadline, only=True)
        if by_rounds or rounds.alike:
            advance = partial(self.rounds.advance, rounds)
            absent = partial(self.rounds.absent, rounds)
            in_transit = self._wait_policy.call.moves_data(rounds.exchange)
            self._wait_for_all(advance, absent, in_transit=in_transit)
        return rounds

    def _confirm(self, word: int, repeated: bool) -> bool:
        """Wait until all words are final; whether any leader has withdrawn one, on all the same.

        All have sent their words. One that was received may have been withdrawn: its leader sends
        READY only when it makes its next call, which may be another one.
        """
        number = word & SEQUENCE_MASK
        received = self._words.of(number)
        repeated = repeated or self._was_withdrawn(number)
        self._words.post(word | _READY | (_REPEATED if repeated else 0))

        def unready() -> list[int]:
            return [
                node
                for node, each in enumerate(received)
                if not (_is_word(each, number) and each & _READY)
            ]

        def ready() -> bool:
            self.answer_request(number)
            return not unready() or self._was_completed(number)

        self._wait_for_all(ready, lambda: self._absent_ranks(unready()))
        return any(each & _REPEATED for each in received)

    def _wait_for_all(
        self,
        ready: Callable[[], bool],
        absent: Callable[[], dict[int, str]],
        *,
        in_transit: bool = False,
    ) -> None:
        """Wait longer than the deadline, because all leaders rely on each other."""
        self._wait_policy.until(ready, absent, GRACE_SECONDS, in_transit=in_transit)

    def _was_withdrawn(self, number: int) -> bool:
        """Whether any other leader has withdrawn its word of this call."""
        withdrawn = _WITHDRAWN << SEQUENCE_BITS | number
        repeated = (each & _REPEATED and _is_word(each, number) for each in self._words.of(number))
        return withdrawn in self._words.of(number) or any(repeated)

    def _missing(self, number: int) -> list[int]:
        received = self._words.of(number)
        return [node for node, word in enumerate(received) if not _is_word(word, number)]

    def _was_completed(self, number: int) -> bool:
        return _COMPLETE << SEQUENCE_BITS | number in self._words.of(number)

    def _absent(self, number: int) -> dict[int, str]:
        missing, received = self._missing(number), self._words.of(number)
        # Some of the missing nodes may have withdrawn because of the others.
        withdrawn = _WITHDRAWN << SEQUENCE_BITS | number
        missing = [node for node in missing if received[node] != withdrawn] or missing
        return self._absent_ranks(missing)

    def close(self) -> None:
        """Close the channels."""
        self.rounds.close()
        self._words.close()


def _is_word(word: int, number: int) -> bool:
    """Whether it is the word of a call of that number, neither withdrawn nor complete."""
    return word & SEQUENCE_MASK == number and word >> SEQUENCE_BITS > _COMPLETE
