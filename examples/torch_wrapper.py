"""Train a torch model on all ranks by `strategy.distribute`.

    python examples/torch_wrapper.py                     one process
    mpirun -n 2 python examples/torch_wrapper.py         two ranks, each with half of every batch

The model, the optimizer, the scheduler, clipping and the DataLoader are torch's own.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch_digits import Report, datasets, network, options

import strategies


def main() -> None:
    """Train, and print a line for each epoch."""
    given = options(__doc__)
    torch.set_num_threads(1)
    strategy = strategies.MultiWorkerMirroredStrategy()
    train, test = datasets()
    sampler = strategy.sampler(train)
    loader = DataLoader(train, given.batch_size // strategy.num_replicas_in_sync, sampler=sampler)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, epochs=given.epochs, steps_per_epoch=len(loader)
    )
    model, optimizer = strategy.distribute(model, optimizer)

    report = Report(strategy.communicator.rank, model, test)
    for epoch in range(1, given.epochs + 1):
        sampler.set_epoch(epoch)
        losses = []
        for images, labels in report.batches(loader, epoch):
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()  # the gradients are the means over all ranks
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        mean = strategy.reduce("mean", sum(losses) / len(losses), axis=None)
        report.epoch(epoch, float(mean), len(train))
    report.plot(given.plot)


if __name__ == "__main__":
    main()
