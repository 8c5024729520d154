"""torch on two ranks of one GPU: tests of the frameworks, with tensors on the GPU by default."""

import gc
import os
from functools import partial

import pytest

import strategies
from tests.frameworks.torch_backend import conftest as backend
from tests.frameworks.torch_backend import test_operations as operations
from tests.frameworks.torch_backend import test_other_devices as other_devices
from tests.frameworks.torch_backend import test_wrappers as wrappers
from tests.frameworks.torch_functions import test_functions as functions
from tests.frameworks.torch_functions import test_sync_batch_norm as batch_norm
from tests.frameworks.torch_horovod import test_optimizer as horovod
from tests.frameworks.torch_strategies import test_distribute as distribute
from tests.frameworks.torch_strategies import test_gradients as gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.mpi,
    pytest.mark.ranks(2),
    pytest.mark.timeout_seconds(90),
    pytest.mark.filterwarnings("default"),  # those of torch differ between its versions
]
# torch's names before version 2.13.
OLDER = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
dist = backend.dist


@pytest.fixture
def on_gpu(torch, dist):
    for name, older in OLDER.items():
        if not hasattr(dist, name):
            setattr(dist, name, getattr(dist, older))
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "test",
    [
        *operations.COLLECTIVES,
        operations.test_all_reduce_of_other_dtypes,
        operations.test_bitwise_all_reduce,
        operations.test_premultiplied_sum,
    ],
    ids=lambda test: test.__name__,
)
def test_calls(torch, dist, comm, on_gpu, test, later):
    test(torch, dist, comm, later)


@pytest.mark.parametrize(
    "test",
    [
        operations.test_layouts_and_storages,
        operations.test_messages,
        operations.test_callbacks_of_messages_may_wait_for_them,
        operations.test_batches_of_messages,
        operations.test_objects,
        operations.test_works_and_futures,
        *(partial(wrappers.test_ddp, options=options) for options in wrappers.DDP),
        wrappers.test_ddp_accumulates_and_clips,
        *(partial(wrappers.test_hooks_of_ddp, hook=hook) for hook in ("fp16", "bf16", "PowerSGD")),
        wrappers.test_zero_redundancy_optimizer,
        wrappers.test_fsdp1,
        wrappers.test_fsdp2,
        wrappers.test_tensor_parallel,
        wrappers.test_a_pipeline,
        wrappers.test_join_with_uneven_inputs,
        other_devices.test_a_group_of_two_backends,
    ],
    ids=lambda test: getattr(test, "__name__", None) or "-".join(test.keywords.values()),
)
def test_torch_on_a_group(torch, dist, comm, on_gpu, test):
    if test is operations.test_objects:
        test(dist, comm)
    else:
        test(torch, dist, comm)


@pytest.mark.parametrize(
    "test",
    [
        *(
            partial(distribute.test_steps_are_those_of_one_process, kind=kind)
            for kind in ("worker", "mirrored", "central")
        ),
        partial(gradients.test_backward_gives_the_mean, to_none=True, overlap=True),
        partial(gradients.test_backward_gives_the_mean, to_none=False, overlap=False),
        gradients.test_accumulation,
        partial(gradients.test_weights, overlap=True),
        partial(gradients.test_unused_parameters_are_an_error_on_every_rank, overlap=True),
        gradients.test_sparse_gradients,
        gradients.test_dtypes_and_the_wire,
        partial(gradients.test_an_exception_in_backward_is_an_error_on_every_rank, overlap=True),
        *(
            partial(batch_norm.test_as_batch_norm_of_the_whole_batch, case=case)
            for case in ("images", "different batches", "an empty batch")
        ),
        batch_norm.test_half_precision,
    ],
    ids=lambda test: (
        getattr(test, "__name__", None)
        or "-".join([test.func.__name__, *map(str, test.keywords.values())])
    ),
)
def test_strategies(torch, comm, on_gpu, test):
    test(torch, comm)


