"""Ranks that wait for a late one, and the calls after its arrival."""

import json
import logging
import os
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import Communicator
from collectives.consistency.flight_recorder import DIRECTORY_VARIABLE
from collectives.transports import local
from tests.collectives.waiting import wait_for_all
from tests.slow import slow

NODE_OF = {2: [0, 1], 3: [0, 0, 1], 5: [0, 0, 1, 1, 1]}
SMALL, LARGE = 10, 50_000
PATIENT = 30

CALLS = {
    "small": lambda comm: comm.all_reduce(np.full(SMALL, comm.rank + 1.0)),
    "large": lambda comm: comm.all_reduce(np.full(LARGE, comm.rank + 1.0)),
    "asynchronous": lambda comm: comm.all_reduce_async(np.full(SMALL, comm.rank + 1.0)).wait(),
}


@pytest.fixture(params=["world", "nodes"])
def patient(request, comm):
    """A group to change the deadline of."""
    node_of = NODE_OF[comm.size] if request.param == "nodes" else None
    group = Communicator(MPI.COMM_WORLD, deadline=PATIENT, node_of=node_of)
    yield group
    group.deadline = PATIENT
    group.close()


@pytest.fixture
def record_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    return tmp_path


def expected(comm, length=SMALL):
    return np.full(length, comm.size * (comm.size + 1) / 2)


def known_absent(group, late):
    """The ranks that this one can know to be absent: the late one, or all of another node."""
    theirs = [rank for rank, node in enumerate(node_map(group)) if node == node_map(group)[late]]
    return {late} if group.node == node_map(group)[late] else set(theirs)


def node_map(group):
    return NODE_OF[group.size] if group.nodes > 1 else [0] * group.size


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_messages_name_the_call_of_which_data_move(comm, algorithm):
    """Also of the rank that has come last, which has not waited for the other one's arrival."""
    for _ in range(20):
        comm.barrier("before")
        comm.all_reduce(np.full(LARGE, comm.rank + 1.0), algorithm=algorithm)
        waiting = comm._engine.wait_policy.call
        assert waiting.what.collective == "all_reduce"
        assert waiting.sequence == comm._engine.call_check.sequence


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_comes_late(patient, call, record_directory, caplog):
    late = patient.size - 1
    CALLS["small"](patient)
    if call == "asynchronous":
        CALLS[call](patient)
    patient.deadline = 0.6
    if patient.rank != late:
        start = time.monotonic()
        with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError) as caught:
            CALLS[call](patient)
        assert 0.6 <= time.monotonic() - start < 10
        check_error(caught.value, patient, late, record_directory)
        logged = [each.message for each in caplog.records if each.name == "collectives"]
        # Logged once in a process, by Open MPI's first asynchronous call.
        warnings = [each for each in logged if "go by messages, which are slower" not in each]
        assert warnings
        assert all("all_reduce(sum" in warning for warning in warnings)
        # A rank may have waited for its own node before, and ranks other than a node's lowest may
        # get the list of missing nodes a little later.
        assert any(f"rank {late}" in warning for warning in warnings) or patient.local_rank > 0
    wait_for_all()
    patient.deadline = PATIENT
    length = LARGE if call == "large" else SMALL
    for _ in range(3):
        np.testing.assert_array_equal(CALLS[call](patient), expected(patient, length))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nodes", [False, True])
def test_messages_name_the_numbers_in_the_world_too(comm, nodes):
    backwards = MPI.COMM_WORLD.Split(0, -comm.rank)
    group = Communicator(backwards, node_of=NODE_OF[comm.size] if nodes else None)
    backwards.Free()
    late = group.size - 1
    message = np.zeros(SMALL)
    CALLS["asynchronous"](group)
    for call in (*CALLS.values(), lambda group: group.recv(message, late)):
        wait_for_all()
        group.deadline = 0.6
        if group.rank != late:
            with pytest.raises(TimeoutError, match=rf" rank {late} \(world rank 0\)"):
                call(group)
        wait_for_all()
        group.deadline = PATIENT
        if group.rank == late and call not in CALLS.values():
            for peer in range(late):
                group.send(message, peer)
        else:
            call(group)
    group.close()


