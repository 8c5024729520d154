"""What torch builds on process groups trains on several ranks as one process does on all data."""

import contextlib
import copy
import functools
import shutil

import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.timeout_seconds(120),
    # torch warns of its own deprecated calls.
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]

STEPS = 3


def network(torch, seed=1):
    torch.manual_seed(seed)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def batches(torch, size):
    """Whole batches, of `size` equal parts."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return [torch.randn(size * 2, 6, generator=generator) for _ in range(STEPS)]


def loss_of(torch, model, batch):
    return model(batch).square().mean()


def trained_alone(torch, size, make=network, learning_rate=0.1):
    model = make(torch)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    for batch in batches(torch, size):
        optimizer.zero_grad()
        loss_of(torch, model, batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(torch, comm, model, optimizer, loss=loss_of):
    for batch in batches(torch, comm.size):
        optimizer.zero_grad()
        loss(torch, model, batch.chunk(comm.size)[comm.rank]).backward()
        optimizer.step()


def sgd(torch, model, learning_rate=0.1):
    return torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)


def check(torch, comm, parameters, expected, tolerance=1e-5):
    """The parameters are as expected, and the same bits on every rank."""
    parameters = [parameter.detach() for parameter in parameters]
    assert len(parameters) == len(expected)
    for given, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
    flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
    assert all(torch.equal(flat, each) for each in comm.all_gather(flat[None]))


DDP = {
    "default": {},
    "several buckets": {"bucket_cap_mb": 1e-4},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("options", DDP)
def test_ddp(torch, dist, comm, options):
    # Ranks start with different parameters: those of rank 0 count.
    model = network(torch, seed=1 + comm.rank)
    model = torch.nn.parallel.DistributedDataParallel(model, **DDP[options])
    train(torch, comm, model, sgd(torch, model))
    check(torch, comm, model.parameters(), trained_alone(torch, comm.size))


def test_ddp_with_parameters_that_some_ranks_do_not_use(torch, dist, comm):
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(2))

        def forward(self, batch, branch):
            return self.branches[branch](batch)

    torch.manual_seed(5)
    whole = Branches()
    model = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(whole), find_unused_parameters=True
    )
    branches = [int(rank == 0) for rank in range(comm.size)]
    model(torch.ones(1, 2), branches[comm.rank]).sum().backward()
    loss = sum(whole(torch.ones(1, 2), branch).sum() for branch in branches) / comm.size
    loss.backward()
    for given, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(given.grad, wanted.grad)


def test_ddp_accumulates_and_clips(torch, dist, comm):
    model = torch.nn.parallel.DistributedDataParallel(network(torch))
    alone = network(torch)
    whole = batches(torch, comm.size)
    for number, batch in enumerate(whole):
        last = number == len(whole) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss_of(torch, model, batch.chunk(comm.size)[comm.rank]).backward()
        loss_of(torch, alone, batch).backward()
    for each in (model, alone):
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
    gradients = [parameter.grad for parameter in model.parameters()]
    check(torch, comm, gradients, [parameter.grad for parameter in alone.parameters()])


@pytest.mark.parametrize("hook", ["fp16", "bf16", "PowerSGD"])
def test_hooks_of_ddp(torch, dist, comm, hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model = torch.nn.parallel.DistributedDataParallel(network(torch), bucket_cap_mb=1e-4)
    if hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        compress = getattr(default_hooks, f"{hook}_compress_hook")
        # Behind another name: by its own DDP permits bf16 with CUDA alone.
        model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
    train(torch, comm, model, sgd(torch, model))
    check(torch, comm, model.parameters(), trained_alone(torch, comm.size), tolerance=0.05)


def test_sparse_gradients_of_ddp(torch, dist, comm):
    def make(torch):
        torch.manual_seed(2)
        return torch.nn.EmbeddingBag(8, 3, sparse=True, mode="sum")

    rows = torch.arange(comm.size * 2).reshape(-1, 1) % 8
    model, alone = torch.nn.parallel.DistributedDataParallel(make(torch)), make(torch)
    model(rows.chunk(comm.size)[comm.rank]).square().mean().backward()
    alone(rows).square().mean().backward()
    (given,), (wanted,) = model.parameters(), alone.parameters()
    torch.testing.assert_close(given.grad.to_dense(), wanted.grad.to_dense())


def test_zero_redundancy_optimizer(torch, dist, comm):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.parallel.DistributedDataParallel(network(torch))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    train(torch, comm, model, optimizer)
    check(torch, comm, model.parameters(), trained_alone(torch, comm.size))
    optimizer.consolidate_state_dict(to=0)
    if comm.rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_fsdp1(torch, dist, comm):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        network(torch), device_id=torch.get_default_device(), use_orig_params=True
    )
    train(torch, comm, model, sgd(torch, model))
    with FullyShardedDataParallel.summon_full_params(model):
        check(torch, comm, model.parameters(), trained_alone(torch, comm.size))


def sharded(torch, dist, mesh=None, make=network):
    from torch.distributed.fsdp import fully_shard

    model = make(torch)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_fsdp2(torch, dist, comm):
    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (comm.size,))
    model = sharded(torch, dist, mesh)
    train(torch, comm, model, sgd(torch, model))
    parameters = [parameter.full_tensor() for parameter in model.parameters()]
    check(torch, comm, parameters, trained_alone(torch, comm.size))


def wide(torch):
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(nn.Linear(6, 4096), nn.Linear(4096, 9), nn.Linear(9, 4096))


def paths_of(group, count):
    """The paths of a group's last calls that move parameters or gradients, by collective."""
    entries = group._comm._engine.recorder.entries()[-count:]
    moved = [(call.collective, path) for _, call, path, *_ in entries if call.nbytes >= 16 << 10]
    return {name: {path for each, path in moved if each == name} for name, _ in moved}


