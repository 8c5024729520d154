"""The order of writes and reads in the node's memory, in which nobody overwrites what others read.

Data go through stages, two to a rank, in numbered steps; every rank of the node takes part in every
step. A rank's progress word is 2s + 1 once its stage of step s is written and 2s + 2 once it has
read what it wanted of the others' stages of step s. Before it writes for step s, in the place of
step s − 2, it waits until all have read that.
"""

from __future__ import annotations

from collectives.shm.layout import MOST_TOLD, PROGRESS, TOLD, NodeMemory
from collectives.waiting.wait_policy import WaitPolicy


class ProgressCounters:
    """One rank's steps through the node's memory."""

    def __init__(self, memory: NodeMemory, wait_policy: WaitPolicy, ranks: list[int]) -> None:
        """`ranks` are the numbers of the node's ranks in the whole group, for messages."""
        self.memory, self.ranks, self._wait_policy = memory, ranks, wait_policy
        # Used at every step: methods of their own would take longer than the stores.
        self._own, self._others, self._fence = memory.own, memory.others, memory.fence
        self.rank, self.size = memory.rank, memory.size
        self._step = 0

    @property
    def turn(self) -> int:
        """A number that is the same on all ranks, one more every other step."""
        return self._step >> 1

    def begin(self) -> int:
        """The parity of this rank's next stage, when it may be written."""
        value = 2 * self._step - 2
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value)
        if self._fence is not None:
            self._fence()
        return self._step & 1

    def written(self) -> None:
        """Say that the stage is written, or that this rank has nothing to write in this step."""
        if self._fence is not None:
            self._fence()
        self._own[PROGRESS] = 2 * self._step + 1

    def stages(self) -> int:
        """The parity of everybody's stages of this step, when all have written them."""
        self._await_all(2 * self._step + 1)
        return self._step & 1

    def stage_of(self, peer: int) -> int:
        """The parity of one rank's stage of this step, when it has written it."""
        if peer != self.rank:
            words, value = self.memory.words[peer], 2 * self._step + 1
            if words[PROGRESS] < value:
                self._await(words, value)
            if self._fence is not None:
                self._fence()
        return self._step & 1

    def read(self) -> None:
        """Say that everything is read of this step; the next one begins."""
        if self._fence is not None:
            self._fence()
        self._step += 1
        self._own[PROGRESS] = 2 * self._step

    def together(self) -> None:
        """Wait until all have come here: a step in which nothing is staged."""
        fence, value = self._fence, 2 * self._step + 1
        if fence is not None:
            fence()
        self._own[PROGRESS] = value
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value)
        if fence is not None:
            fence()
            fence()
        self._step += 1
        self._own[PROGRESS] = value + 1

    def tell(self, *numbers: int) -> list[list[int]]:
        """A few numbers of every rank, each below 2^64: a step of its own.

        There is room for MOST_TOLD numbers; ValueError for more.
        """
        index, count = TOLD[self._step & 1], len(numbers)
        if count > MOST_TOLD:
            raise ValueError(f"{count} numbers: at most {MOST_TOLD} can be exchanged in a step")
        self._await_all(2 * self._step - 2)
        own = self.memory.own
        for number in numbers:
            own[index] = number
            index += 1
        self.written()
        self._await_all(2 * self._step + 1)
        told = [words[index - count : index].tolist() for words in self.memory.words]
        self.read()
        return told

    def _await_all(self, value: int) -> None:
        for words in self._others:
            if words[PROGRESS] < value:
                self._await(words, value)
        if self._fence is not None:
            self._fence()

    def _await(self, words: memoryview, value: int) -> None:
        for _ in range(self._wait_policy.spins):
            if words[PROGRESS] >= value:
                return
        self._wait_policy.until(lambda: words[PROGRESS] >= value, lambda: self._behind(value))

    def _behind(self, value: int) -> dict[int, str]:
        return {
            self.ranks[peer]: " in the middle of the call"
            for peer, words in enumerate(self.memory.words)
            if words[PROGRESS] < value
        }
