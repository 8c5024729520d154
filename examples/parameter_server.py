r"""Train a classifier of handwritten digits with a parameter server, asynchronously.

The model and the data are those of `train_digits.py`. Every process has a TF_CONFIG with the
cluster and its own task. Workers run the loop below. The ps stores the variables and applies
gradients in the order of their arrival. With two workers and one ps:

    cluster='"cluster": {"worker": ["localhost", "localhost"], "ps": ["localhost"]}'
    task() { echo "TF_CONFIG={$cluster, \"task\": {\"type\": \"$1\", \"index\": $2}}"; }
    mpirun -n 1 env "$(task worker 0)" python examples/parameter_server.py : \
           -n 1 env "$(task worker 1)" python examples/parameter_server.py : \
           -n 1 env "$(task ps 0)"     python examples/parameter_server.py
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from train_digits import Batches, Model, cross_entropy, load_data

import strategies
from strategies import MinSizePartitioner, ParameterServerStrategy

USAGE = (
    "A parameter server needs several processes under one mpirun, each with a TF_CONFIG that names"
    " its task. The first lines of this file show the command."
)


def main() -> None:
    """Serve, or train and print a line for each epoch."""
    options = parse_options()
    if not os.environ.get("TF_CONFIG"):
        raise SystemExit(USAGE)
    try:
        strategy = ParameterServerStrategy(
            variable_partitioner=MinSizePartitioner(16 << 10, max_shards=2),
            staleness=options.staleness,
        )
    except ValueError as error:
        raise SystemExit(f"{error}\n{USAGE}") from None
    resolver = strategy.cluster_resolver
    if resolver.task_type == "ps":
        strategy.serve()
        print(f"ps {resolver.task_id}: all workers have finished", flush=True)
        return
    name = f"{resolver.task_type} {resolver.task_id}"
    train(strategy, name, resolver.task_id, options)
    strategy.shutdown()


def train(strategy, name, number, options) -> None:
    """Train this worker's epochs, in a data order of its own."""
    train_images, test_images, train_labels, test_labels = load_data(options.seed)
    batches = Batches(
        train_images,
        train_labels,
        options.batch_size,
        seed=options.seed + number,
        drop_remainder=True,
    )
    with strategy.scope():
        model = Model(train_images.shape[1], np.random.default_rng(options.seed))
        optimizer = strategies.optimizers.Adam(options.learning_rate)

    def train_step(images, labels):
        hidden, logits = model(images)
        losses, logits_gradient = cross_entropy(logits, labels)
        gradients = model.gradients(images, hidden, logits_gradient / np.float32(len(labels)))
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return strategies.compute_average_loss(losses)

    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        loss = sum(strategy.run(train_step, args=batch) for batch in batches) / len(batches)
        seconds = time.perf_counter() - start
        _, logits = model(test_images)
        accuracy = np.mean(logits.argmax(axis=1) == test_labels)
        print(
            f"{name}: epoch {epoch:2d}  loss {loss:.4f}  test accuracy {accuracy:7.2%}"
            f"  {len(batches) / seconds:6.0f} steps/s",
            flush=True,
        )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train with a parameter server.")
    parser.add_argument("--epochs", type=int, default=8, help="of each worker")
    parser.add_argument("--batch-size", type=int, default=64, help="examples of one worker's step")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--staleness", type=int, help="steps that a worker may be ahead of the slowest"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