def test_fsdp2_with_registered_buffers(torch, dist, comm):
    """The same weights, bit for bit, by calls that copy nothing, at other offsets on each rank."""
    from collectives.torch.fsdp import register_buffers

    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (comm.size,))
    models = [sharded(torch, dist, mesh, wide) for _ in range(2)]
    register_buffers(models[1])
    optimizers = [sgd(torch, model, 1e-4) for model in models]
    held = []
    for _ in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            train(torch, comm, model, optimizer)
        # 3 steps of 3 modules, each of 2 all_gathers and a reduce_scatter; root has no parameter.
        used = paths_of(mesh.get_group(), 6)
        if comm.rank and not held:
            group = models[1][0]._get_fsdp_state()._fsdp_param_groups[0]
            for buffers in (group._all_gather_comm, group._reduce_scatter_comm):
                held.append(buffers.allocate((5000,), dtype=torch.float32, device="cpu"))
                buffers._has_input = False
            pool = mesh.get_group()._comm._engine.node.pool
            assert all(pool.locate(each.data_ptr(), each.nbytes) for each in held)
    assert used == {"all_gather": {"direct"}, "reduce_scatter": {"direct"}}
    expected, given = ([each.full_tensor() for each in model.parameters()] for model in models)
    check(torch, comm, given, [each.detach() for each in expected], tolerance=0)


def test_what_has_no_buffers_to_register(torch, dist, comm):
    from collectives.torch.fsdp import register_buffers

    with pytest.raises(ValueError, match="fully_shard was not applied to this Sequential"):
        register_buffers(network(torch))


def test_tensor_parallel(torch, dist, comm):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (comm.size,))
    torch.manual_seed(0)
    whole = torch.randn(6, 6)
    split = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(split.full_tensor(), whole)
    assert torch.equal(split.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    product = (split @ split.t()).redistribute(mesh, [Replicate()]).to_local()
    torch.testing.assert_close(product, whole @ whole.t())

    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))

    model, alone = make(), make()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    batch = batches(torch, 2)[0]
    given, wanted = model(batch), alone(batch)
    torch.testing.assert_close(given, wanted)
    given.square().mean().backward()
    wanted.square().mean().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    check(torch, comm, gradients, [parameter.grad for parameter in alone.parameters()])


