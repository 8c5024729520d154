"""torch's quickstart in a strategy's scope. The error names `distribute`, which then works."""

import torch
from torch import nn

import strategies
from tests.frameworks.told import refused

strategy = strategies.MultiWorkerMirroredStrategy()
torch.manual_seed(strategy.communicator.rank)
batches = [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long)) for _ in range(3)]


class NeuralNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.linear_relu_stack = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x):
        return self.linear_relu_stack(self.flatten(x))


def train(dataloader, model, loss_fn, optimizer):
    model.train()
    for inputs, y in dataloader:
        loss = loss_fn(model(inputs), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


with refused("scope"):
    with strategy.scope():
        model = NeuralNetwork()
        loss_fn = nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(batches, model, loss_fn, optimizer)

with refused("training in the scope"), strategy.scope():
    train(batches, model, loss_fn, optimizer)

with refused("run"):
    strategy.run(train, args=(batches, model, loss_fn, optimizer))


def make():
    own = NeuralNetwork()
    return own, nn.CrossEntropyLoss(), torch.optim.Adam(own.parameters())


with refused("a model of its own in run"):
    strategy.run(lambda: train(batches, *make()))


with refused("apply_gradients"):
    model(batches[0][0]).sum().backward()
    pairs = [(each.grad, each) for each in model.parameters()]
    strategies.optimizers.SGD(1.0).apply_gradients(pairs)

with refused("distributed"):
    strategy.distribute(model, optimizer)
    strategy.run(train, args=(batches, model, loss_fn, optimizer))
    parts = strategy.communicator.all_gather(model.linear_relu_stack[0].weight.detach())
    assert all(torch.equal(part, parts[:8]) for part in parts.split(8))

with refused("checkpoint"):
    strategies.Checkpoint(model=model)

with refused("reading"):
    model.eval()
    strategy.run(lambda batch: model(batch).sum(), args=(batches[0][0],))
