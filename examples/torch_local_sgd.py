"""Train a torch model with little communication: parameters are averaged every few steps.

mpirun -n 2 python examples/torch_local_sgd.py              averaged every 8 steps
mpirun -n 2 python examples/torch_local_sgd.py --outer      DiLoCo, arXiv:2311.08105
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch_digits import Report, datasets, network, options

import strategies


def main() -> None:
    """Train, and print a line for each epoch."""
    given = options(__doc__, outer="update by an outer optimizer, as DiLoCo does")
    torch.set_num_threads(1)
    outer = strategies.optimizers.SGD(0.7, momentum=0.9, nesterov=True) if given.outer else None
    strategy = strategies.LocalSGDStrategy(sync_every=8, outer_optimizer=outer)
    ranks = strategy.communicator.size
    train, test = datasets()
    sampler = strategy.sampler(train)
    loader = DataLoader(train, given.batch_size // ranks, sampler=sampler)

    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    model, optimizer = strategy.distribute(model, optimizer)

    report = Report(strategy.communicator.rank, model, test)
    for epoch in range(1, given.epochs + 1):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in report.batches(loader, epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # this rank's own gradients
            optimizer.step()  # every eighth step averages the parameters
            losses.append(loss.item())
        strategy.synchronize()
        mean = strategy.reduce("mean", sum(losses) / len(losses), axis=None)
        report.epoch(epoch, float(mean), len(train))
    report.plot(given.plot)


if __name__ == "__main__":
    main()
