"""On machines that reorder loads and stores, a fence precedes each published word and follows each
word that is read."""

import threading

import numpy as np
import pytest

from collectives.reductions.reduction import ReduceOp
from collectives.shm.copy_in_copy_out import CopyInCopyOut
from collectives.shm.layout import PROGRESS, SEGMENT_BYTES, NodeMemory
from collectives.shm.node_barrier import NodeBarrier, word_of
from collectives.shm.progress import ProgressCounters
from collectives.waiting.wait_policy import WaitPolicy


class Watched(NodeMemory):
    """Records the order of fences, publications and the following reads of buffers."""

    def __init__(self, segments, rank):
        self.events = []
        super().__init__(segments, rank, lambda: self.events.append("fence"))
        self.own = Stores(self.own, self.events)


class Stores:
    """The words of one rank, whose stores are noted."""

    def __init__(self, words, events):
        self.words, self.events = words, events

    def __getitem__(self, index):
        return self.words[index]

    def __setitem__(self, index, value):
        self.words[index] = value
        self.events.append("publish")


def run_ranks(size, function):
    """Call function(memory, patience) in a thread for each rank of one memory; the memories."""
    segments = [memoryview(bytearray(SEGMENT_BYTES)) for _ in range(size)]
    memories = [Watched(segments, rank) for rank in range(size)]
    failures = []

    def one_rank(memory):
        wait_policy = WaitPolicy(20)
        wait_policy.sleep_early()
        try:
            function(memory, wait_policy)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=one_rank, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    return memories


@pytest.mark.parametrize("size", [2, 3])
def test_a_collective_between_threads_publishes_and_sees_with_fences(size):
    results = {}

    def one_rank(memory, wait_policy):
        steps = ProgressCounters(memory, wait_policy, list(range(size)))
        target = np.empty(500)
        given = np.arange(500.0) * (memory.rank + 1)
        CopyInCopyOut(steps, ReduceOp.SUM, target.dtype).all_reduce(given, target, (), 0)
        results[memory.rank] = target
        assert memory.own[PROGRESS] == (2 if size == 2 else 4)

    memories = run_ranks(size, one_rank)
    for target in results.values():
        np.testing.assert_array_equal(target, np.arange(500.0) * sum(range(1, size + 1)))
    for memory in memories:
        events = memory.events
        assert "publish" in events
        for place, event in enumerate(events):
            if event == "publish":
                assert place
                assert events[place - 1] == "fence"
        # What was published was read by others after a fence of their own.
        assert events.count("fence") > events.count("publish")


def test_a_meeting_ends_with_a_fence():
    def one_rank(memory, wait_policy):
        node_barrier = NodeBarrier(memory, wait_policy, [0, 1])
        for sequence in range(1, 50):
            word = word_of(77, sequence)
            node_barrier.arrive(word, sequence)
            assert node_barrier.wait_for_all(word, sequence)
            assert memory.events[-1] == "fence"
            assert memory.events[-3:-1] == ["fence", "publish"]

    run_ranks(2, one_rank)


def test_ranks_that_differ_see_it():
    seen = {}

    def one_rank(memory, wait_policy):
        node_barrier = NodeBarrier(memory, wait_policy, [0, 1, 2])
        word = word_of(5 if memory.rank == 1 else 6, 1)
        node_barrier.arrive(word, 1)
        seen[memory.rank] = node_barrier.wait_for_all(word, 1)

    run_ranks(3, one_rank)
    assert seen == {0: False, 1: False, 2: False}
