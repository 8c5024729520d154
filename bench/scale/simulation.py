"""Event-driven simulation of a program on a network of LogGP links (see `networks`).

A rank runs its rounds as the executor does: it posts the sends, one after the other, waits for all
messages of the round, and folds. A message waits for the sender's port, travels, and waits for the
receiver's. Ports serve their messages in the order of their times, at equal times those of lower
ranks first. Times are integers, so that equal states are recognised: where a run of equal rounds
reaches a state for the second time, all its further periods are skipped at once.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from typing import Any, NamedTuple

from bench.scale.networks import LogGP, Network
from bench.scale.programs import Program, Turn

_TICKS_PER_SECOND = 10**15
_START, _LEAVE, _ARRIVE = range(3)
_FEWEST_SKIPPED = 32


def simulate(program: Program, network: Network, nbytes: float, *, skip: bool = True) -> float:
    """Seconds until the last rank has ended; chunks are of equal length, in fractions of a byte.

    `skip=False` simulates every round.
    """
    return _Simulation(program, network, nbytes / program.chunks).run(skip=skip)


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS_PER_SECOND)


class _Level:
    """A level's parameters, in ticks, and when its ports are free again, in both directions."""

    def __init__(self, link: LogGP, port_of: list[int], chunk_bytes: float) -> None:
        self.latency, self.overhead, self._gap = (
            _ticks(each) for each in (link.latency, link.overhead, link.gap)
        )
        self._per_chunk, self.port_of = link.gap_per_byte * chunk_bytes, port_of
        self.sending = [0] * (max(port_of) + 1)
        self.receiving = [0] * (max(port_of) + 1)

    def pass_through(self, free: list[int], rank: int, time: int, chunks: int) -> tuple[int, int]:
        """When a message starts to pass a rank's port, and when its last byte has passed."""
        port = self.port_of[rank]
        start, ticks = max(time, free[port]), _ticks(chunks * self._per_chunk)
        free[port] = start + max(self._gap, ticks)
        return start, start + ticks


class _Wait:
    """What a rank waits for in its round."""

    def __init__(self) -> None:
        self.round = self.unsent = self.posted = self.left = 0
        self.arrived: dict[int, list[tuple[int, int]]] = {}
        """By round: when each message had arrived, and its place."""

    def relative(self, time: int, number: int) -> tuple[Any, ...]:
        """The state as seen from a time and a round."""
        arrived = sorted(
            (its - number, [(when - time, place) for when, place in found])
            for its, found in self.arrived.items()
        )
        posted, left = self.posted - time, self.left - time
        return self.round - number, self.unsent, posted, left, arrived

    def advance(self, time: int, rounds: int) -> None:
        """The same state, later."""
        self.round, self.posted, self.left = (
            self.round + rounds,
            self.posted + time,
            self.left + time,
        )
        self.arrived = {
            its + rounds: [(when + time, place) for when, place in found]
            for its, found in self.arrived.items()
        }


class _Saved(NamedTuple):
    state: Any
    time: int
    round: int


