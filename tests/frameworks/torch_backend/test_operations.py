"""Every operation of torch.distributed on the backend, waited for and asynchronous."""

import functools
import operator
import sys
import threading
from datetime import timedelta

import pytest

import collectives_torch_entry
from collectives.errors import UnusableError
from collectives.shm.layout import INTENDED

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    # Older names of calls are tested as well.
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

NUMBERS = (
    *("uint8", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
COMPLEX = ("complex64", "complex128")
MOVED = (*NUMBERS, *COMPLEX, "bool", "float8_e4m3fn", "float8_e5m2")
BOTH = pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])


def values(torch, rank, dtype, shape=(2, 3)):
    """Elements that depend on the rank, exact in every dtype."""
    count = functools.reduce(operator.mul, shape, 1)
    elements = (torch.arange(count) + rank) % 5
    return elements.reshape(shape).to(getattr(torch, dtype))


def call(function, *arguments, later, **options):
    """Make the call; if it is asynchronous, wait for it."""
    work = function(*arguments, async_op=later, **options)
    if later:
        work.wait()
        cuda = sys.modules["torch"].cuda
        if cuda.is_available():
            # The host does not wait for the GPU until here.
            cuda.synchronize()
        assert work.is_completed()
        assert work.is_success()


def equal(torch, tensor, expected, what):
    # 8-bit floats can't be compared.
    assert tensor.dtype == expected.dtype, what
    assert torch.equal(tensor.to(torch.complex128), expected.to(torch.complex128)), what


@BOTH
def test_all_reduce(torch, dist, comm, later):
    for name in NUMBERS:
        dtype = getattr(torch, name)
        parts = [values(torch, rank, name) for rank in range(comm.size)]
        wide = torch.stack(parts).double()
        expected = {
            dist.ReduceOp.SUM: wide.sum(0),
            dist.ReduceOp.PRODUCT: wide.prod(0),
            dist.ReduceOp.MIN: wide.amin(0),
            dist.ReduceOp.MAX: wide.amax(0),
            dist.ReduceOp.AVG: wide.sum(0) / comm.size,
        }
        for op, reduced in expected.items():
            tensor = parts[comm.rank].clone()
            call(dist.all_reduce, tensor, op, later=later)
            if op == dist.ReduceOp.AVG and dtype.is_floating_point:
                assert torch.allclose(tensor.double(), reduced, rtol=1e-2), name
            else:
                equal(torch, tensor, reduced.to(dtype), (name, op))


@BOTH
def test_all_reduce_of_other_dtypes(torch, dist, comm, later):
    ranks = range(comm.size)
    for name in COMPLEX:
        parts = [values(torch, rank, name) * (1 + 2j) for rank in ranks]
        tensor = parts[comm.rank].clone()
        call(dist.all_reduce, tensor, later=later)
        equal(torch, tensor, sum(parts), name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
        parts = [values(torch, rank, name) for rank in ranks]
        tensor = parts[comm.rank].clone()
        call(dist.all_reduce, tensor, later=later)
        total = sum(part.float() for part in parts).to(tensor.dtype)
        equal(torch, tensor, total, name)
    for name in ("uint16", "uint32", "uint64"):
        tensor = torch.tensor([comm.rank, 9]).to(getattr(torch, name))
        call(dist.all_reduce, tensor, dist.ReduceOp.AVG, later=later)
        assert tensor.tolist() == [sum(ranks) // comm.size, 9]
        call(dist.all_reduce, tensor[0], dist.ReduceOp.AVG, later=later)
        assert tensor[0].item() == sum(ranks) // comm.size
    flag = torch.tensor([comm.rank == 0, True, False])
    call(dist.all_reduce, flag, dist.ReduceOp.MAX, later=later)
    assert flag.tolist() == [True, True, False]
    flag = torch.tensor([comm.rank == 0, True, False])
    call(dist.all_reduce, flag, dist.ReduceOp.AVG, later=later)  # truncated
    assert flag.tolist() == [False, True, False]


@BOTH
def test_bitwise_all_reduce(torch, dist, comm, later):
    folds = {
        dist.ReduceOp.BAND: operator.and_,
        dist.ReduceOp.BOR: operator.or_,
        dist.ReduceOp.BXOR: operator.xor,
    }
    for name in ("uint8", "int32", "int64", "bool"):
        parts = [values(torch, rank + 1, name) for rank in range(comm.size)]
        for op, fold in folds.items():
            tensor = parts[comm.rank].clone()
            call(dist.all_reduce, tensor, op, later=later)
            equal(torch, tensor, functools.reduce(fold, parts), (name, op))
    with pytest.raises(TypeError):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)


@BOTH
def test_premultiplied_sum(torch, dist, comm, later):
    total = sum(values(torch, rank, "float32") for rank in range(comm.size))
    for factor in (0.5, torch.tensor([0.5])):
        tensor = values(torch, comm.rank, "float32")
        op = dist._make_nccl_premul_sum(factor)
        call(dist.all_reduce, tensor, op, later=later)
        assert torch.equal(tensor, total / 2)
        for dtype in (torch.float8_e5m2, torch.float32):
            scalar = torch.tensor(4.0 * (comm.rank + 1)).to(dtype)
            call(dist.all_reduce, scalar, op, later=later)
            assert float(scalar) == comm.size * (comm.size + 1)


def test_layouts_and_storages(torch, dist, comm):
    size = comm.size
    tensor = torch.zeros(4, 6)[1::2, ::3].fill_(comm.rank + 1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((2, 2), size * (size + 1) / 2))
    dist.broadcast(tensor, size - 1)
    for empty in (torch.zeros(0), torch.zeros(3, 0)):
        dist.all_reduce(empty)
    scalar = torch.tensor(float(comm.rank))
    dist.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar.item() == size - 1
    parameter = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(parameter)
    assert parameter.tolist() == [size] * 3
    # Another tensor may get the memory of one that is gone.
    for length in (2, 3, 2, 3):
        tensor = torch.full((length,), comm.rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size * (size + 1) / 2] * length
        tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="resolve_conj"):
        dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64).conj()]).wait()


