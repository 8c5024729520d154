"""Progress counters: the order of writes and reads in the node's memory.

Data pass through stages, two for each rank, in numbered steps. Every rank of the node takes part in
every step. A rank's progress word is 2s + 1 once its stage of step s is written, and 2s + 2 once it
has read what it needs of the others' stages of step s. Before a rank writes its stage of step s,
which overwrites that of step s − 2, it waits until all ranks have read the latter.
"""

from __future__ import annotations

from collectives.shm.layout import MOST_NUMBERS, NUMBERS, PROGRESS, NodeMemory
from collectives.waiting.wait_policy import IN_CALL, WaitPolicy


class ProgressCounters:
    """One rank's progress through the steps."""

    def __init__(self, memory: NodeMemory, wait_policy: WaitPolicy, ranks: list[int]) -> None:
        """`ranks` are the numbers of the node's ranks in the whole group, for messages."""
        self.memory, self.ranks, self._wait_policy = memory, ranks, wait_policy
        # Used at every step: methods of their own would take longer than the stores.
        self._own, self._others, self._fence = memory.own, memory.others, memory.fence
        self.rank, self.size = memory.rank, memory.size
        self._step = 0

    def name(self, peer: int) -> str:
        """The node's rank of that number, for messages."""
        return self._wait_policy.name(self.ranks[peer])

    def await_free_stage(self, note: str = IN_CALL) -> int:
        """Wait until this rank's next stage may be written; the stage's parity.

        Messages show the note on the ranks that still read it.
        """
        value = 2 * self._step - 2
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value, note)
        if self._fence is not None:
            self._fence()
        return self._step & 1

    def mark_written(self) -> None:
        """Publish that the stage is written, or that this rank writes nothing in this step."""
        if self._fence is not None:
            self._fence()
        self._own[PROGRESS] = 2 * self._step + 1

    def await_written_by_all(self) -> int:
        """Wait until all ranks have written their stages of this step; the stages' parity."""
        self._await_all(2 * self._step + 1)
        return self._step & 1

    def await_written_by(self, peer: int) -> int:
        """Wait until one rank has written its stage of this step; the stage's parity."""
        if peer != self.rank:
            words, value = self.memory.words[peer], 2 * self._step + 1
            if words[PROGRESS] < value:
                self._await(words, value)
            if self._fence is not None:
                self._fence()
        return self._step & 1

    def finish_step(self) -> None:
        """Publish that this rank has read all it needs of this step, and start the next step."""
        if self._fence is not None:
            self._fence()
        self._step += 1
        self._own[PROGRESS] = 2 * self._step

    def barrier(self) -> None:
        """Barrier: a step without data."""
        fence, value = self._fence, 2 * self._step + 1
        if fence is not None:
            fence()
        self._own[PROGRESS] = value
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value)
        if fence is not None:
            fence()
        self._step += 1
        self._own[PROGRESS] = value + 1

    def exchange_numbers(self, *numbers: int) -> list[list[int]]:
        """Exchange a few numbers below 2^64 with every rank, in a step of its own.

        Returns every rank's numbers, in rank order. Raises ValueError for more than MOST_NUMBERS:
        they would overwrite the words behind.
        """
        index, count = NUMBERS[self._step & 1], len(numbers)
        if count > MOST_NUMBERS:
            raise ValueError(f"{count} numbers: at most {MOST_NUMBERS} can be exchanged at once")
        self._await_all(2 * self._step - 2)
        own = self.memory.own
        for number in numbers:
            own[index] = number
            index += 1
        self.mark_written()
        self._await_all(2 * self._step + 1)
        gathered = [words[index - count : index].tolist() for words in self.memory.words]
        self.finish_step()
        return gathered

    def _await_all(self, value: int) -> None:
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value)
        if self._fence is not None:
            self._fence()

    def _await(self, words: memoryview, value: int, note: str = IN_CALL) -> None:
        for _ in range(self._wait_policy.spins):
            if words[PROGRESS] >= value:
                return
        self._wait_policy.until(lambda: words[PROGRESS] >= value, lambda: self._behind(value, note))

    def _behind(self, value: int, note: str) -> dict[int, str]:
        return {
            self.ranks[peer]: note
            for peer, words in enumerate(self.memory.words)
            if words[PROGRESS] < value
        }