def test_a_pipeline(torch, dist, comm):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def layer(number):
        torch.manual_seed(number)
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())

    own = layer(comm.rank)
    batch = torch.randn(6, 4, generator=torch.Generator(torch.get_default_device()).manual_seed(9))
    target = torch.zeros(6, 4)
    stage = PipelineStage(
        own, comm.rank, comm.size, torch.get_default_device(), input_args=(batch[:2],)
    )
    schedule = ScheduleGPipe(stage, n_microbatches=3, loss_fn=torch.nn.MSELoss())
    losses = []
    if comm.rank == 0:
        schedule.step(batch)
    elif comm.rank == comm.size - 1:
        schedule.step(target=target, losses=losses)
    else:
        schedule.step()
    alone = torch.nn.Sequential(*(layer(number) for number in range(comm.size)))
    loss = torch.nn.functional.mse_loss(alone(batch), target)
    loss.backward()
    if comm.rank == comm.size - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
    wanted = [parameter.grad for parameter in alone[comm.rank].parameters()]
    for parameter, gradient in zip(own.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("later", [False, True], ids=["saved", "async_save"])
def test_distributed_checkpoint(torch, dist, comm, later, tmp_path):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    path = comm.broadcast_object(str(tmp_path) if comm.rank == 0 else None)
    mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (comm.size,))
    model = sharded(torch, dist, mesh)
    kept = [parameter.full_tensor().clone() for parameter in model.parameters()]
    state = {"model": get_model_state_dict(model)}
    if later:
        checkpoint.async_save(state, checkpoint_id=path).result()
    else:
        checkpoint.save(state, checkpoint_id=path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = {"model": get_model_state_dict(model)}
    checkpoint.load(loaded, checkpoint_id=path)
    set_model_state_dict(model, loaded["model"])
    check(torch, comm, [parameter.full_tensor() for parameter in model.parameters()], kept, 0)


def test_join_with_uneven_inputs(torch, dist, comm):
    from torch.distributed.algorithms.join import Join

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = 0
    with Join([model]):
        for _ in range(comm.rank + 2):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            steps += 1
    assert steps == comm.rank + 2
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert all(torch.equal(flat, each) for each in comm.all_gather(flat[None]))


def check_functional(torch, dist, comm, backend):
    """Functional collectives in one graph with what is computed between them."""
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def mixed(tensor):
        total = functional.all_reduce(tensor * 2, "sum", group)
        rows = functional.all_gather_tensor(tensor + total, 0, group)
        part = functional.reduce_scatter_tensor(rows.square(), "avg", 0, group)
        moved = functional.all_to_all_single(rows - 1, None, None, group)
        first = functional.broadcast(moved.cos(), 1, group)
        return rows, part + 1, moved, first.sum(0)

    given = torch.arange(6.0).reshape(2, 3) + comm.rank
    compiled = torch.compile(mixed, backend=backend, fullgraph=True)
    rows = torch.cat([torch.arange(6.0).reshape(2, 3) + rank for rank in range(comm.size)])
    total = 2 * sum(torch.arange(6.0).reshape(2, 3) + rank for rank in range(comm.size))
    rows = rows + total.repeat(comm.size, 1)
    for _ in range(2):
        for result, wanted in zip(compiled(given), mixed(given), strict=True):
            torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(compiled(given)[0], rows)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        # It starts a C++ compiler many times.
        pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout_seconds(600)]),
    ],
)
def test_compiled(torch, dist, comm, backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler is installed: inductor needs one")

    @functools.partial(torch.compile, backend=backend, fullgraph=True)
    def step(tensor):
        doubled = tensor * 2
        dist.all_reduce(doubled)
        return doubled + 1

    given = torch.full((4,), comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    for _ in range(2):
        assert step(given).tolist() == [2 * total + 1] * 4
    check_functional(torch, dist, comm, backend)
    model = torch.compile(
        torch.nn.parallel.DistributedDataParallel(network(torch)), backend=backend
    )
    train(torch, comm, model, sgd(torch, model))
    check(torch, comm, model.parameters(), trained_alone(torch, comm.size))