@BOTH
def test_sparse_all_reduce(torch, dist, comm, later):
    indices = torch.tensor([[comm.rank, comm.rank + 1]])
    rows = torch.full((2, 2), comm.rank + 1.0)
    shape = comm.size + 1, 2
    expected = torch.zeros(shape)
    for rank in range(comm.size):
        expected[rank : rank + 2] += rank + 1
    for inference in (False, True):
        with torch.inference_mode(inference):
            tensor = torch.sparse_coo_tensor(indices, rows, shape, check_invariants=True)
            call(dist.all_reduce, tensor, later=later)
            assert torch.equal(tensor.to_dense(), expected)


@BOTH
def test_broadcast_and_reduce(torch, dist, comm, later):
    for name in MOVED:
        for root in range(comm.size):
            tensor = values(torch, comm.rank, name)
            call(dist.broadcast, tensor, root, later=later)
            equal(torch, tensor, values(torch, root, name), name)
    for root in range(comm.size):
        own = values(torch, comm.rank, "float32")
        tensor = own.clone()
        call(dist.reduce, tensor, root, dist.ReduceOp.MAX, later=later)
        parts = torch.stack([values(torch, rank, "float32") for rank in range(comm.size)])
        expected = parts.amax(0) if comm.rank == root else own
        assert torch.equal(tensor, expected)


@BOTH
def test_all_gather(torch, dist, comm, later):
    ranks = range(comm.size)
    for name in MOVED:
        own = values(torch, comm.rank, name)
        outputs = [torch.zeros_like(own) for _ in ranks]
        call(dist.all_gather, outputs, own, later=later)
        for rank in ranks:
            equal(torch, outputs[rank], values(torch, rank, name), name)
        joined = torch.zeros(comm.size * 2, 3, dtype=own.dtype)
        call(dist.all_gather_into_tensor, joined, own, later=later)
        equal(torch, joined, torch.cat([values(torch, rank, name) for rank in ranks]), name)
    spaced = torch.zeros(comm.size * 2, 8)[:, ::2]
    call(dist.all_gather_into_tensor, spaced, torch.full((2, 4), comm.rank + 1.0), later=later)
    assert spaced[:, 3].tolist() == [rank + 1 for rank in ranks for _ in range(2)]
    with pytest.raises(ValueError, match="output tensors: must have"):
        call(dist.all_gather, [torch.zeros(2)] * (comm.size + 1), torch.zeros(2), later=later)
    # In place, as FSDP does: the input is a part of the output.
    joined = torch.zeros(comm.size, 4)
    joined[comm.rank] = comm.rank + 1
    call(dist.all_gather_single, joined, joined[comm.rank], later=later)
    assert joined[:, 0].tolist() == [rank + 1 for rank in ranks]
    # Lengths may differ.
    outputs = [torch.zeros(rank + 1) for rank in ranks]
    call(dist.all_gather, outputs, torch.full((comm.rank + 1,), float(comm.rank)), later=later)
    assert [each.tolist() for each in outputs] == [[float(rank)] * (rank + 1) for rank in ranks]