def check_error(error, group, late, directory):
    assert isinstance(error, collectives.DeadlineExceededError)
    # Asynchronous calls may not use the nodes' memory, and then every rank acts for itself.
    assert set(error.absent) in (known_absent(group, late), {late})
    text = str(error)
    assert re.search(
        r"all_reduce\(sum, float64\[\d+\]\), call \d+, waited the deadline of 0.6", text
    )
    assert f"rank {late}" in text
    lines = [line for call in CALLS.values() for _, _, line in call.__code__.co_lines()]
    assert any(f"{__file__}:{line})" in text for line in lines), text
    path = Path(re.search(r"last calls are in (\S+)", text)[1])
    assert path.parent == directory
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["rank"] == group.rank
    if "asynchronous" not in text:
        assert any(call["collective"] == "all_reduce" for call in record["calls"])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_asynchronous_forms_of_which_a_rank_makes_none(comm, record_directory):
    late, array = comm.size - 1, np.ones(SMALL)
    forms = {
        "barrier_async": (),
        "all_to_all_async": ([array] * comm.size,),
        "all_reduce_many_async": ([array, array[:2]],),
    }
    with Communicator(MPI.COMM_WORLD, deadline=PATIENT) as group:
        group.barrier_async().wait()
        for name, arguments in forms.items():
            group.deadline = 0.8
            if group.rank != late:
                handle = getattr(group, name)(*arguments)
                with pytest.raises(collectives.DeadlineExceededError, match=__file__) as caught:
                    handle.wait()
                assert f"{name.removesuffix('_async')}(" in str(caught.value)
                assert caught.value.absent == (late,)
            wait_for_all()
            group.deadline = PATIENT
            getattr(group, name)(*arguments).wait()


@pytest.mark.mpi
@pytest.mark.ranks(5)
def test_who_came_and_left_is_not_named(comm, record_directory):
    """Rank 0 acts for its node and withdraws first, then ranks 2, 3 and 1."""
    with Communicator(MPI.COMM_WORLD, deadline=PATIENT, node_of=[0, 0, 0, 0, 1]) as nodes:
        nodes.barrier()
        wait_for_all()
        nodes.deadline = {0: 0.6, 1: 2.4, 2: 1.2, 3: 1.8}.get(nodes.rank, PATIENT)
        if nodes.rank != 4:
            with pytest.raises(collectives.DeadlineExceededError, match="rank 4") as caught:
                CALLS["small"](nodes)
            assert caught.value.absent == (4,)
        wait_for_all()
        nodes.deadline = PATIENT
        np.testing.assert_array_equal(CALLS["small"](nodes), expected(nodes))


@pytest.mark.mpi
@pytest.mark.ranks(5)
def test_a_nodes_other_ranks_name_whom_its_leader_names(comm, record_directory):
    """Node 1 first waits for a message of node 3, which waits for node 2, the late one."""
    with Communicator(MPI.COMM_WORLD, deadline=PATIENT, node_of=[0, 1, 1, 2, 3]) as nodes:
        nodes.barrier()
        nodes.deadline = 1.0 if nodes.rank == 2 else 2.7
        if nodes.rank != 3:
            with pytest.raises(collectives.DeadlineExceededError, match="rank 3") as caught:
                CALLS["small"](nodes)
            assert caught.value.absent == (3,)
        wait_for_all()
        nodes.deadline = PATIENT
        np.testing.assert_array_equal(CALLS["small"](nodes), expected(nodes))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_the_first_asynchronous_call(patient, record_directory):
    late = 0
    patient.deadline = 0.8
    if patient.rank != late:
        handle = patient.all_reduce_async(np.ones(SMALL))
        with pytest.raises(collectives.DeadlineExceededError) as caught:
            handle.wait(10)
        assert caught.value.absent == (late,)
    wait_for_all()
    patient.deadline = PATIENT
    np.testing.assert_array_equal(CALLS["asynchronous"](patient), expected(patient))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_another_call_after_the_deadline(patient, record_directory):
    """A withdrawn call is forgotten: the late rank takes part in what the others call now."""
    for length in (SMALL, LARGE):
        patient.deadline = 0.1
        if patient.rank != 0:
            with pytest.raises(collectives.DeadlineExceededError):
                patient.all_reduce(np.zeros(length))
        wait_for_all()
        patient.deadline = PATIENT
        assert patient.broadcast_object(patient.rank, root=patient.size - 1) == patient.size - 1
        np.testing.assert_array_equal(CALLS["small"](patient), expected(patient))


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_a_rank_that_gave_a_call_up_is_named_when_it_skips_the_next(comm, record_directory):
    """The late rank's withdrawn attempt doesn't count for the next one."""
    with Communicator(MPI.COMM_WORLD, deadline=PATIENT) as group:
        wait_for_all()
        group.deadline = 1.0
        for waiting, absent in (([0, 1], (2,)), ([0], (1, 2))):
            if group.rank in waiting:
                with pytest.raises(collectives.DeadlineExceededError) as caught:
                    CALLS["small"](group)
                assert caught.value.absent == absent
            wait_for_all()
        group.deadline = PATIENT
        np.testing.assert_array_equal(CALLS["small"](group), expected(group))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_ranks_that_come_when_the_others_leave(patient, record_directory):
    # Longer than a rank may lose its core for, in the middle of a call.
    deadline, chance = 0.3, random.Random(5)
    for number in range(7):
        late, length = chance.randrange(patient.size), chance.choice([SMALL, LARGE])
        offset = chance.uniform(-0.004, 0.004)
        wait_for_all()
        patient.deadline = deadline
        if patient.rank == late:
            time.sleep(deadline + offset)
        result = call_until_all_come(patient, np.full(length, patient.rank + number + 1.0))
        np.testing.assert_array_equal(result, expected(patient, length) + patient.size * number)
        patient.deadline = PATIENT