def test_a_checkpoint_on_the_gpu(torch, comm, tmp_path):
    folder = comm.broadcast_object(str(tmp_path))
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    batch = torch.full((4, 3), comm.rank + 1.0, device="cuda")

    def made(seed):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2).cuda()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        strategy.distribute(model, optimizer)
        return model, optimizer

    def step(model, optimizer):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    one, other = made(1), made(2)
    for _ in range(2):
        step(*one)
    path = strategies.Checkpoint(model=one[0], optimizer=one[1]).save(f"{folder}/state")
    strategies.Checkpoint(model=other[0], optimizer=other[1]).restore(path)
    for each in (one, other):
        step(*each)
    assert other[0].weight.is_cuda
    torch.testing.assert_close(other[0].state_dict(), one[0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("later", [False, True], ids=["saved", "async_save"])
def test_a_distributed_checkpoint(torch, dist, comm, on_gpu, later, tmp_path):
    wrappers.test_distributed_checkpoint(torch, dist, comm, later, tmp_path)


def test_parameters_that_must_lie_on_the_cpu(torch, comm, on_gpu):
    strategy = strategies.LocalSGDStrategy(2, communicator=comm)
    with pytest.raises(TypeError, match="weight is a tensor on cuda:0: must lie on the CPU"):
        strategy.distribute(torch.nn.Linear(2, 1), [])


@pytest.mark.parametrize(
    "test",
    [functions.test_first_and_second_derivatives, functions.test_values_and_dtypes],
    ids=lambda test: test.__name__,
)
def test_differentiable_calls(torch, comm, on_gpu, test):
    import collectives.torch

    test(torch, collectives.torch, comm)


@pytest.mark.parametrize("case", ["plain", "fp16", "sum", "passes"])
def test_horovod(torch, comm, on_gpu, case):
    import collectives.torch.horovod as hvd

    hvd.init()
    horovod.test_training(torch, hvd, comm, case)


def test_the_path(torch, dist, comm, on_gpu):
    """As `run.sh` expects it, which has a group of tests for each path."""
    for group in (comm, dist.group.WORLD._comm):
        group.all_reduce(torch.ones(2))
        assert group._devices._path.name == os.environ.get("GPU_TESTS_PATH", "ipc")


@pytest.mark.parametrize("root", [0, 1])
def test_what_is_read_follows_the_stream(torch, dist, comm, on_gpu, root):
    """A tensor that is broadcast, reduced or gathered may be overwritten after the call."""
    stream = torch.cuda.Stream()
    tensor, seen = torch.ones(1 << 20), torch.ones(1 << 20)
    parts = [torch.ones(1 << 20) for _ in range(comm.size)] if comm.rank == root else None
    torch.cuda.synchronize()  # they are made on another stream
    for turn in range(3):
        with torch.cuda.stream(stream):
            tensor.fill_(turn + comm.rank)
            dist.broadcast(tensor, root)
            seen.copy_(tensor)
            tensor.zero_()
            assert torch.equal(seen, torch.full_like(seen, turn + root))
            tensor.fill_(turn + comm.rank)
            dist.gather(tensor, parts, root)
            tensor.fill_(turn + comm.rank)
            dist.reduce(tensor, root)
            if comm.rank == root:
                assert torch.equal(tensor, torch.full_like(tensor, 2 * turn + 1))
                assert [each[0].item() for each in parts] == [turn, turn + 1]


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_calls_follow_the_stream(torch, dist, comm, on_gpu, later):
    """On a stream of the program's, after its slow work, and before the work of another stream."""
    total = comm.size * (comm.size + 1) / 2
    tensor = torch.zeros(1 << 16)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(first):
            tensor.zero_()
            torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
            tensor += comm.rank + 1
            work = dist.all_reduce(tensor, async_op=later)
            if not later:
                found = tensor * 2
        if later:
            with torch.cuda.stream(second):
                work.wait()
                found = tensor * 2
            second.synchronize()
        else:
            first.synchronize()
        assert torch.equal(found, torch.full_like(found, 2 * total))


def test_the_program_computes_while_an_asynchronous_call_runs(torch, dist, comm, on_gpu):
    """Over NCCL: rank 1 comes late on its GPU, and rank 0's stream does not wait for it."""
    if dist.group.WORLD._comm._devices._path.name != "nccl":
        pytest.skip("over CUDA IPC a call waits for the other ranks on the host")
    tensor, other = torch.ones(1 << 16), torch.ones(1 << 16)
    for waits in ("work", "future", "callback"):
        tensor.fill_(comm.rank + 1)
        if comm.rank:
            torch.cuda._sleep(400_000_000)  # cycles: some 0.2 s
        work = dist.all_reduce(tensor, async_op=True)
        end = work if waits == "work" else work.get_future()
        if waits == "callback":
            end = end.then(lambda future: future.value()[0].mul_(2))
        other += 1
        computed = torch.cuda.current_stream().record_event()
        if comm.rank == 0:
            computed.synchronize()
            assert not work.is_completed(), waits
        end.wait()
        assert torch.equal(tensor, torch.full_like(tensor, 6 if waits == "callback" else 3))
    assert torch.equal(other, torch.full_like(other, 4))


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_graph_of_torch(torch, dist, comm, on_gpu, later):
    if dist.group.WORLD._comm._devices._path.name != "nccl":
        pytest.skip("over CUDA IPC no call can be captured")
    given, total = torch.zeros(1000), torch.zeros(1000)

    def call():
        total.copy_(given)
        work = dist.all_reduce(total, async_op=later)
        if later:
            work.wait()
        total.add_(1)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    for number in range(3):
        given.fill_(number + comm.rank)
        graph.replay()
        assert torch.equal(total, torch.full_like(total, 2 * number + 2))


def test_tensors_of_an_asynchronous_call_may_be_dropped(torch, dist, comm, on_gpu):
    """Their memory is given to no other tensor while the call uses it."""
    totals = [torch.zeros(2, 1 << 16) for _ in range(3)]
    for total in totals:
        if comm.rank:
            torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        part = torch.full((1 << 16,), comm.rank + 1.0)
        dist.all_gather_single(total.reshape(-1), part, async_op=True)
        del part
        rubbish = [torch.full((1 << 16,), -1.0) for _ in range(4)]
        del rubbish
    torch.cuda.synchronize()
    for total in totals:
        for rank in range(comm.size):
            assert torch.equal(total[rank], torch.full_like(total[rank], rank + 1))


def test_tensors_outlive_a_group(torch, dist, comm, on_gpu):
    """torch waits for the streams that have used a tensor, the group's too, when it is freed."""
    group = dist.new_group()
    tensor = torch.full((1 << 16,), comm.rank + 1.0)
    for _ in range(3):  # all ranks choose a path in the first one
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True).wait()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert torch.equal(tensor, torch.full_like(tensor, 2))
    del tensor
    torch.cuda.synchronize()
    assert torch.ones(1 << 16).sum().item() == 1 << 16


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_recurring_calls(torch, dist, comm, on_gpu, later):
    """Of new tensors at every turn, of which some lie where others were before."""
    rank, size = comm.rank, comm.size
    ranks = [float(each) for each in range(size)]

    def call(function, *arguments):
        work = function(*arguments, async_op=later)
        if later:
            work.wait()

    for turn in range(5):
        own = torch.full((4 * size,), turn + rank + 1.0)
        total = size * (turn + 1.0) + sum(ranks)
        tensor, everything, part = own.clone(), torch.zeros(4 * size * size), torch.zeros(4)
        call(dist.all_gather_into_tensor, everything, own)
        call(dist.reduce_scatter_tensor, part, own)
        call(dist.all_reduce, own)
        call(dist.broadcast, tensor, turn % size)
        assert own.tolist() == [total] * 4 * size
        assert part.tolist() == [total] * 4
        assert tensor.tolist() == [turn + turn % size + 1.0] * 4 * size
        assert everything.reshape(size, -1)[:, 0].tolist() == [turn + each + 1 for each in ranks]
        total = sum(ranks) + size * turn
        assert comm.all_reduce(torch.full((5,), rank + turn)).tolist() == [total] * 5
        started = comm.all_reduce_async(torch.full((5,), rank + turn))
        assert started.wait().tolist() == [total] * 5