@BOTH
def test_reduce_scatter(torch, dist, comm, later):
    size = comm.size
    for name in (*NUMBERS, *COMPLEX):
        whole = [values(torch, rank, name, (size, 4)) for rank in range(size)]
        wide = torch.complex128 if whole[0].is_complex() else torch.float64
        total = sum(each.to(wide) for each in whole)[comm.rank]
        output = torch.zeros_like(whole[0][0])
        call(dist.reduce_scatter, output, list(whole[comm.rank]), later=later)
        equal(torch, output, total.to(output.dtype), name)
        output.zero_()
        call(dist.reduce_scatter_single, output, whole[comm.rank].reshape(-1), later=later)
        equal(torch, output, total.to(output.dtype), name)
    output = torch.zeros(comm.rank + 1)
    inputs = [torch.full((rank + 1,), comm.rank + rank / 2) for rank in range(size)]
    call(dist.reduce_scatter, output, inputs, dist.ReduceOp.MAX, later=later)
    assert output.tolist() == [size - 1 + comm.rank / 2] * (comm.rank + 1)
    output = torch.zeros(2)
    given = torch.full((2 * size,), comm.rank + 1.0)
    call(dist.reduce_scatter_single, output, given, dist.ReduceOp.AVG, later=later)
    assert output.tolist() == [(size + 1) / 2] * 2
    with pytest.raises(ValueError, match="must be"):
        dist.group.WORLD.reduce_scatter_single(torch.zeros(3), torch.zeros(size)).wait()


@BOTH
def test_gather_and_scatter(torch, dist, comm, later):
    for name in MOVED:
        for root in range(comm.size):
            own = values(torch, comm.rank, name)
            outputs = [torch.zeros_like(own) for _ in range(comm.size)]
            on_root = outputs if comm.rank == root else None
            call(dist.gather, own, on_root, root, later=later)
            if on_root:
                for rank, each in enumerate(outputs):
                    equal(torch, each, values(torch, rank, name), name)
            # What `dist.gather_single` calls, from torch 2.15 on.
            joined = torch.zeros(comm.size * len(own), *own.shape[1:], dtype=own.dtype)
            spaced = torch.stack([joined, joined], -1)[..., 0]
            opts = dist.distributed_c10d.GatherOptions()
            opts.rootRank, opts.asyncOp = root, later
            for output in (joined, spaced):
                given = output if comm.rank == root else torch.zeros(0)
                dist.group.WORLD.gather_single(given, own, opts).wait()
                if comm.rank == root:
                    parts = [values(torch, rank, name) for rank in range(comm.size)]
                    equal(torch, output, torch.cat(parts), name)
            inputs = [values(torch, rank + root, name) for rank in range(comm.size)]
            output = torch.zeros_like(own)
            call(dist.scatter, output, inputs if comm.rank == root else None, root, later=later)
            equal(torch, output, values(torch, comm.rank + root, name), name)


@BOTH
def test_all_to_all(torch, dist, comm, later):
    ranks, rank = range(comm.size), comm.rank
    for name in MOVED:
        inputs = [values(torch, 2 * rank + peer, name) for peer in ranks]
        outputs = [torch.zeros_like(each) for each in inputs]
        call(dist.all_to_all, outputs, inputs, later=later)
        for peer in ranks:
            equal(torch, outputs[peer], values(torch, 2 * peer + rank, name), name)
        whole, received = torch.cat(inputs), torch.cat([torch.zeros_like(each) for each in inputs])
        call(dist.all_to_all_single, received, whole, later=later)
        equal(torch, received, torch.cat(outputs), name)
    # Rank r sends p + r rows to rank p; rank 0 sends none to itself.
    sent = torch.cat([torch.full((rank + peer, 2), 10.0 * rank + peer) for peer in ranks])
    splits = [rank + peer for peer in ranks]
    received = torch.zeros(sum(splits), 2)
    call(dist.all_to_all_single, received, sent, splits, splits, later=later)
    expected = torch.cat([torch.full((rank + peer, 2), 10.0 * peer + rank) for peer in ranks])
    assert torch.equal(received, expected)
    with pytest.raises(RuntimeError, match="Split sizes"):
        dist.all_to_all_single(received, sent, splits, [100] * comm.size)


