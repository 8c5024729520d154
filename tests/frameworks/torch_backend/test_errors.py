"""Errors of calls that differ between ranks, or that some ranks do not make."""

import json
import time
from datetime import timedelta

import pytest

import collectives

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

MISMATCHES = {
    "shape": (
        lambda torch, dist, odd: dist.all_reduce(torch.ones(2 + odd)),
        collectives.ShapeMismatchError,
    ),
    "dtype": (
        lambda torch, dist, odd: dist.all_reduce(
            torch.ones(2, dtype=torch.float64 if odd else None)
        ),
        collectives.DtypeMismatchError,
    ),
    "op": (
        lambda torch, dist, odd: dist.all_reduce(
            torch.ones(2), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        ),
        collectives.OpMismatchError,
    ),
    "root": (
        lambda torch, dist, odd: dist.broadcast(torch.ones(2), int(odd)),
        collectives.RootMismatchError,
    ),
    "collective": (
        lambda torch, dist, odd: dist.barrier() if odd else dist.all_reduce(torch.ones(2)),
        collectives.CollectiveMismatchError,
    ),
    "asynchronous": (
        lambda torch, dist, odd: dist.all_reduce(torch.ones(2 + odd), async_op=True).wait(),
        collectives.ShapeMismatchError,
    ),
}


# Rank 0's call and the others', which reduce the same tensors in the same way.
AMONG_EQUAL_REDUCTIONS = {
    "AVG of integers and SUM": lambda torch, dist, odd: (
        torch.ones(4, dtype=torch.int32),
        dist.ReduceOp.SUM if odd else dist.ReduceOp.AVG,
    ),
    "PREMUL_SUM and SUM": lambda torch, dist, odd: (
        torch.ones(4),
        dist.ReduceOp.SUM if odd else dist._make_nccl_premul_sum(2.0),
    ),
    "float8 and float32": lambda torch, dist, odd: (
        torch.ones(4, dtype=torch.float32 if odd else torch.float8_e5m2),
        dist.ReduceOp.SUM,
    ),
    "two kinds of float8": lambda torch, dist, odd: (
        torch.ones(4, dtype=torch.float8_e4m3fn if odd else torch.float8_e5m2),
        dist.ReduceOp.SUM,
    ),
}


@pytest.mark.parametrize("what", AMONG_EQUAL_REDUCTIONS)
def test_mismatches_that_no_array_shows(torch, dist, comm, what):
    tensor, op = AMONG_EQUAL_REDUCTIONS[what](torch, dist, comm.rank > 0)
    part = tensor[:1].clone()
    whole = tensor.repeat(comm.size)[: comm.size]
    calls = {
        "all_reduce": lambda: dist.all_reduce(tensor, op),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([tensor], op),
        "reduce": lambda: dist.reduce(tensor, 0, op),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, op),
    }
    for name, call in calls.items():
        with pytest.raises(collectives.MismatchError) as caught:
            call()
        assert len(caught.value.calls) == comm.size, name
        # torch wraps these calls in functions of other packages.
        assert str(caught.value).count(f"({__file__}:") == comm.size, name


def test_sparse_tensors_of_different_shapes(torch, dist, comm):
    with pytest.raises(collectives.MismatchError, match="sparse tensors of shape"):
        dist.all_reduce(torch.eye(2 + comm.rank).to_sparse())


def test_tensors_that_receive_have_memory_for_each_element(torch, dist, comm):
    def expanded():
        return torch.ones(1).expand(4)

    own = torch.arange(4.0)
    calls = (
        lambda: dist.all_reduce(expanded()),
        lambda: dist.all_reduce_coalesced([expanded()]),
        lambda: dist.all_gather([expanded() for _ in range(comm.size)], own),
    )
    for call in calls:
        with pytest.raises(ValueError, match="several elements in one place"):
            call()
    gathered = [torch.zeros(4) for _ in range(comm.size)]
    dist.all_gather(gathered, expanded())
    assert all(each.tolist() == [1.0] * 4 for each in gathered)


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_is_raised_on_every_rank_and_the_group_goes_on(torch, dist, comm, what):
    call, kind = MISMATCHES[what]
    with pytest.raises(kind) as caught:
        call(torch, dist, comm.rank == comm.size - 1)
    assert len(caught.value.calls) == comm.size
    tensor = torch.tensor([comm.rank + 1.0])
    dist.all_reduce(tensor)
    assert tensor.item() == comm.size * (comm.size + 1) / 2


