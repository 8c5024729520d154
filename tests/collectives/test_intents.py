"""Which calls the programs of all ranks wait in: all ranks find the same, and leave no trace."""

import random
import threading

import pytest

from collectives.shm.intents import Intents
from collectives.shm.layout import ARRIVALS, INTENDED, SEGMENT_BYTES, NodeMemory
from collectives.shm.node_barrier import word_of
from tests.collectives.oracle import case

ROUNDS = 300


def ranks_of(size):
    segments = [memoryview(bytearray(SEGMENT_BYTES)) for _ in range(size)]
    return [NodeMemory(segments, rank, None) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_find_the_same(size, hasty_threads):
    """Though each comes at another time, and waits for another one."""
    found, together = [[] for _ in range(size)], threading.Barrier(size)

    def one_rank(memory):
        intents, chance = Intents(memory), random.Random(memory.rank)
        for sequence in range(1, ROUNDS + 1):
            together.wait(20)
            for _ in range(chance.choice((0, 100, 5000))):
                pass
            found[memory.rank].append(intents.all_wait(sequence, chance.choice((0.0, 2e-4, 1.0))))
            # None ends its call before all have come to it.
            together.wait(20)
            intents.end()

    threads = [threading.Thread(target=one_rank, args=(memory,)) for memory in ranks_of(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    rounds = list(zip(*found, strict=True))
    assert len(rounds) == ROUNDS
    for sequence, each in enumerate(rounds, 1):
        with case("sequence", sequence):
            assert len(set(each)) == 1, each
    assert 0 < sum(map(all, rounds)) < ROUNDS


def test_who_waits(monkeypatch):
    one, other = (Intents(memory) for memory in ranks_of(2))

    def waits(sequence=5):
        """Whether the second rank, that waits for nobody, finds the first one waiting."""
        found = other.all_wait(sequence, -1.0)
        other.end()
        return found

    def interrupted():
        raise KeyboardInterrupt

    assert not waits()
    one._memory.publish(ARRIVALS[1], word_of(7, 5))
    assert waits(), "it is in a call that it waits for"
    one.note_queued(5)
    assert not waits(), "its other thread is in the call"
    one.unmade += 1
    assert not waits(), "however many others weren't made"
    one._memory.publish(ARRIVALS[1], 0)
    monkeypatch.setattr("os.sched_yield", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.all_wait(5, 1.0)
    assert one._memory.own[INTENDED] == 0
    assert not waits(), "it was interrupted"
    other.note_queued(4)
    monkeypatch.setattr("os.sched_yield", lambda: other.all_wait(5, -1.0))
    one.unmade = other.unmade = 2
    assert one.all_wait(5, 60.0), "the other has come"
    assert waits()
    other.unmade += 1
    assert not waits(), "that is a call after which this rank comes to another one"
    one.end()
    other.unmade -= 1
    assert not waits(), "its call has ended"
    monkeypatch.setattr("os.sched_yield", lambda: other.all_wait(6, -1.0))
    assert one.all_wait(6, 60.0)
    committed = other._memory.own[INTENDED]
    monkeypatch.setattr(one._memory, "order_loads", lambda: other.note_queued(6))
    assert not one.all_wait(6, 60.0), "the other left while this one committed itself"
    assert not waits(6), "it has left"
    monkeypatch.setattr(
        one._memory, "order_loads", lambda: other._memory.publish(INTENDED, committed)
    )
    other.note_queued(6)
    assert one.all_wait(6, 60.0), "the other committed itself while this one left"
