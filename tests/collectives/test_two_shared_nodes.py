"""Two nodes of two ranks: small reductions, whose check is written out where all goes as usual."""

import sys
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, DeadlineExceededError, ShapeMismatchError
from collectives.shm.layout import MISSING_NODES
from collectives.waiting.wait_policy import WaitPolicy
from tests.collectives.waiting import wait_for_all

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(4)]

NODE_OF = [0, 0, 1, 1]
WAITED, COLLECTED = "waited for the verdict", "collected the node's ranks"


@pytest.fixture
def four(comm):
    with Communicator(MPI.COMM_WORLD, node_of=NODE_OF, deadline=20) as four:
        # From the second call on, the deadlines of both leaders are known.
        for _ in range(3):
            four.all_reduce(np.zeros(1))
        yield four


def unusual(four, monkeypatch, seen=lambda: None):
    """What was left to the functions of `check_counted` from now on; `seen` is called each time."""
    check, calls = four._engine.call_check, []
    agree = check.nodes_check and check.nodes_check.agree
    wait_for_verdict, collect = check.verdicts.wait_for_verdict, check.verdicts.collect

    def note_agree(word, exchange, *, swapped=False):
        calls.append(swapped)
        seen()
        return agree(word, exchange, swapped=swapped)

    def note_wait(word, sequence, **named):
        calls.append(WAITED)
        seen()
        return wait_for_verdict(word, sequence, **named)

    def note_collect(word, sequence):
        calls.append(COLLECTED)
        return collect(word, sequence)

    if agree is not None:
        monkeypatch.setattr(check.nodes_check, "agree", note_agree)
    monkeypatch.setattr(check.verdicts, "wait_for_verdict", note_wait)
    monkeypatch.setattr(check.verdicts, "collect", note_collect)
    return calls


def summed(four, number=0):
    """The result of a call, which is checked."""
    out = four.all_reduce(np.full(3, four.rank + 1.0 + number))
    np.testing.assert_array_equal(out, np.full(3, 10.0 + 4 * number))


def test_calls_on_time_need_nothing_else(four, monkeypatch):
    calls = unusual(four, monkeypatch)
    # Whatever else the machine does meanwhile.
    monkeypatch.setattr(four._engine.wait_policy, "spins", 10**8)
    for number in range(20):
        summed(four, number)
    assert calls == []


@pytest.mark.parametrize("late", range(4))
def test_a_rank_that_comes_after_the_polls(four, monkeypatch, late):
    summed(four)
    # The leader of the late rank's node doesn't compare before that has arrived.
    ahead = [rank for rank in range(4) if rank not in (late, late & 2)]
    calls = unusual(four, monkeypatch, lambda: MPI.COMM_WORLD.send(None, late))
    verdicts = four._engine.call_check.verdicts
    if four.rank == late:
        monkeypatch.undo()
        for rank in ahead:
            MPI.COMM_WORLD.recv(source=rank)
    elif four.rank not in ahead:
        monkeypatch.undo()
    elif four.local_rank == 0:
        # Its own node's rank is on time, whatever else the machine does meanwhile.
        patient = partial(WaitPolicy.poll_word, SimpleNamespace(spins=10**8))
        monkeypatch.setattr(verdicts, "poll", patient)
    summed(four, 1)
    if four.rank in ahead:
        # A node whose message is sent is not collected again: its ranks might withdraw meanwhile.
        assert calls == [WAITED if four.local_rank else True]
    monkeypatch.undo()
    summed(four, 2)


def test_a_leader_that_was_stopped_uses_no_data_before_it_has_looked_again(four, monkeypatch):
    summed(four)
    calls = unusual(four, monkeypatch)
    monkeypatch.setattr(four._engine.wait_policy, "spins", 10**8)
    if four.rank == 0:
        # As if half of the deadline had passed since the call began.
        four._engine.call_check.nodes_check.lateness._shortest = 0.0
    summed(four, 1)
    # The other leader has all that it needs.
    assert calls == ([True] if four.rank == 0 else [])


