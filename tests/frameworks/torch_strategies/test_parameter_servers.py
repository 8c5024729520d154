"""Torch models whose parameters lie on parameter servers."""

import copy
import gc

import numpy as np
import pytest

import collectives
import strategies
from strategies.parameter_server import FixedShardsPartitioner
from tests.strategies.parameter_servers import number_of, run_workers, strategy_on, together

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3), pytest.mark.timeout_seconds(60)]

STEPS = 5


def network(torch, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model.register_buffer("seed", torch.tensor([float(seed)]))
    model[1].bias.requires_grad_(False)
    return model


def optimizer_of(torch, model, kind):
    trained = [each for each in model.parameters() if each.requires_grad]
    if kind == "SGD":
        return torch.optim.SGD(trained, 0.1, momentum=0.9)
    return torch.optim.Adam(trained, 0.05)


def train(torch, model, optimizer, worker, steps=STEPS):
    """The gradients depend on the worker and the step, and not on the parameters."""
    for number in range(steps):
        optimizer.zero_grad()
        trained = [each for each in model.parameters() if each.requires_grad]
        sum((each * (worker + 1.5) * (number - 1)).sum() for each in trained).backward()
        optimizer.step()


def values_of(model):
    return [each.detach().numpy().copy() for each in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"staleness": 1}),
        ("Adam", {"variable_partitioner": FixedShardsPartitioner(2)}),
    ],
)
def test_servers_add_the_steps_of_all_workers(torch, comm, kind, options):
    def work(strategy):
        # The chief's parameters and buffers count.
        model = network(torch, 1 if strategy.is_chief else 2)
        optimizer = optimizer_of(torch, model, kind)
        assert strategy.distribute(model, optimizer) == (model, optimizer)
        together(strategy)
        begun = values_of(model), model.seed.item()
        together(strategy)
        train(torch, model, optimizer, number_of(strategy))
        together(strategy)
        # A step that changes nothing pulls what the other workers have pushed.
        optimizer.zero_grad()
        optimizer.step()
        return begun, values_of(model)

    results = run_workers(comm, 1, work, **options)
    start = network(torch, 1)
    wanted = values_of(start)
    for worker in range(len(results)):
        alone = copy.deepcopy(start)
        train(torch, alone, optimizer_of(torch, alone, kind), worker)
        for total, last, first in zip(wanted, values_of(alone), values_of(start), strict=True):
            total += last - first
    assert not np.allclose(wanted[0], values_of(start)[0])
    for (begun, seed), last in results:
        assert seed == 1
        for given, first in zip(begun, values_of(start), strict=True):
            np.testing.assert_array_equal(given, first)
        for given, total in zip(last, wanted, strict=True):
            np.testing.assert_allclose(given, total, atol=1e-5)


def test_models_that_share_parameters(torch, comm):
    """Each optimizer's steps count for them, also where gradients are gone after the step."""

    def models():
        torch.manual_seed(1)
        shared = torch.nn.Linear(3, 4)
        return [torch.nn.Sequential(shared, torch.nn.Linear(4, number)) for number in (1, 2)]

    def trained(pair, worker, strategy=None):
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in pair]
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.register_step_post_hook(lambda stepping, *_: stepping.zero_grad())
            if strategy is not None:
                strategy.distribute(model, optimizer)
        for model, optimizer in zip(pair, optimizers, strict=True):
            train(torch, model, optimizer, worker, steps=2)
        return optimizers

    def work(strategy):
        pair = models()
        optimizers = trained(pair, number_of(strategy), strategy)
        together(strategy)
        for each in optimizers:
            each.step()  # pulls
        return [values_of(each) for each in pair]

    results = run_workers(comm, 1, work)
    start = [values_of(each) for each in models()]
    for pair in results:
        for number, given in enumerate(pair):
            wanted = [each.copy() for each in start[number]]
            for worker in range(len(results)):
                alone = models()
                trained(alone, worker)
                columns = zip(wanted, values_of(alone[number]), start[number], strict=True)
                for total, last, first in columns:
                    total += last - first
            for one, other in zip(given, wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5)


