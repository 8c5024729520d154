"""Which objects of torch train, and which are refused by one of several ranks."""

import numpy as np
import pytest

from strategies import Checkpoint, Variable, optimizers
from strategies.foreign.torch_models import Torch
from tests.strategies.support import refusal

KNOWN = Torch()

TRAIN = {
    "a layer": lambda nn: nn.Linear(2, 1),
    "nested": lambda nn: nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(2, 1))),
    "built later": lambda nn: nn.LazyLinear(3),
    "partly frozen": lambda nn: nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.PReLU()),
}
DO_NOT = {
    "frozen": lambda nn: nn.Linear(2, 1).requires_grad_(False),
    "evaluated": lambda nn: nn.Linear(2, 1).eval(),
    "without parameters": lambda nn: nn.Sequential(nn.ReLU(), nn.Dropout(0.5)),
    "a loss": lambda nn: nn.CrossEntropyLoss(),
    "buffers alone": lambda nn: nn.BatchNorm1d(3, affine=False),
}


@pytest.mark.parametrize("what", TRAIN)
def test_what_trains(torch, strategy, what):
    def in_scope():
        with strategy.scope():
            made.append(TRAIN[what](torch.nn))

    made = []
    refusal(TypeError, "^the torch module .* was created in the scope of", in_scope)
    refusal(TypeError, "^the torch module .* is used in run of", strategy.run, lambda: made)
    Checkpoint(model=made[0], models=made)


@pytest.mark.parametrize("what", DO_NOT)
def test_what_does_not_train(torch, strategy, what):
    with strategy.scope():
        made = DO_NOT[what](torch.nn)
        Checkpoint(step=Variable(1), models=[made])
    strategy.run(lambda: made)


def test_leaves_that_require_gradients_and_batches(torch, strategy):
    leaf, batch = torch.zeros(3, requires_grad=True), torch.ones(3)
    derived = leaf * 2
    parameter = torch.nn.Parameter(leaf)
    refusal(TypeError, "^the torch Parameter is used", strategy.run, lambda: parameter)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    read = strategy.run(lambda given: [len(loader), derived.sum().item(), *given.tolist()], [batch])
    assert read == [2, 0, 1, 1, 1]
    refusal(TypeError, "^leaves/0 is the torch Tensor", Checkpoint, leaves=[leaf])


def test_autograd_for_a_strategys_variable(torch, strategy):
    with strategy.scope():
        variable = Variable(np.ones(2, np.float32))
    optimizer = optimizers.SGD(0.25)

    def step(leaf):
        (gradient,) = torch.autograd.grad((leaf**2).sum(), [leaf])
        optimizer.apply_gradients([(gradient.numpy(), variable)])

    strategy.run(step, [torch.tensor(variable.numpy(), requires_grad=True)])
    np.testing.assert_array_equal(variable, [0.5, 0.5])


def test_a_temporary_layer_for_initial_values(torch, strategy):
    with strategy.scope():
        variable = Variable(torch.nn.Linear(3, 2).weight.detach().numpy())
    assert variable.shape == (2, 3)


def test_a_step_is_refused_wherever_the_optimizer_comes_from(torch, strategy):
    def train():
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.sum().backward()
        torch.optim.SGD([parameter], 1.0).step()
        return parameter.tolist()

    step = "^the torch optimizer SGD would change variables inside the {} of Multi"
    refusal(TypeError, step.format("run"), strategy.run, train)
    with strategy.scope():
        refusal(TypeError, step.format("scope"), train)
    assert train() == [0, 0]


def test_torch_is_as_it_was_outside(torch, strategy):
    from torch.nn.modules import module
    from torch.optim import optimizer

    hooks = module._global_parameter_registration_hooks, optimizer._global_optimizer_pre_hooks
    before = [dict(each) for each in hooks]
    with strategy.scope():
        assert all(len(now) == len(then) + 1 for now, then in zip(hooks, before, strict=True))
        strategy.run(lambda: None)
    assert [dict(each) for each in hooks] == before


def test_gradients_of_torch_for_a_strategys_variable(torch, strategy):
    with strategy.scope():
        variable, optimizer = Variable(np.zeros(3, np.float32)), optimizers.SGD(1.0)
    strategy.run(lambda: optimizer.apply_gradients([(torch.arange(3.0), variable)]))
    np.testing.assert_array_equal(variable, [0, -1, -2])

    def differentiated():
        optimizer.apply_gradients([(torch.ones(3, requires_grad=True) * 2, variable)])

    match = "^the gradient at position 0, a Tensor for <Variable .*detach"
    refusal(TypeError, match, strategy.run, differentiated)