def call_until_all_come(comm, array):
    end = time.monotonic() + PATIENT
    while time.monotonic() < end:
        try:
            return comm.all_reduce(array)
        except collectives.DeadlineExceededError:
            continue
    raise AssertionError("the ranks never made the call together")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_all_come_and_leave_at_random(patient, record_directory):
    own = random.Random(patient.rank)
    for number in range(20):
        wait_for_all()
        patient.deadline = 0.01
        time.sleep(own.uniform(0, 0.03))
        result = call_until_all_come(patient, np.full(SMALL, patient.rank + number + 1.0))
        np.testing.assert_array_equal(result, expected(patient) + patient.size * number)
        patient.deadline = PATIENT


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_the_deadline_is_that_of_the_call(comm, record_directory):
    """Not of each rank that it waits for, one after the other."""
    group = Communicator(MPI.COMM_WORLD, deadline=PATIENT)
    wait_for_all()
    group.deadline = 3.0
    time.sleep(2.4 if comm.rank == 1 else 0)
    if comm.rank < 2:
        begun = time.monotonic()
        with pytest.raises(collectives.DeadlineExceededError):
            group.all_reduce(np.ones(3))
        assert time.monotonic() - begun < 5
        MPI.COMM_WORLD.send(None, 2)
    else:
        for rank in range(2):
            MPI.COMM_WORLD.recv(source=rank)
    group.deadline = PATIENT
    assert group.all_reduce(np.full(3, comm.rank + 1.0)).tolist() == [6.0] * 3
    group.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_without_a_deadline_it_waits_on(patient, caplog):
    patient.deadline = 0.2  # which this wait would exceed
    patient.deadline = None
    assert patient.deadline is None
    if patient.rank == 0:
        time.sleep(0.5)
    np.testing.assert_array_equal(CALLS["small"](patient), expected(patient))
    assert not caplog.records


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_record_that_cannot_be_written(patient, monkeypatch):
    monkeypatch.setitem(os.environ, DIRECTORY_VARIABLE, "/nowhere")
    patient.deadline = 0.1
    if patient.rank == 0:
        with pytest.raises(collectives.DeadlineExceededError, match="could not be written"):
            patient.barrier()
    wait_for_all()
    patient.deadline = PATIENT
    patient.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_what_a_deadline_may_be(comm):
    group = comm.split(0)
    for wrong, kind in ((0, ValueError), (-1.0, ValueError), (float("nan"), ValueError)):
        with pytest.raises(kind, match="deadline="):
            group.deadline = wrong
    for wrong in ("10", True, [1]):
        with pytest.raises(TypeError, match="deadline="):
            group.deadline = wrong
        with pytest.raises(TypeError, match="deadline="):
            Communicator(MPI.COMM_WORLD, deadline=wrong)
    # As of every timeout, any real number.
    group.deadline = np.float32(7)
    assert group.deadline == 7
    assert group.split(0).deadline == 7
    before = comm.deadline
    assert collectives.world(deadline=77).deadline == 77
    assert collectives.world().deadline == 77
    assert collectives.world(deadline=None).deadline is None
    with pytest.raises(ValueError, match="deadline=0"):
        collectives.world(deadline=0)
    comm.deadline = before
    group.close()


@pytest.mark.parametrize("size", [5, *slow(2, 3)])
def test_threads_of_one_process(size, record_directory):
    together = threading.Barrier(size, timeout=PATIENT)

    def program(transport):
        comm = Communicator(transport, deadline=PATIENT)
        comm.barrier()
        comm.deadline = 1.0  # far more than threads of a busy machine differ by
        if comm.rank != size - 1:
            with pytest.raises(collectives.DeadlineExceededError) as caught:
                comm.all_reduce(np.ones(3))
            assert caught.value.absent == (size - 1,)
        together.wait()
        comm.deadline = PATIENT
        return comm.all_reduce(np.ones(3)).tolist()

    assert local.run(size, program) == [[size] * 3] * size