def test_a_leader_that_may_be_late_votes(four, monkeypatch):
    summed(four)
    calls = unusual(four, monkeypatch)
    if four.rank == 0:
        four._engine.call_check.nodes_check.lateness.unsettle()
    summed(four, 1)
    if four.rank == 0:
        assert calls == [COLLECTED, False]


def test_a_wait_for_the_leaders_own_message_names_the_call(four, monkeypatch):
    summed(four)
    check, wait_policy, waited = four._engine.call_check, four._engine.wait_policy, []
    if four.local_rank == 0:
        channel = check.nodes_check.rounds.channels[0]
        looks, sent, spin_until = iter([False] * 3), channel.sent, wait_policy.spin_until

        def note(ready, *arguments, **options):
            waited.append(str(wait_policy.call))
            # As after a tenth of the deadline.
            arguments[0]()
            spin_until(ready, *arguments, **options)

        monkeypatch.setattr(wait_policy, "spin_until", note)
        channel.sent = lambda: next(looks, True) and sent()
    monkeypatch.setattr(wait_policy, "spins", 10**8)
    summed(four, 1)
    named = [f"all_reduce(sum, float64[3]), call {check.sequence}"]
    assert waited == ([] if four.local_rank else named)
    # The next call's messages name no node that this one has waited for.
    assert check.verdicts.memory.own[MISSING_NODES] == 0


def test_a_leader_whose_own_message_stays_has_given_its_node_the_result(four, monkeypatch):
    summed(four)
    four.deadline = 2.0
    # The next call has the deadline that this one tells the other leader.
    summed(four)
    check, wait_policy = four._engine.call_check, four._engine.wait_policy
    calls = unusual(four, monkeypatch)
    monkeypatch.setattr(wait_policy, "spins", 10**8)
    if four.rank == 0:
        monkeypatch.setattr(wait_policy, "spin_until", wait_policy.until)
        monkeypatch.setattr(check.nodes_check.rounds.channels[0], "sent", lambda: False)
        with pytest.raises(DeadlineExceededError, match=f"call {check.sequence + 1}") as caught:
            summed(four, 1)
        assert not caught.value.withdrawn
    else:
        summed(four, 1)
    assert calls == []
    # Rank 0 can't make the call that closes the group, for which the others would wait.
    four._engine.broken = four._engine.broken or RuntimeError("one rank's call is undecided")


@pytest.mark.parametrize("other", range(4))
def test_other_calls_are_refused_on_all(four, other):
    for number in range(4):
        if number % 2:
            with pytest.raises(ShapeMismatchError):
                four.all_reduce(np.ones(3 + (four.rank == other)))
        else:
            summed(four, number)


@pytest.mark.parametrize("late", range(4))
def test_a_call_is_withdrawn_at_the_deadline_and_repeated(four, late):
    summed(four)
    four.deadline = 0.2
    if four.rank != late:
        with pytest.raises(DeadlineExceededError) as caught:
            summed(four, 1)
        assert caught.value.withdrawn
    wait_for_all()
    four.deadline = 20
    for number in range(3):
        summed(four, number)


@pytest.mark.parametrize(
    ("count", "algorithm", "in_transit"),
    [(1, None, False), (5000, None, True), (5000, "hierarchical", False)],
)
def test_a_check_with_much_data_moves_them_while_it_waits(
    four, monkeypatch, count, algorithm, in_transit
):
    until, waits = WaitPolicy.until, []

    def note(self, *arguments, **named):
        if sys._getframe(1).f_code.co_name in ("_run", "wait_for_verdict"):
            waits.append(named["in_transit"])
        until(self, *arguments, **named)

    monkeypatch.setattr(WaitPolicy, "until", note)
    array = np.full(count, four.rank + 1.0)
    # A rank that loses its core for so long finds the other node's message without a wait.
    for delay in (0.05, 0.2, 0.8):
        MPI.COMM_WORLD.Barrier()
        time.sleep(delay * four.node)
        out = four.all_reduce(array, algorithm=algorithm)
        np.testing.assert_array_equal(out, np.full(count, 10.0))
        if MPI.COMM_WORLD.allreduce(bool(waits) or four.node == 1, MPI.MIN):
            break
    else:
        pytest.fail("no rank has waited")
    assert set(waits) <= {in_transit}