def test_messages(torch, dist, comm):
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for name in MOVED:
        received = torch.zeros_like(values(torch, 0, name))
        works = [
            dist.irecv(received, behind),
            dist.isend(values(torch, comm.rank, name), ahead),
        ]
        for work in works:
            work.wait()
        equal(torch, received, values(torch, behind, name), name)
    if comm.rank == 0:
        dist.send(torch.arange(3.0), 1, tag=7)
        dist.send(torch.arange(3.0) + 1, 1, tag=3)
    elif comm.rank == 1:
        later, earlier = torch.zeros(3), torch.zeros(3)
        assert dist.recv(earlier, 0, tag=3) == 0
        assert dist.recv(later, tag=7) == 0
        assert (later.tolist(), earlier.tolist()) == ([0, 1, 2], [1, 2, 3])
    if comm.rank == 0:
        found = {}
        for _ in range(comm.size - 1):
            tensor = torch.zeros(1)
            source = dist.recv(tensor)
            found[source] = tensor.item()
        assert found == {rank: rank * 2.0 for rank in range(1, comm.size)}
    else:
        dist.send(torch.tensor([comm.rank * 2.0]), 0)


def test_callbacks_of_messages_may_wait_for_them(torch, dist, comm):
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    received = torch.zeros(1)
    work = dist.irecv(received, behind)
    future = work.get_future().then(lambda _: (work.wait(), work.is_success(), work.result()))
    dist.barrier()
    dist.send(torch.tensor([comm.rank + 1.0]), ahead)
    assert future.wait() == (True, True, [received])
    assert received.item() == behind + 1


def test_a_large_message_moves_during_a_collective(torch, dist, comm):
    """The sender is in shared memory meanwhile, where MPI makes no progress by itself."""
    tensor = torch.full((1 << 20,), comm.rank + 1.0)
    if comm.rank == 0:
        work = dist.isend(tensor, 1)
        dist.barrier()
        work.wait()
    elif comm.rank == 1:
        received = torch.zeros(1 << 20)
        dist.recv(received, 0)
        assert received[-1].item() == 1
        dist.barrier()
    else:
        dist.barrier()


def test_batches_of_messages(torch, dist, comm):
    ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = [torch.full((4,), comm.rank + each / 2) for each in (0, 1)], []
    operations = []
    for each in sent:
        received.append(torch.zeros(4))
        operations.append(dist.P2POp(dist.irecv, received[-1], behind))
        operations.append(dist.P2POp(dist.isend, each, ahead))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert [each[0].item() for each in received] == [behind, behind + 0.5]


@BOTH
def test_coalesced_calls(torch, dist, comm, later):
    size = comm.size
    tensors = [torch.full((length,), comm.rank + 1.0) for length in (2, 3)]
    outputs = [torch.zeros(size * 2), torch.zeros(size * 3)]
    parts = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager(async_ops=later) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    if later:
        works.wait()
    total = size * (size + 1) / 2
    assert [each.tolist() for each in tensors] == [[total] * 2, [total] * 3]
    with dist._coalescing_manager(async_ops=later, device=torch.device("cpu")) as works:
        for output, part in zip(outputs, parts, strict=True):
            dist.all_gather_single(output, part.fill_(comm.rank))
    if later:
        works.wait()
    assert outputs[0].tolist() == [rank for rank in range(size) for _ in range(2)]
    with dist._coalescing_manager(async_ops=later) as works:
        for output, part in zip(outputs, parts, strict=True):
            dist.reduce_scatter_single(part, output)
    if later:
        works.wait()
    assert parts[1].tolist() == [float(size * comm.rank)] * 3
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    work = dist.all_gather_coalesced(lists, parts, async_op=later)
    if later:
        work.wait()
    assert [each[1][0].item() for each in lists] == [float(size * rank) for rank in range(size)]