def test_a_future_has_the_error(torch, dist, comm):
    work = dist.all_reduce(torch.ones(2 + comm.rank), async_op=True)
    with pytest.raises(collectives.ShapeMismatchError):
        work.get_future().wait()
    assert not work.is_success()
    assert isinstance(work.exception(), collectives.ShapeMismatchError)
    group = dist.group.WORLD
    group._start_coalescing(None)
    for length in (2, 2 + comm.rank):
        dist.all_reduce(torch.ones(length), async_op=True)
    works = group._end_coalescing(None)
    with pytest.raises(collectives.ShapeMismatchError):
        works.wait()
    assert isinstance(works.exception(), collectives.ShapeMismatchError)


def test_a_deadline(torch, dist, comm):
    """The error names the absent ranks and the user's line, in words that torch's tests read."""
    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=0.5))
    for later in (False, True):
        start = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(collectives.DeadlineExceededError, match=" Timed out ") as caught:
                call_late(dist, group, later)
            assert caught.value.absent == tuple(range(1, comm.size))
            assert __file__ in str(caught.value)
            assert 0.4 < time.monotonic() - start < 20
        comm.barrier()
        dist.barrier(group)
    if comm.rank == 0:
        absent = "Rank 1" if comm.size == 2 else "Ranks 1, 2"
        text = rf"Rank 0 timed out in monitoredBarrier\. {absent} failed to pass monitoredBarrier"
        with pytest.raises(RuntimeError, match=text):
            group.monitored_barrier(timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match="Timed out waiting 500ms"):
            dist.recv(torch.zeros(1), 1, group=group)
        with pytest.raises(RuntimeError, match="Timed out waiting 500ms"):
            dist.irecv(torch.zeros(1), 1, group=group).get_future().wait()
    comm.barrier()
    # A receive that was given up leaves the message to the next one.
    if comm.rank == 1:
        dist.send(torch.ones(1), 0, group=group)
    if comm.rank == 0:
        tensor = torch.zeros(1)
        dist.recv(tensor, 1, group=group)
        assert tensor.item() == 1
    group.set_timeout(timedelta(seconds=30))
    dist.barrier(group)
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
def test_the_timeout_of_a_call_is_its_own(torch, dist, comm):
    """Neither that of a message meanwhile, nor in the place of one that is set meanwhile."""
    store, seen = dist.distributed_c10d._get_default_store(), ["the timeout of a call was seen"]
    group = dist.new_group(timeout=timedelta(seconds=1))
    made = group._get_backend(torch.device("cpu"))._comm
    if comm.rank:
        store.wait(seen, timedelta(seconds=60))
    work = dist.barrier(group, async_op=True, timeout=timedelta(seconds=60))
    if comm.rank == 0:
        end = time.monotonic() + 20
        while made.deadline != 60:
            assert time.monotonic() < end
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            dist.recv(torch.zeros(1), 1, group=group)
        group.set_timeout(timedelta(seconds=30))
        store.set(seen[0], "")
    work.wait()
    if comm.rank == 0:
        assert made.deadline == 30
    dist.destroy_process_group(group)


def test_ddp_raises_the_error_of_a_reduction_that_it_waits_for(torch, dist, comm, caplog):
    """DDP reduces asynchronously, in a thread of torch, and waits in C++."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    loss = model(torch.ones(1, 2)).sum()
    # Not before: the first use of DDP imports for seconds, on one rank longer than on another.
    group.set_timeout(timedelta(seconds=1))
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=r" Timed out .*rank 1") as caught:
            loss.backward()
        for text in (str(caught.value), caplog.text):
            assert f"{__file__}:" in text
            assert "threading.py:" not in text
    comm.barrier()
    dist.destroy_process_group(group)


def call_late(dist, group, later):
    if later:
        dist.barrier(group, async_op=True).wait()
    else:
        dist.barrier(group)


def test_messages_of_another_length(torch, dist, comm):
    if comm.rank == 0:
        dist.send(torch.ones(2), 1)
        dist.send(torch.ones(4), 1)
    elif comm.rank == 1:
        for sent in ("8", "more"):
            with pytest.raises(collectives.ShapeMismatchError, match=f"{sent} bytes were sent"):
                dist.recv(torch.ones(3), 0)
    with pytest.raises(ValueError, match="contiguous"):
        dist.isend(torch.ones(2, 2).t(), 0)


def test_messages_of_more_bytes_than_mpi_counts(torch, dist, comm, monkeypatch):
    from mpi4py import MPI

    from collectives.torch import messages

    monkeypatch.setattr(messages, "_LARGEST_COUNT", 7)
    counted = [torch.ones(2, dtype=torch.int32), torch.ones(7, dtype=torch.int8)]
    if MPI.Get_version() >= (4, 0):
        monkeypatch.setattr(MPI, "Get_version", lambda: (3, 1))
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="of 8 bytes: this MPI counts to 7"):
            call(counted[0], (comm.rank + 1) % comm.size)
    if comm.rank < 2:
        (dist.recv if comm.rank else dist.send)(counted[1], 1 - comm.rank)


def test_ranks_that_do_not_exist(torch, dist, comm):
    with pytest.raises(ValueError, match=f"dst=9: must be an integer from 0 to {comm.size - 1}"):
        dist.isend(torch.ones(2), 9)
    with pytest.raises(ValueError, match="src=9: must be"):
        dist.irecv(torch.ones(2), 9)


def test_tags_are_not_negative(torch, dist, comm):
    """MPI's number for any tag is negative."""
    for call in (dist.isend, dist.irecv):
        for tag in (-1, 2**31):
            with pytest.raises(ValueError, match=f"tag={tag}: must be an integer from 0 to"):
                call(torch.ones(2), 0, tag=tag)


