"""Torch models whose gradients are compressed between nodes."""

import copy
import gc

import numpy as np
import pytest
from sklearn.datasets import load_digits

import collectives
import strategies

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3), pytest.mark.timeout_seconds(60)]


@pytest.fixture(autouse=True)
def _one_thread(torch):
    torch.set_num_threads(1)


@pytest.fixture
def nodes(comm):
    """The ranks, as if they were on two nodes."""
    from mpi4py import MPI

    with collectives.Communicator(MPI.COMM_WORLD, deadline=30, node_of=[0, 1, 1]) as spread:
        yield spread


def strategy_of(nodes, compression):
    options = strategies.CommunicationOptions(compression=compression)
    return strategies.MultiWorkerMirroredStrategy(None, options, communicator=nodes)


def check_same_on_all(comm, tensors):
    for own in tensors:
        for other in comm.all_gather(own.detach()[None]):
            np.testing.assert_array_equal(other, own.detach())


def test_convergence(torch, nodes):
    """Digits are recognized as with exact gradients; all ranks keep the same bits."""
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images = images.float() / 16
    nn = torch.nn

    def accuracy(strategy):
        torch.manual_seed(1 + nodes.rank)
        model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        strategy.distribute(model, optimizer)
        chance = torch.Generator().manual_seed(0)
        for _ in range(150):
            chosen = torch.randint(400, len(images), (96,), generator=chance)
            own = chosen.chunk(nodes.size)[nodes.rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[own]), labels[own]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        check_same_on_all(nodes, model.parameters())
        return (model(images[:400]).argmax(1) == labels[:400]).float().mean()

    exact = accuracy(strategies.MultiWorkerMirroredStrategy(communicator=nodes))
    strategy = strategy_of(nodes, "powersgd(2)")
    compressed = accuracy(strategy)
    assert exact > 0.9
    assert compressed > exact - 0.03
    sent = 4 * (2 * (64 + 48 + 48 + 10) + 48 + 10)
    assert strategy.compressed.bytes_between_nodes == (sent if nodes.local_rank == 0 else 0)


def mixed_model(torch, rank):
    """Parameters of two dtypes, in several layouts; sparse gradients, and none."""
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4, sparse=True)
            self.convolution = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
            self.wide = nn.Linear(6, 5, dtype=torch.float64)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.of_rank_1 = nn.Linear(6, 3)
            self.unused = nn.Linear(2, 2)

        def forward(self, rows):
            images = self.embedding(rows).reshape(-1, 4, 3, 3)
            features = self.convolution(images).flatten(1).tanh() * self.scale
            loss = self.wide(features.double()).square().mean()
            if rank == 1:
                loss = loss + self.of_rank_1(features).square().mean()
            return loss

    torch.manual_seed(3)
    return Model()


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_are_those_of_exact_reductions(torch, nodes, weighted):
    """`topk(1)` leaves nothing out. With accumulation, weights, and a rank without samples."""
    model = mixed_model(torch, nodes.rank)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy = strategy_of(nodes, "topk(1)")
    strategy.distribute(model, optimizer, unused="zeros", weighted=weighted)
    gradients = strategy.gradients_of(model)
    chance = torch.Generator().manual_seed(nodes.rank)
    for weights in [(1, 1, 1), (1, 2, 3), (0, 1, 5)] if weighted else [(1, 1, 1)] * 3:
        weight = weights[nodes.rank]
        inputs = [torch.randint(9, (2, 9), generator=chance) for _ in range(2)]
        model.zero_grad(set_to_none=weights[1] == 1)
        alone.zero_grad()
        for each in inputs:
            alone(each).backward()
        if weighted:
            gradients.weight = weight
        with gradients.no_sync():
            model(inputs[0]).backward()
        if weight:
            model(inputs[1]).backward()
        else:
            gradients.wait()
        for (name, own), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            if name.startswith("unused"):  # on every rank
                assert own.grad is None
                continue
            gradient = torch.zeros_like(other) if other.grad is None else other.grad.to_dense()
            mean = nodes.all_reduce((gradient * weight).contiguous()) / sum(weights)
            torch.testing.assert_close(own.grad.to_dense(), mean)
            check_same_on_all(nodes, [own.grad.to_dense().contiguous()])