def test_objects(dist, comm):
    gathered = [None] * comm.size
    dist.all_gather_object(gathered, {"rank": comm.rank})
    assert gathered == [{"rank": rank} for rank in range(comm.size)]
    shown = [comm.rank, "from", None]
    dist.broadcast_object_list(shown, 1)
    assert shown == [1, "from", None]
    own = [None]
    dist.scatter_object_list(own, [f"for {rank}" for rank in range(comm.size)], 0)
    assert own == [f"for {comm.rank}"]
    on_root = [None] * comm.size if comm.rank == 1 else None
    dist.gather_object(comm.rank**2, on_root, 1)
    assert on_root in (None, [rank**2 for rank in range(comm.size)])


def test_barriers(torch, dist, comm):
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    if torch.__version__ < "2.14":
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
    else:
        dist.monitored_barrier()


def test_works_and_futures(torch, dist, comm):
    tensor = torch.full((2,), comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2 * total] * 2
    assert work.get_future().wait()[0] is tensor
    assert work.result()[0] is tensor
    # A call that is waited for comes after those that are not, on every rank alike or not.
    tensor.fill_(comm.rank)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    if comm.rank:
        dist.all_reduce(tensor, async_op=True).wait()
    else:
        dist.all_reduce(tensor)
    assert tensor[0].item() == comm.size**3 * comm.size * (comm.size - 1) / 2
    assert all(each.is_completed() for each in works)


@pytest.mark.parametrize("patient", ["all", "rank 0", "none"])
def test_brief_calls_of_ranks_that_come_soon(torch, dist, comm, monkeypatch, patient):
    """They run in the thread of the program, whose other thread then has nothing to do."""
    from collectives.torch import call_queue

    waits = patient == "all" or (patient == "rank 0" and comm.rank == 0)
    monkeypatch.setattr(call_queue, "_HANDOVER_SECONDS", 60.0 if waits else 0.0)
    group = dist.new_group()
    for turn in range(20):
        tensor = torch.full((1000,), comm.rank + turn + 1.0)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert patient != "all" or work.is_completed()
        work.wait()
        assert tensor[-1].item() == comm.size * (turn + 1 + (comm.size - 1) / 2)
    large = torch.full((1 << 20,), comm.rank + 1.0)
    assert group._queue._thread is None or patient != "all"
    dist.all_reduce(large, group=group, async_op=True).wait()
    assert group._queue._thread is not None
    assert large[-1].item() == comm.size * (comm.size + 1) / 2
    dist.destroy_process_group(group)


def intents_of(group):
    return group._queue.scope.call_check.intents


def nothing_to_reduce(torch, dist, group):
    group.allreduce_coalesced([]).wait()
    assert intents_of(group).unmade == 1


def arguments_that_are_refused(torch, dist, group):
    with pytest.raises(TypeError, match="bitwise_and"):
        dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND, group=group, async_op=True).wait()
    assert intents_of(group).unmade == 1


def a_group_that_was_closed(torch, dist, group):
    """Whose memory that group has now."""
    word = intents_of(group)._memory.own[INTENDED]
    if dist.get_rank() == 0:
        with pytest.raises(UnusableError, match="closed"):
            group.before.allreduce([torch.zeros(2)]).wait()
    assert intents_of(group)._memory.own[INTENDED] == word


def an_interrupt(torch, dist, group):
    from collectives.shm import intents

    def interrupted():
        raise KeyboardInterrupt

    if dist.get_rank():
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(intents.os, "sched_yield", interrupted)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(torch.zeros(2), group=group, async_op=True)


@pytest.mark.parametrize(
    "before", [nothing_to_reduce, arguments_that_are_refused, a_group_that_was_closed, an_interrupt]
)
def test_an_asynchronous_call_waits_for_no_rank_that_waits_for_its_own(
    torch, dist, comm, monkeypatch, before
):
    """Whatever call that wasn't made came before."""
    from collectives.torch import call_queue

    monkeypatch.setattr(call_queue, "_HANDOVER_SECONDS", 0.05)
    closed = dist.new_group()
    dist.all_reduce(torch.zeros(2), group=closed)
    dist.destroy_process_group(closed)
    group = dist.new_group()
    group.before = closed
    for _ in range(2):
        dist.all_reduce(torch.zeros(2), group=group)
    before(torch, dist, group)
    dist.barrier()
    tensor, message = torch.full((2,), comm.rank + 1.0), torch.zeros(1)
    if comm.rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        for peer in range(1, comm.size):
            dist.send(message, peer)
    else:
        dist.recv(message, 0)
        work = dist.all_reduce(tensor, group=group, async_op=True)
    work.wait()
    assert tensor[0].item() == comm.size * (comm.size + 1) / 2
    dist.destroy_process_group(group)