class _Simulation:
    def __init__(self, program: Program, network: Network, chunk_bytes: float) -> None:
        count, local, ports = program.simulated, network.ranks_per_node, network.ports
        shared = [rank // local * ports + rank % local % ports for rank in range(count)]
        own = list(range(count))
        self._levels = (
            _Level(network.between, shared, chunk_bytes),
            _Level(network.inside, own, chunk_bytes),
        )
        self._program, self._ends = program, program.ends
        self._rounds = self._ends[-1] if self._ends else 0
        self._per_folded = chunk_bytes / network.reduction
        self._waits = [_Wait() for _ in own]
        self._heap = [(0, rank, 0, -1, _START) for rank in own]
        self._saved: _Saved | None = None

    def run(self, *, skip: bool) -> float:
        """Process all events."""
        last = 0
        act = {_START: self._start, _LEAVE: self._leave, _ARRIVE: self._arrive}
        while self._heap:
            time, rank, number, place, kind = event = heapq.heappop(self._heap)
            if kind != _START:
                act[kind](time, rank, number, place)
            elif number == self._rounds:
                last = max(last, time)
            elif skip and rank == 0 and self._is_skipped(event):
                continue
            else:
                self._start(time, rank, number, place)
        return last / _TICKS_PER_SECOND

    def _turn(self, rank: int, number: int) -> Turn:
        program = self._program
        return program.kinds[program.runs[bisect_right(self._ends, number)][0]][rank]

    def _start(self, time: int, rank: int, number: int, _: int) -> None:
        """Post the sends of a round."""
        turn, wait = self._turn(rank, number), self._waits[rank]
        for place, transfer in enumerate(turn.sends):
            time += self._levels[transfer.inside].overhead
            heapq.heappush(self._heap, (time, rank, number, place, _LEAVE))
        wait.round, wait.unsent, wait.posted, wait.left = number, len(turn.sends), time, time
        self._end_if_complete(rank, turn, wait)

    def _leave(self, time: int, rank: int, number: int, place: int) -> None:
        """A message reaches the sender's port."""
        turn, wait = self._turn(rank, number), self._waits[rank]
        inside, chunks, receiver, its_place = turn.sends[place]
        level = self._levels[inside]
        start, passed = level.pass_through(level.sending, rank, time, chunks)
        heapq.heappush(self._heap, (start + level.latency, receiver, number, its_place, _ARRIVE))
        wait.left = max(wait.left, passed)
        wait.unsent -= 1
        self._end_if_complete(rank, turn, wait)

    def _arrive(self, time: int, rank: int, number: int, place: int) -> None:
        """A message reaches the receiver's port, whether or not the rank is in its round."""
        turn, wait = self._turn(rank, number), self._waits[rank]
        inside, chunks, _ = turn.receives[place]
        level = self._levels[inside]
        _, passed = level.pass_through(level.receiving, rank, time, chunks)
        wait.arrived.setdefault(number, []).append((passed, place))
        if wait.round == number:
            self._end_if_complete(rank, turn, wait)

    def _end_if_complete(self, rank: int, turn: Turn, wait: _Wait) -> None:
        """Take what has arrived, wait until all sends have left, and fold."""
        arrived = wait.arrived.get(wait.round, ())
        if wait.unsent or len(arrived) < len(turn.receives):
            return
        time = wait.posted
        for passed, place in sorted(wait.arrived.pop(wait.round, ())):
            time = max(time, passed) + self._levels[turn.receives[place].inside].overhead
        folded = sum(each.chunks for each in turn.receives if each.folds)
        time = max(time, wait.left) + _ticks(folded * self._per_folded)
        heapq.heappush(self._heap, (time, rank, wait.round + 1, -1, _START))

    def _is_skipped(self, event: tuple[int, int, int, int, int]) -> bool:
        """Whether the event and all others were moved to a later round."""
        time, _, number, _, _ = event
        run = bisect_right(self._ends, min(wait.round for wait in self._waits))
        end = self._ends[run]
        highest = max(number, *(wait.round + 1 for wait in self._waits))
        if highest + _FEWEST_SKIPPED > end:
            return False
        # The same state in another run has other rounds before it.
        state, saved = (run, self._relative(time, number)), self._saved
        if saved is None or saved.state != state:
            # Farther and farther apart, so that any period is found in the end.
            if saved is None or number >= 2 * saved.round:
                self._saved = _Saved(state, time, number)
            return False
        periods = (end - highest) // (number - saved.round)
        self._saved = None
        if not periods:
            return False
        self._advance((time - saved.time) * periods, (number - saved.round) * periods, event)
        return True

    def _relative(self, time: int, number: int) -> Any:
        """The whole state as seen from a time and a round; ports that are free are all alike."""
        events = sorted(
            (when - time, rank, its - number, place, kind)
            for when, rank, its, place, kind in self._heap
        )
        ports = [
            [max(0, free - time) for free in frees]
            for level in self._levels
            for frees in (level.sending, level.receiving)
        ]
        return events, ports, [wait.relative(time, number) for wait in self._waits]

    def _advance(self, time: int, rounds: int, event: tuple[int, int, int, int, int]) -> None:
        heap = [*self._heap, event]
        self._heap = [
            (w + time, rank, its + rounds, place, kind) for w, rank, its, place, kind in heap
        ]
        heapq.heapify(self._heap)
        for level in self._levels:
            level.sending = [free + time for free in level.sending]
            level.receiving = [free + time for free in level.receiving]
        for wait in self._waits:
            wait.advance(time, rounds)
