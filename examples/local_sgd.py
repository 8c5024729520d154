"""Train a classifier of handwritten digits with little communication: local SGD, and DiLoCo.

Every rank trains on its own batches. Every few steps the parameters are averaged or, with --outer,
updated by an outer optimizer (Douillard et al. 2023, arXiv:2311.08105):

    python examples/local_sgd.py                               one process
    mpirun -n 2 python examples/local_sgd.py --every 10        two ranks, averaged every 10 steps
    mpirun -n 2 python examples/local_sgd.py --seconds 0.1     two ranks, averaged every 0.1 s
    mpirun -n 2 python examples/local_sgd.py --outer           DiLoCo
"""

from __future__ import annotations

import argparse

import numpy as np
from train_digits import CLASSES, Batches, cross_entropy, load_data

import strategies
from strategies import LocalSGDStrategy, ReduceOp, Variable, compute_average_loss

BATCH = 32


def main() -> None:
    """Train, and print a line for each epoch."""
    options = parse_options()
    outer = strategies.optimizers.SGD(0.7, momentum=0.9, nesterov=True) if options.outer else None
    every = None if options.seconds else options.every
    strategy = LocalSGDStrategy(every, options.seconds, outer)
    train_images, test_images, train_labels, test_labels = load_data(seed=0)
    batches = Batches(train_images, train_labels, BATCH, seed=0, drop_remainder=True)
    data = strategy.experimental_distribute_dataset(batches)
    with strategy.scope():
        weights = Variable(np.zeros((train_images.shape[1], CLASSES), np.float32))
        bias = Variable(np.zeros(CLASSES, np.float32))
        optimizer = strategies.optimizers.SGD(0.1, momentum=0.9)

    def step(batch):
        images, labels = batch
        losses, error = cross_entropy(images @ weights + bias, labels)
        error /= np.float32(max(len(labels), 1))
        optimizer.apply_gradients([(images.T @ error, weights), (error.sum(axis=0), bias)])
        return compute_average_loss(losses)

    if strategy.is_chief:
        print(f"{strategy}", flush=True)
    for epoch in range(1, options.epochs + 1):
        losses = [strategy.run(step, args=(batch,)) for batch in data]
        loss = strategy.reduce(ReduceOp.MEAN, np.mean(losses), axis=None)
        strategy.synchronize()
        if strategy.is_chief:
            predictions = (test_images @ weights + bias).argmax(axis=1)
            accuracy = np.mean(predictions == test_labels)
            print(
                f"epoch {epoch:2d}  {len(losses):3d} steps  loss {loss:.4f}"
                f"  test accuracy {accuracy:7.2%}",
                flush=True,
            )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a classifier of digits by local SGD.")
    parser.add_argument("--every", type=int, default=10, help="steps between averagings")
    parser.add_argument("--seconds", type=float, help="seconds between averagings, instead")
    parser.add_argument("--outer", action="store_true", help="an outer optimizer, as in DiLoCo")
    parser.add_argument("--epochs", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    main()