def test_an_asynchronous_call_waits_for_no_rank_that_computes(torch, dist, comm, monkeypatch):
    """A call in another thread than the program's takes turns with it, where a rank is late too."""
    from collectives.torch import call_queue

    monkeypatch.setattr(call_queue, "_HANDOVER_SECONDS", 60.0 if comm.rank else 0.0)
    group, message, threads = dist.new_group(), torch.zeros(1), []
    all_reduce = group._calls.all_reduce

    def noted(*arguments):
        threads.append(threading.current_thread())
        all_reduce(*arguments)

    monkeypatch.setattr(group._calls, "all_reduce", noted)
    tensors = [torch.full((2,), comm.rank + turn + 1.0) for turn in range(2)]
    if comm.rank == 0:
        works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
        for peer in range(1, comm.size):
            dist.send(message, peer)
        for work in works:
            work.wait()
    else:
        dist.recv(message, 0)
        # Rank 0's other thread is in the second call when this one has made the first.
        for each in tensors:
            dist.all_reduce(each, group=group, async_op=True).wait()
    assert threading.current_thread() not in threads
    total = comm.size * (comm.size + 1) / 2
    assert [each[0].item() for each in tensors] == [total, total + comm.size]
    dist.destroy_process_group(group)


def test_an_interrupt_of_an_asynchronous_call_is_raised_at_once(torch, dist, comm, monkeypatch):
    from collectives.torch import call_queue

    group = dist.new_group()

    def interrupted(*_):
        # One that fails earlier is waited for no more.
        comm.barrier()
        raise KeyboardInterrupt

    monkeypatch.setattr(call_queue, "_HANDOVER_SECONDS", 60.0)
    monkeypatch.setattr(group._calls, "all_reduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dist.all_reduce(torch.zeros(2), group=group, async_op=True)
    dist.destroy_process_group(group)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_methods_of_the_group(torch, dist, comm):
    """The forms without options."""
    group, size = dist.group.WORLD, comm.size
    tensor = torch.full((2,), comm.rank + 1.0)
    group.allreduce(tensor).wait()
    assert tensor[0].item() == size * (size + 1) / 2
    tensor.fill_(comm.rank)
    group.allreduce([tensor], dist.ReduceOp.MAX).wait()
    group.broadcast(tensor, 0).wait()
    assert tensor[0].item() == size - 1
    group.reduce(tensor.fill_(comm.rank), 0, dist.ReduceOp.MAX).wait()
    outputs = [torch.zeros(2) for _ in range(size)]
    group.allgather(outputs, tensor.fill_(comm.rank)).wait()
    assert [each[0].item() for each in outputs] == list(range(size))
    group.barrier().wait()
    assert (group.rank(), group.size(), group.name()) == (comm.rank, size, "collectives")
    assert group._get_backend(torch.device("cpu")) is group
    with pytest.raises(NotImplementedError, match="use torch"):
        group.split_group([0])
    # As `init_process_group` asks where it is given a `device_id`.
    assert not group._get_backend(torch.device("cpu")).supports_splitting
    attached = []
    attach = collectives_torch_entry._to_other_groups(lambda *given: attached.append(given))
    attach(group, "backends", [0])
    attach("another group", "backends", [0])
    assert attached == [("another group", "backends", [0])]
    half = torch.tensor([comm.rank + 1j]).to(torch.complex32)
    group.reduce(half, 0).wait()
    assert half.tolist() == [
        size * (size - 1) / 2 + size * 1j if comm.rank == 0 else comm.rank + 1j
    ]


def test_the_profiler_shows_calls(torch, dist, comm):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(1 << 20), 0, async_op=True).wait()
        dist.barrier()
    shown = {each.key for each in profile.key_averages()}
    assert {f"collectives:{name}" for name in ("allreduce", "broadcast", "barrier")} <= shown