def test_lists_of_another_length_are_refused_before_the_call(torch, dist, comm):
    few, one = [torch.zeros(2)] * (comm.size - 1), torch.ones(2)
    all_of = [torch.zeros(2)] * comm.size
    root = {"gather_list": few if comm.rank == 0 else None, "dst": 0}
    calls = {
        "all_gather: the list has": lambda: dist.all_gather(few, one),
        "gather: the list has": lambda: dist.gather(one, **root),
        "all_to_all: the list has . output": lambda: dist.all_to_all(few, [one] * comm.size),
        "all_to_all: the list has . input": lambda: dist.all_to_all(all_of, [one]),
        "reduce_scatter: the list has": lambda: dist.reduce_scatter(one, []),
        "without dimensions": lambda: dist.all_to_all_single(torch.ones(()), torch.ones(())),
    }
    for text, call in calls.items():
        with pytest.raises((ValueError, RuntimeError), match=text):
            call()
    assert not any(each.any() for each in few)


def test_a_part_of_another_length(torch, dist, comm):
    parts = [torch.ones(2 + (peer == 0)) for peer in range(comm.size)]
    with pytest.raises(ValueError, match=r"this rank's input has \d elements and the output 5"):
        dist.reduce_scatter(torch.zeros(5), parts)
    with pytest.raises(ValueError, match=r"all_gather: the input has 2 elements and the output"):
        dist.all_gather_into_tensor(torch.zeros(2 * comm.size + 1), torch.ones(2))


def test_an_output_of_another_dtype(torch, dist, comm):
    """Torch's own groups convert nothing either."""
    given, output = torch.ones(2 * comm.size, dtype=torch.int32), torch.zeros(2)
    with pytest.raises(ValueError, match=r"the input is of torch.int32, the output torch.float32"):
        dist.reduce_scatter_tensor(output, given, dist.ReduceOp.AVG)


def test_a_wrong_list_of_the_root_is_refused_on_every_rank(torch, dist, comm):
    lists = {
        f"has {comm.size + 1} tensors: must have {comm.size}": [torch.ones(2)] * (comm.size + 1),
        "differ in shape, dtype or device": [torch.ones(2 + rank) for rank in range(comm.size)],
    }
    for text, given in lists.items():
        with pytest.raises(ValueError, match=text):
            dist.scatter(torch.zeros(2), given if comm.rank == 0 else None)
    output = torch.zeros(1)
    inputs = [torch.full((1,), rank + 1.5) for rank in range(comm.size)]
    dist.scatter(output, inputs if comm.rank == 0 else None)
    assert output.item() == comm.rank + 1.5


def test_a_receive_that_exceeded_its_deadline_has_failed(torch, dist, comm):
    if comm.rank == 0:
        work = dist.irecv(torch.zeros(1), 1, tag=5)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Timed out"):
                work.wait(timedelta(seconds=0.1))
        assert not work.is_success()
    comm.barrier()


def test_unequal_lengths_of_the_expected_sum(torch, dist, comm):
    """The outputs hold as many elements as are sent, from other ranks."""
    size, last = comm.size, comm.rank == comm.size - 1
    tensor = torch.ones(2 + (comm.rank == 0) - last)
    outputs = [torch.zeros(2) for _ in range(size)]
    with pytest.raises(collectives.ShapeMismatchError):
        dist.all_gather(outputs, tensor)
    with pytest.raises(collectives.ShapeMismatchError):
        dist.gather(tensor, None if comm.rank else outputs)
    outputs = [torch.zeros(1 + (rank == 0) + 3 * (rank == size - 1)) for rank in range(size)]
    change = (comm.rank == size - 1) - (comm.rank == 0)
    with pytest.raises(collectives.ShapeMismatchError):
        dist.all_gather(outputs, torch.ones(len(outputs[comm.rank]) + change))
    own = torch.ones(2 + change)
    with pytest.raises(collectives.ShapeMismatchError):
        dist.all_gather_into_tensor(torch.zeros(size * len(own)), own)
    dist.barrier()