def test_calls_again_and_refusals(torch, comm):
    def work(strategy):
        model = network(torch, 1)
        optimizer = optimizer_of(torch, model, "SGD")
        with pytest.raises(TypeError, match="takes no weighted"):
            strategy.distribute(model, optimizer, weighted=True)
        with pytest.raises(TypeError, match="model is a object: must be a torch module"):
            strategy.distribute(object(), optimizer)
        wrapped = torch.nn.Sequential(model)
        for each in (model, wrapped, model):
            # The other calls do not make steps count twice.
            strategy.distribute(each, optimizer)
        train(torch, model, optimizer, 0, steps=1)
        other = torch.nn.Parameter(torch.ones(7))
        optimizer.add_param_group({"params": [other]})
        with pytest.raises(ValueError, match=r"parameter of shape \(7,\) that the model did not"):
            optimizer.step()
        # A model that is trained so passes the guard of `run`.
        strategy.run(lambda: model(torch.ones(1, 3)).sum().item())
        together(strategy)
        optimizer.param_groups.pop()
        optimizer.zero_grad()
        optimizer.step()
        trained = values_of(model)
        together(strategy)
        if strategy.is_chief:
            model.load_state_dict(network(torch, 3).state_dict())
        strategy.distribute(model, optimizer)
        for given, wanted in zip(values_of(model), values_of(network(torch, 3)), strict=True):
            np.testing.assert_array_equal(given, wanted)
        return len(strategy.roles.workers), trained

    start = network(torch, 1)
    for workers, values in run_workers(comm, 1, work):
        for given, first, each in zip(values, values_of(start), start.parameters(), strict=True):
            step = 0.1 * 1.5 * each.requires_grad
            np.testing.assert_allclose(given, first + workers * step, atol=1e-5)


def test_optimizers_of_several_calls_and_of_none(torch, comm):
    """Those of earlier calls go on; one that was not given is refused: no worker would see it."""

    def work(strategy):
        model, changed = network(torch, 1), number_of(strategy) + 1.0
        before, sgd = values_of(model), torch.optim.SGD
        first, second = (sgd(each.parameters(), 1.0) for each in model)
        strategy.distribute(model, first)
        # The scope's guard is asked first where no test before this one has had a model.
        refused = "SGD was not given to distribute|SGD would change variables inside the scope"
        with pytest.raises((TypeError, ValueError), match=refused):
            second.step()
        strategy.distribute(model, second)
        for each in model.parameters():
            each.grad = torch.full_like(each, changed) if each.requires_grad else None
        first.step()
        second.step()
        strategy.worker.client.fence()
        together(strategy)
        model.zero_grad()
        first.step()
        second.step()
        limited = torch.nn.Embedding(3, 2, max_norm=1.0)
        with pytest.raises(ValueError, match=r"max_norm=1\.0"):
            strategy.distribute(limited, sgd(limited.parameters(), 1.0))
        pair = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
        names = ["a", "b"] if strategy.is_chief else ["b", "a"]
        crossed = torch.nn.ModuleDict(dict(zip(names, pair, strict=True)))
        if strategy.is_chief:
            strategy.distribute(crossed, sgd(crossed.parameters(), 1.0))
        else:
            with pytest.raises(collectives.MismatchError, match=r"the chief's is a\.weight"):
                strategy.distribute(crossed, sgd(crossed.parameters(), 1.0))
        return before, values_of(model)

    results = run_workers(comm, 1, work)
    total = sum(range(1, len(results) + 1))
    for before, after in results:
        for number, (first, last) in enumerate(zip(before, after, strict=True)):
            np.testing.assert_allclose(last, first - total * (number < 3), atol=1e-6)