def test_groups(torch, dist, comm):
    ranks = [*range(1, comm.size), 0]
    group = dist.new_group(ranks[:-1])
    if comm.rank:
        tensor = torch.tensor([float(comm.rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(ranks)
        assert dist.get_rank(group) == comm.rank - 1
        dist.broadcast(tensor.fill_(comm.rank), comm.size - 1, group=group)
        assert tensor.item() == comm.size - 1
        dist.destroy_process_group(group)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
    alone, _ = dist.new_subgroups(1)
    tensor = torch.tensor([comm.rank + 1.0])
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == comm.rank + 1
    # Groups in another order on each rank, as independent communicators permit.
    groups = [dist.new_group(), dist.new_group()]
    tensors = [torch.tensor([1.0 + comm.rank]) for _ in groups]
    order = (0, 1) if comm.rank else (1, 0)
    works = [dist.all_reduce(tensors[n], group=groups[n], async_op=True) for n in order]
    for work in works:
        work.wait()
    total = comm.size * (comm.size + 1) / 2
    assert [each.item() for each in tensors] == [total, total]
    for each in (alone, *groups):
        dist.destroy_process_group(each)


@pytest.mark.ranks(2, 3)
def test_a_group_of_which_ranks_give_other_lists(torch, dist, comm):
    """The rank that another one has left out waits for nothing that never comes."""
    ranks = list(range(comm.size))
    if comm.rank == ranks[-1]:
        with pytest.raises(ValueError, match=r"another of these ranks made it of ranks \[0"):
            dist.new_group(ranks)
    else:
        dist.destroy_process_group(dist.new_group(ranks[:-1]))
    dist.barrier()


def test_a_mesh_and_functional_collectives(torch, dist, comm):
    from torch.distributed._functional_collectives import all_gather_single, all_reduce, wait_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, comm.size), mesh_dim_names=("a", "b"))
    reduced = all_reduce(torch.tensor([comm.rank + 1.0]), "sum", mesh["b"])
    assert wait_tensor(reduced).item() == comm.size * (comm.size + 1) / 2
    reduced = all_reduce(torch.tensor([comm.rank + 1.0]), "sum", (mesh, 0))
    assert wait_tensor(reduced).item() == comm.rank + 1
    joined = all_gather_single(torch.tensor([float(comm.rank)]), 0, mesh["b"])
    assert wait_tensor(joined).tolist() == list(range(comm.size))


@BOTH
def test_results_of_functional_collectives(torch, dist, comm, later):
    """They are awaited by the calls that are given them, those of another group as well."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce

    group, total = dist.new_group(), comm.size * (comm.size + 1) / 2

    def pending():
        made = all_reduce(torch.full((comm.size,), comm.rank + 1.0), "sum", dist.group.WORLD)
        assert isinstance(made, AsyncCollectiveTensor)
        return made

    reduced = pending()
    call(dist.all_reduce, reduced, group=group, later=later)
    assert reduced.tolist() == [total * comm.size] * comm.size
    rows = [torch.zeros(comm.size) for _ in range(comm.size)]
    call(dist.all_gather, rows, pending(), later=later)
    assert torch.stack(rows).tolist() == [[total] * comm.size] * comm.size
    lengths, moved = [1] * comm.size, torch.zeros(comm.size)
    call(dist.all_to_all_single, moved, pending(), lengths, lengths, later=later)
    assert moved.tolist() == [total] * comm.size
    to, from_, got = (comm.rank + 1) % comm.size, comm.rank - 1, torch.zeros(comm.size)
    sent = dist.isend(pending(), to)
    dist.recv(got, from_ % comm.size)
    sent.wait()
    assert got.tolist() == moved.tolist()
    dist.destroy_process_group(group)


def test_a_group_of_gloo_beside(torch, dist, comm):
    """Its ranks find each other through the same store."""
    group = dist.new_group(backend="gloo")
    tensor = torch.tensor([comm.rank + 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == comm.size * (comm.size + 1) / 2
    dist.destroy_process_group(group)


COLLECTIVES = [
    test_all_reduce,
    test_sparse_all_reduce,
    test_broadcast_and_reduce,
    test_all_gather,
    test_reduce_scatter,
    test_gather_and_scatter,
    test_all_to_all,
    test_coalesced_calls,
]
"""Tests of one call or several, which others run with tensors that lie elsewhere."""