def test_elements_are_not_converted(torch, dist, comm):
    kind = torch.int32 if comm.rank else torch.float64
    tensors = [torch.full((2,), 1.5).to(kind) for _ in range(comm.size)]
    with pytest.raises(collectives.DtypeMismatchError, match="the output tensor holds torch"):
        dist.all_to_all([torch.zeros(2, dtype=kind) for _ in range(comm.size)], tensors)
    output = torch.zeros(2, dtype=kind)
    if comm.rank:
        with pytest.raises(collectives.DtypeMismatchError, match="rank 0 sent float64"):
            dist.scatter(output)
    else:
        dist.scatter(output, tensors)
    dist.barrier()


def test_the_trace_holds_torchs_calls(torch, dist, comm, tmp_path):
    path = comm.broadcast_object(str(tmp_path / "trace.json") if comm.rank == 0 else None)
    dist.all_reduce(torch.ones(7919))
    dist.group.WORLD.trace(path)
    if comm.rank == 0:
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
        assert sum("[7919]" in json.dumps(event) for event in events) == comm.size


@pytest.mark.parametrize("source", [1, None])
def test_a_receive_from_a_rank_that_has_left_ends_soon(torch, dist, comm, source):
    group = dist.new_group([0, 1])
    if comm.rank < 2:
        if comm.rank == 1:
            sent = dist.isend(torch.ones(2), 0, group=group)
        else:
            start = time.monotonic()
            received = torch.zeros(2)
            dist.recv(received, source, group=group)
            assert received.tolist() == [1, 1]
            with pytest.raises(collectives.RankFailedError, match="closed the group"):
                dist.recv(torch.zeros(2), source, group=group)
            assert time.monotonic() - start < 20  # the group's deadline is that of torch: minutes
        if comm.rank == 1:
            sent.wait()
        dist.destroy_process_group(group)
    comm.barrier()


def test_a_group_that_a_member_creates_too_late(torch, dist, comm):
    """A member that has given up isn't waited for by the late one."""
    late = comm.rank == comm.size - 1
    store = dist.distributed_c10d._get_default_store()
    how = {"ranks": list(range(comm.size)), "use_local_synchronization": True}
    dist.barrier()
    if late:
        store.wait([f"{rank} gave up" for rank in range(comm.rank)], timedelta(seconds=20))
    text = "gave up" if late else rf"ranks \[{comm.size - 1}\] have not created it within 1 s"
    with pytest.raises(collectives.DeadlineExceededError, match=text):
        dist.new_group(timeout=timedelta(seconds=1), **how)
    store.set(f"{comm.rank} gave up", "")
    dist.barrier()
    for _ in range(2):
        group = dist.new_group(**how)  # under the same name
        assert not group._get_backend(torch.device("cpu"))._members.have_ended(None)
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)


def test_parts_of_other_lengths_on_a_rank(torch, dist, comm):
    lengths = [1, 2, 3][: comm.size]
    if comm.rank == 0:
        lengths = [2, 1, 3][: comm.size]
    output = torch.zeros(lengths[comm.rank])
    with pytest.raises(collectives.MismatchError, match=r"reduce_scatter of \[2, 1.*elements"):
        dist.reduce_scatter(output, [torch.ones(each) for each in lengths])


def test_lists_and_outputs_of_a_wrong_length_on_a_rank(torch, dist, comm):
    odd = int(comm.rank == 0)
    parts = [torch.ones(2) for _ in range(comm.size + odd)]
    for call in (
        lambda: dist.all_gather(parts, torch.ones(2)),
        lambda: dist.gather(torch.ones(2), parts if comm.rank == 0 else None, 0),
        lambda: dist.reduce_scatter(torch.ones(2), parts),
        lambda: dist.reduce_scatter_single(torch.ones(2 + odd), torch.ones(2 * comm.size)),
        lambda: dist.all_reduce(
            torch.ones(2).to_sparse(), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM
        ),
    ):
        with pytest.raises(collectives.MismatchError, match="rank 0: barrier"):
            call()
    dist.barrier()


def test_members_of_which_nothing_can_be_known(torch, dist):
    """The rank that served the store has ended: a receive from another one goes on."""
    from collectives.torch.members import Members

    class Ended:
        def check(self, keys):
            raise dist.DistNetworkError("connection reset")

    assert not Members(Ended(), 1, 3, "").have_ended(2)