def test_an_optimizer_that_steps_another_one(torch, comm):
    """As Lookahead does: the inner one was not given, and its steps are part of the outer's."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self):
            self.inner.step()

    def work(strategy):
        model = network(torch, 1)
        before = values_of(model)[0]
        outer = Outer(torch.optim.SGD(model.parameters(), 1.0))
        strategy.distribute(torch.nn.ModuleList([model]), outer)
        gc.collect()
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        outer.step()
        strategy.worker.client.fence()
        together(strategy)
        with pytest.raises(ValueError, match="SGD was not given"):
            outer.inner.step()
        # Neither is it permitted after an error inside the outer's step.
        outer.inner, inner = None, outer.inner
        with pytest.raises(AttributeError):
            outer.step()
        with pytest.raises(ValueError, match="SGD was not given"):
            inner.step()
        outer.inner = inner
        model.zero_grad()
        outer.step()
        np.testing.assert_allclose(values_of(model)[0], before - (comm.size - 1), atol=1e-6)
        # The modules are still served, whatever else is gone.
        inner = outer.inner
        del outer
        gc.collect()
        with pytest.raises(ValueError, match="SGD was not given"):
            inner.step()

    # Not in its scope, which refuses such optimizers.
    with strategy_on(comm, 1) as strategy:
        if comm.rank in strategy.roles.servers:
            strategy.serve()
        else:
            work(strategy)
            strategy.shutdown()


def test_other_models_than_the_chiefs(torch, comm):
    """Of other numbers, names or shapes; the next ones are not mixed with them."""

    def distributed(strategy, *layers):
        model = torch.nn.Sequential(*layers)
        return strategy.distribute(model, torch.optim.SGD(model.parameters(), 1.0))[0]

    def linear():
        return torch.nn.Linear(3, 3)

    def work(strategy):
        chiefs = [
            [linear(), linear()],
            [linear(), torch.nn.ReLU()],
            [torch.nn.BatchNorm1d(3)],
        ]
        others = [
            ([linear()], "of 2 new parameters.* but the chief .*4 new"),
            ([torch.nn.ReLU(), linear()], "1.weight: the chief's is 0.weight"),
            ([torch.nn.LayerNorm(3)], "and 0 buffers, but the chief .*3 buffers"),
        ]
        for layers, (own, text) in zip(chiefs, others, strict=True):
            if strategy.is_chief:
                distributed(strategy, *layers)
            else:
                with pytest.raises(collectives.MismatchError, match=text):
                    distributed(strategy, *own)
        torch.manual_seed(number_of(strategy))
        return values_of(distributed(strategy, linear()))[0].tolist()

    results = run_workers(comm, 1, work)
    assert results == [results[0]] * len(results)


def test_checkpoints_hold_the_servers_values(torch, comm, tmp_path):
    """Those of all workers' steps; what is restored after `distribute` counts on the servers."""
    path = comm.broadcast_object(str(tmp_path / "state"))

    def work(strategy):
        model = network(torch, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        strategy.distribute(model, optimizer)
        # What shares the model's parameters, and goes.
        shared = torch.nn.ParameterList(model.parameters())
        strategy.distribute(shared, torch.optim.SGD(shared.parameters(), 1.0))
        del shared
        gc.collect()
        begun = values_of(model)[0]
        together(strategy)
        checkpoint = strategies.Checkpoint(model=model)
        for each in model.parameters():
            each.grad = torch.full_like(each, number_of(strategy) + 1.0)
        strategy.is_chief and optimizer.step()
        together(strategy)
        strategy.is_chief or optimizer.step()
        strategy.worker.client.fence()
        together(strategy)
        checkpoint.save(path)
        # As of a worker that goes on.
        optimizer.step()
        strategy.worker.client.fence()
        together(strategy)
        checkpoint.restore(path)
        restored = values_of(model)[0]
        together(strategy)
        model.zero_grad()
        optimizer.step()  # pulls
        return begun, restored, values_of(model)[0]

    results = run_workers(comm, 1, work)
    total = sum(range(1, len(results) + 1))
    for begun, restored, last in results:
        np.testing.assert_allclose(restored, begun - total, atol=1e-6)
        np.testing.assert_allclose(last, restored, atol=1e-6)


def test_other_ranks(torch, comm):
    model = network(torch, 1)
    optimizer = optimizer_of(torch, model, "SGD")
    with strategy_on(comm, 1) as strategy:
        if comm.rank in strategy.roles.servers:
            with pytest.raises(RuntimeError, match="is not a worker"):
                strategy.distribute(model, optimizer)
            strategy.serve()
        else:
            strategy.shutdown()
    if comm.size > 2:
        with strategy_on(comm, 1, chief=True) as strategy:
            if comm.rank in strategy.roles.servers:
                strategy.serve()
                return
            with pytest.raises(TypeError, match="needs a cluster without chief"):
                strategy.distribute(model, optimizer)
            strategy.shutdown()
    assert strategies.has_strategy() is False


def test_a_parameter_that_is_frozen_with_a_gradient(torch, comm):
    """torch's optimizers step it all the same."""

    def work(strategy):
        model = network(torch, 1)
        model[1].bias.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.distribute(model, optimizer)
        together(strategy)
        sum((each * (number_of(strategy) + 1.0)).sum() for each in model.parameters()).backward()
        model[1].bias.requires_grad_(False)
        before = model[1].bias.detach().clone()
        optimizer.step()
        strategy.worker.client.fence()
        together(strategy)
        optimizer.zero_grad()
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        model[1].bias.grad = torch.zeros_like(model[1].bias)
        optimizer.step()
        return (before - model[1].bias.detach()).numpy()

    workers = comm.size - 1
    for moved in run_workers(comm, 1, work):
        np.testing.assert_allclose(moved, 0.1 * sum(range(1, workers + 1)), rtol=1e-5)
