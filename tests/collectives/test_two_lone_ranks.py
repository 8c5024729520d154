"""Two ranks alone on their nodes: small reductions, whose only message also compares the call."""

import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, DeadlineExceededError, ShapeMismatchError
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from tests.collectives.test_same_bits import nans
from tests.collectives.waiting import wait_for_all

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2)]


@pytest.fixture
def pair(comm):
    with Communicator(MPI.COMM_WORLD, node_of=[0, 1], deadline=20) as pair:
        # From the second call on, the deadlines of both are known.
        for _ in range(3):
            pair.all_reduce(np.zeros(1))
        yield pair


def agreed(pair, monkeypatch):
    """The calls from now on that the written-out form left to `NodesCheck.agree`."""
    alone, calls = pair._engine.call_check.nodes_check, []
    agree = alone.agree

    def note(word, exchange, *, swapped=False):
        calls.append(swapped)
        return agree(word, exchange, swapped=swapped)

    monkeypatch.setattr(alone, "agree", note)
    return calls


def test_both_ranks_have_the_same_nan(pair):
    for dtype in (np.float32, np.float64, np.complex128):
        own = nans(pair.rank, 67, np.dtype(dtype))
        bits = pair.all_reduce(own).tobytes()
        assert MPI.COMM_WORLD.allgather(bits) == [bits] * 2


def test_calls_on_time_need_nothing_else(pair, monkeypatch):
    calls = agreed(pair, monkeypatch)
    # Whatever else the machine does meanwhile.
    monkeypatch.setattr(pair._engine.wait_policy, "spins", 10**8)
    for _ in range(100):
        assert pair.all_reduce(np.full(1, pair.rank + 1.0)) == 3
    assert calls == []


def test_a_process_that_was_stopped_uses_no_data_before_it_has_looked_again(pair, monkeypatch):
    calls = agreed(pair, monkeypatch)
    # As if half of the deadline had passed since the call began.
    pair._engine.call_check.nodes_check.lateness._shortest = 0.0
    array = np.full(3, pair.rank + 1.0)
    np.testing.assert_array_equal(pair.all_reduce(array), np.full(3, 3.0))
    assert calls == [True]


def test_messages_that_are_not_there_at_once(pair, monkeypatch):
    calls = agreed(pair, monkeypatch)
    monkeypatch.setattr(pair._engine.wait_policy, "spins", 1)
    for number in range(50):
        array = np.full(2, pair.rank + number)
        np.testing.assert_array_equal(pair.all_reduce(array), np.full(2, 1 + 2 * number))
    assert MPI.COMM_WORLD.allreduce(len(calls)) > 0
    assert set(calls) <= {True}


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_withdrawn_call_and_one_of_another_kind(pair, in_vain, tmp_path, monkeypatch):
    """All words of the first wait for rank 0, which may then make its call in vain as well."""
    flag = Path(MPI.COMM_WORLD.bcast(str(tmp_path / "withdrawn")))
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    pair.broadcast(np.zeros(8))
    pair.deadline = 0.3
    if pair.rank == 1:
        with pytest.raises(DeadlineExceededError) as caught:
            pair.broadcast(np.zeros(8))
        assert caught.value.withdrawn
        flag.touch()
    # Not in MPI, which would receive the words.
    while not flag.exists():
        time.sleep(0.001)
    if in_vain:
        if pair.rank == 0:
            with pytest.raises(DeadlineExceededError) as caught:
                pair.all_reduce(np.zeros(3))
            assert caught.value.withdrawn
        wait_for_all()
    pair.deadline = 20
    for length in (3, 4):
        assert pair.all_reduce(np.full(length, pair.rank + 1.0)).tolist() == [3.0] * length


def test_other_calls_are_refused_on_both(pair):
    for number in range(4):
        array = np.full(1 + (number % 2) * pair.rank, pair.rank + 1.0)
        if number % 2:
            with pytest.raises(ShapeMismatchError):
                pair.all_reduce(array)
        else:
            np.testing.assert_array_equal(pair.all_reduce(array), np.full(1, 3.0))


def test_a_limited_wait_is_withdrawn(pair, monkeypatch):
    if pair.rank == 0:
        with (
            pair._engine.wait_policy.no_longer_than(0.05),
            pytest.raises(DeadlineExceededError) as caught,
        ):
            pair.all_reduce(np.ones(1))
        assert caught.value.withdrawn
        MPI.COMM_WORLD.send(None, 1)
    else:
        MPI.COMM_WORLD.recv(source=0)
    calls = agreed(pair, monkeypatch)
    for _ in range(3):
        assert pair.all_reduce(np.full(1, pair.rank + 1.0)) == 3
    if pair.rank == 0:
        # No data of the repetition before all have voted.
        assert calls[0] is False


def test_the_deadline_of_a_refused_call_is_not_that_of_the_next(pair):
    pair.deadline = 2
    pair.all_reduce(np.ones(1))
    pair.deadline = 20
    with pytest.raises(ShapeMismatchError):
        pair.all_reduce(np.ones(1 + pair.rank))
    pair.deadline = 0.5
    if pair.rank == 0:
        with pytest.raises(DeadlineExceededError) as caught:
            pair.all_reduce(np.ones(1))
        assert caught.value.withdrawn
        MPI.COMM_WORLD.send(None, 1)
    else:
        MPI.COMM_WORLD.recv(source=0)
    assert pair.all_reduce(np.full(1, pair.rank + 1.0)) == 3


def test_a_wait_for_the_own_message_names_the_call(pair):
    array = np.full(3, pair.rank + 1.0)
    pair.all_reduce(array)
    pair.barrier()
    wait_policy, channel = (
        pair._engine.wait_policy,
        pair._engine.call_check.nodes_check.rounds.channels[0],
    )
    looks, sent, spin_until, waited = iter([False] * 3), channel.sent, wait_policy.spin_until, []

    def note(ready, *arguments, **options):
        waited.append(str(wait_policy.call))
        spin_until(ready, *arguments, **options)

    wait_policy.spins, wait_policy.spin_until = 10**8, note
    channel.sent = lambda: next(looks, True) and sent()
    np.testing.assert_array_equal(pair.all_reduce(array), np.full(3, 3.0))
    sequence = pair._engine.call_check.sequence
    assert waited == [f"all_reduce(sum, float64[3]), call {sequence}"]
    # It has waited until the message was sent.
    assert next(looks, None) is None


def test_an_output_that_is_read_only_is_refused_before_the_call(pair):
    out = np.zeros(1)
    out.flags.writeable = False
    for _ in range(2):
        with pytest.raises(ValueError, match="read-only"):
            pair.all_reduce(np.ones(1), out=out)
        assert pair.all_reduce(np.ones(1)) == 2
