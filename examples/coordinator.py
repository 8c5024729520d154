r"""Train a classifier of handwritten digits with a chief that schedules steps on workers.

The model and the data are those of `train_digits.py`. Every process has a TF_CONFIG with the
cluster and its own task. The chief runs the loop below and computes no steps itself. Workers run
the scheduled steps asynchronously. The ps stores the variables. With two workers and one ps:

    cluster='"cluster": {"chief": ["h"], "worker": ["h", "h"], "ps": ["h"]}'
    task() { echo "TF_CONFIG={$cluster, \"task\": {\"type\": \"$1\", \"index\": $2}}"; }
    mpirun -n 1 env "$(task chief 0)"  python examples/coordinator.py : \
           -n 1 env "$(task worker 0)" python examples/coordinator.py : \
           -n 1 env "$(task worker 1)" python examples/coordinator.py : \
           -n 1 env "$(task ps 0)"     python examples/coordinator.py
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Iterator

import numpy as np
from train_digits import Batches, Model, cross_entropy, load_data

import strategies
from strategies import ClusterCoordinator, ParameterServerStrategy

USAGE = (
    "A coordinator needs several processes under one mpirun, each with a TF_CONFIG that names its"
    " task: a chief, workers and a ps. The first lines of this file show the command."
)


class InfiniteBatches:
    """Infinitely many batches, in an order that differs by worker and epoch."""

    def __init__(self, images, labels, batch_size):
        self.batches = Batches(
            images, labels, batch_size, seed=secrets.randbits(32), drop_remainder=True
        )

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            yield from self.batches


def main() -> None:
    """Serve, or schedule and print a line for each epoch."""
    options = parse_options()
    if not os.environ.get("TF_CONFIG"):
        raise SystemExit(USAGE)
    try:
        strategy = ParameterServerStrategy()
    except ValueError as error:
        raise SystemExit(f"{error}\n{USAGE}") from None
    if strategy.link is None:
        raise SystemExit(f"the cluster has no chief\n{USAGE}")
    resolver = strategy.cluster_resolver
    if resolver.task_type == "chief":
        train(strategy, ClusterCoordinator(strategy), options)
        strategy.shutdown()
        return
    strategy.serve()
    print(f"{resolver.task_type} {resolver.task_id}: the chief has finished", flush=True)


def train(strategy, coordinator, options) -> None:
    """Schedule the steps of each epoch, and evaluate the model after they have run."""
    seed, batch_size = options.seed, options.batch_size
    train_images, test_images, _, test_labels = load_data(seed)
    with strategy.scope():
        model = Model(train_images.shape[1], np.random.default_rng(seed))
        optimizer = strategies.optimizers.Adam(options.learning_rate)

    def dataset():
        images, _, labels, _ = load_data(seed)  # loaded on the worker, so that no images are sent
        return InfiniteBatches(images, labels, batch_size)

    def train_step(iterator):
        def replica_step(images, labels):
            hidden, logits = model(images)
            losses, logits_gradient = cross_entropy(logits, labels)
            gradients = model.gradients(images, hidden, logits_gradient / np.float32(batch_size))
            optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
            return strategies.compute_average_loss(losses)

        return strategy.run(replica_step, args=next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    steps = len(train_images) // batch_size
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        losses = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        seconds = time.perf_counter() - start
        _, logits = model(test_images)
        accuracy = np.mean(logits.argmax(axis=1) == test_labels)
        loss = np.mean(coordinator.fetch(losses))
        print(
            f"epoch {epoch:2d}  loss {loss:.4f}  test accuracy {accuracy:7.2%}"
            f"  {steps / seconds:6.0f} steps/s",
            flush=True,
        )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with a chief that schedules steps.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="examples of one step")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