def test_an_interrupted_backward_leaves_no_trace(torch, nodes):
    """The gradients after it are those of a model without it; both release what they left out."""
    from collectives.torch.gradients import GradientError

    strategy = strategy_of(nodes, "topk(0.25)")
    models = [torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 3)) for _ in range(2)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.nn.init.constant_(model[0].weight, 0.5)
        model.load_state_dict(models[0].state_dict())
        strategy.distribute(model, optimizer)
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(nodes.rank))

    def interrupt(gradient):
        raise ArithmeticError("in the middle of a backward")

    def backward(model):
        model.zero_grad()
        model(inputs).square().mean().backward()

    for step in range(3):
        for model in models:
            backward(model)
        for own, other in zip(*(each.parameters() for each in models), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=0, atol=0)
        if step == 1:
            if nodes.rank == 1:
                hook = models[0][0].weight.register_hook(interrupt)
                with pytest.raises(ArithmeticError, match="in the middle"):
                    backward(models[0])
                hook.remove()
                with pytest.raises(GradientError, match="an exception interrupted a backward"):
                    optimizers[0].step()
            else:
                with pytest.raises(GradientError, match="rank 1: an exception interrupted"):
                    backward(models[0])
    assert len(strategy.compressed._lists) == 2
    with pytest.raises(ValueError, match="only one of them"):
        strategy.distribute(models[0], optimizers[0], wire_dtype=torch.float16)
    with pytest.raises(TypeError, match="parameters on meta: gradients are compressed on the CPU"):
        strategy.distribute(torch.nn.Linear(2, 2, device="meta"), [])
    strategy.gradients_of(models[1]).close()
    del model, models, optimizer, optimizers, own, other
    gc.collect()
    assert not strategy.compressed._lists


def parameters_of(torch, strategy, dtypes):
    """One for each dtype, each with an optimizer that subtracts its gradients."""
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.zeros(8, 6, dtype=each)) for each in dtypes]
    )
    optimizers = [torch.optim.SGD([each], 1.0) for each in model]
    strategy.distribute(model, optimizers, unused="zeros")
    return model, optimizers


def check_sent(torch, model, optimizers, totals):
    """What was left out arrives in steps without gradients: nothing was lost."""
    for _ in range(24):
        model.zero_grad()
        sum((each * 0).sum() for each in model).backward()
        for optimizer in optimizers:
            optimizer.step()
    for own, total in zip(model, totals, strict=True):
        torch.testing.assert_close(own.detach(), -total, atol=1e-5, rtol=0)


@pytest.mark.parametrize("compression", ["topk(0.2)", "powersgd(1)"])
def test_parameters_without_gradients_lose_nothing(torch, nodes, compression):
    """Such as two networks that are trained in turn."""
    model, optimizers = parameters_of(torch, strategy_of(nodes, compression), [torch.float32] * 2)
    totals = [torch.zeros(8, 6) for _ in model]
    chance = torch.Generator().manual_seed(0)
    for number in range(6):
        turn = number % 2
        given = torch.randn(nodes.size, 8, 6, generator=chance)
        totals[turn] += given.mean(0)
        model.zero_grad()
        (model[turn] * given[nodes.rank]).sum().backward()
        optimizers[turn].step()
    check_sent(torch, model, optimizers, totals)


@pytest.mark.parametrize("compression", ["topk(0.2)", "powersgd(1)"])
def test_a_skipped_step_loses_nothing_of_another_dtype(torch, nodes, compression):
    dtypes = torch.float32, torch.float64
    model, optimizers = parameters_of(torch, strategy_of(nodes, compression), dtypes)
    totals = [torch.zeros(8, 6, dtype=each) for each in dtypes]
    chance = torch.Generator().manual_seed(0)
    for number in range(6):
        given = torch.randn(nodes.size, 8, 6, generator=chance)
        skipped = number in (1, 4)
        model.zero_grad()
        loss = sum((each * given[nodes.rank]).sum() for each in model)
        if skipped and nodes.rank == 1:
            loss = loss + (model[number // 3] * torch.inf).sum()
        loss.backward()
        assert all(bool(each.grad.isfinite().all()) for each in model) == (not skipped)
        for own, total, optimizer in zip(model, totals, optimizers, strict=True):
            if not skipped:
                total += given.mean(0).to(own.dtype)
                optimizer.step()
    check_sent(torch, model, optimizers, totals)
