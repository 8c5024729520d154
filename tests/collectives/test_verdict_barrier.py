"""The barrier of one of several nodes, its leader and another rank in one process."""

import pytest

from collectives.errors import DeadlineExceededError
from collectives.shm import verdict_barrier
from collectives.shm.layout import ARRIVALS, COLLECTED, SEGMENT_BYTES, NodeMemory
from collectives.shm.node_barrier import word_of
from collectives.shm.verdict_barrier import ALIKE, DIFFERENT, VerdictBarrier
from collectives.waiting.wait_policy import WaitPolicy

SEQUENCE = 7
WORD = word_of(99, SEQUENCE)
INDEX = ARRIVALS[SEQUENCE & 1]


@pytest.fixture
def pair(monkeypatch):
    """The leader's barrier and the other rank's, of one memory; both count fences."""
    # Of one thread, which the system need not order.
    monkeypatch.setattr(verdict_barrier, "order_all_threads", lambda: True)
    segments = [memoryview(bytearray(SEGMENT_BYTES)) for _ in range(2)]
    barriers = []
    for rank in range(2):
        fences = []
        memory = NodeMemory(segments, rank, lambda fences=fences: fences.append("fence"))
        barriers.append(VerdictBarrier(memory, WaitPolicy(20), [4, 5], lambda nodes: {}))
        barriers[-1].fences = fences
    return barriers


def test_a_rank_that_was_collected_does_not_withdraw(pair):
    leader, other = pair
    leader.arrive(WORD, SEQUENCE)
    assert not leader.collect_soon(WORD, SEQUENCE)
    other.arrive(WORD, SEQUENCE)
    fences = len(leader.fences)
    assert leader.collect_soon(WORD, SEQUENCE)
    # One before the publication, and one after the other rank's word was read.
    assert len(leader.fences) == fences + 2
    assert not other._withdraw_leader(WORD, SEQUENCE)
    assert other.memory.own[INDEX] == WORD
    leader.release()
    assert other._withdraw_leader(WORD, SEQUENCE)
    assert other.memory.own[INDEX] != WORD


def test_a_rank_that_withdraws_while_it_is_collected_is_not(pair):
    leader, other = pair
    leader.arrive(WORD, SEQUENCE)
    other.arrive(WORD, SEQUENCE)
    publish, withdrawn = leader.memory.publish, []

    def publish_late(index, value):
        # The other rank was seen, and withdraws before the leader's store is visible.
        if index == COLLECTED and not withdrawn:
            withdrawn.append(other._withdraw_leader(WORD, SEQUENCE))
        publish(index, value)

    leader.memory.publish = publish_late
    assert not leader.collect_soon(WORD, SEQUENCE)
    assert withdrawn == [True]
    assert leader.memory.own[COLLECTED] == 0
    other.arrive(WORD, SEQUENCE)
    withdrawn.clear()
    waited = []

    def arrive_again(words, index, word):
        waited.append(leader.memory.own[COLLECTED])
        other.arrive(WORD, SEQUENCE)
        return True

    leader._await, leader.poll = arrive_again, lambda *arguments: False
    fences = len(leader.fences)
    assert leader.collect(WORD, SEQUENCE)
    # It waited until the rank was there again, and committed it then alone.
    assert (withdrawn, waited) == ([True], [0])
    assert leader.memory.own[COLLECTED] == WORD
    # Before three publications, and after the last word was read.
    assert len(leader.fences) == fences + 4


def test_the_verdict_of_this_call_is_read_with_a_fence(pair):
    leader, other = pair
    other.arrive(WORD, SEQUENCE)
    leader.publish_verdict(ALIKE, SEQUENCE - 2)
    other._wait_policy.deadline = 0.01
    with pytest.raises(DeadlineExceededError):
        other.wait_for_verdict(WORD, SEQUENCE)
    for verdict in (DIFFERENT, ALIKE):
        leader.publish_verdict(verdict, SEQUENCE)
        fences = len(other.fences)
        assert other.wait_for_verdict(WORD, SEQUENCE) == verdict
        assert len(other.fences) == fences + 1
