"""The barrier of one of several nodes, its leader and another rank in one process."""

from types import SimpleNamespace

import pytest

from collectives.consistency.call_check import CallCheck
from collectives.errors import DeadlineExceededError
from collectives.shm import node_barrier, verdict_barrier
from collectives.shm.layout import ARRIVALS, COLLECTED, SEGMENT_BYTES, NodeMemory
from collectives.shm.node_barrier import word_of
from collectives.shm.verdict_barrier import ALIKE, DIFFERENT, VerdictBarrier
from collectives.waiting.wait_policy import WaitPolicy

SEQUENCE = 7
WORD = word_of(99, SEQUENCE)
INDEX = ARRIVALS[SEQUENCE & 1]


def barriers(size):
    """Those of the ranks of one node, the leader's first; each counts its fences."""
    segments = [memoryview(bytearray(SEGMENT_BYTES)) for _ in range(size)]
    made = []
    for rank in range(size):
        fences = []
        memory = NodeMemory(segments, rank, lambda fences=fences: fences.append("fence"))
        made.append(VerdictBarrier(memory, WaitPolicy(20), [4, 5, 6][:size], lambda nodes: {}))
        made[-1].fences = fences
    return made


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """All ranks are one thread, whose stores the system need not order."""
    for module in (node_barrier, verdict_barrier):
        monkeypatch.setattr(module, "order_all_threads", lambda: True)


@pytest.fixture
def pair():
    return barriers(2)


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


@pytest.mark.parametrize("name", ["collect", "wait_for_all"])
def test_a_rank_that_withdraws_and_makes_another_call_is_compared_again(name):
    leader, other, third = barriers(3)
    leader.arrive(WORD, SEQUENCE)
    other.arrive(WORD, SEQUENCE)

    def arrive(words, index, word):
        # The other rank was seen. It leaves at its deadline, before the third one comes.
        assert other._withdraw(INDEX, WORD)
        other.arrive(word_of(98, SEQUENCE), SEQUENCE)
        third.arrive(WORD, SEQUENCE)

    leader._await, leader.poll = arrive, lambda *arguments: False
    assert getattr(leader, name)(WORD, SEQUENCE) is False


def test_without_a_way_to_order_stores_a_call_that_may_be_collected_is_undecided(pair, monkeypatch):
    monkeypatch.setattr(verdict_barrier, "order_all_threads", lambda: False)
    leader, other = pair
    other.arrive(WORD, SEQUENCE)
    other._wait_policy.deadline = 0.01
    with pytest.raises(DeadlineExceededError) as caught:
        other.wait_for_verdict(WORD, SEQUENCE)
    assert not caught.value.withdrawn
    # The leader, which may have read the word, reads it still.
    leader.arrive(WORD, SEQUENCE)
    assert leader.collect(WORD, SEQUENCE)


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_node_whose_data_may_be_in_use_stays_committed(pair, withdrawn):
    leader, other = pair

    def agree(word, exchange, *, swapped):
        error = DeadlineExceededError("as of a wait for the own message", ())
        error.withdrawn = withdrawn
        raise error

    check = CallCheck(leader._wait_policy, leader, None, [[4, 5], [6]], lambda signature: None)
    check.nodes_check, check.sequence = SimpleNamespace(agree=agree), SEQUENCE
    other.arrive(WORD, SEQUENCE)
    with pytest.raises(DeadlineExceededError):
        check.check_counted(None, WORD)
    assert other._withdraw_leader(WORD, SEQUENCE) is withdrawn
