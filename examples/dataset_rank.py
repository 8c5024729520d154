r"""A dataset rank: one rank reads the batches and distributes them to the ranks that train.

    python examples/dataset_rank.py                          one process reads its own batches
    mpirun -n 3 python examples/dataset_rank.py              two ranks train, the last one reads
    mpirun -n 3 python examples/dataset_rank.py --every 5    local SGD: averages every 5 steps

Or with a TF_CONFIG per process, in which the job `data` reads (the addresses are only names):

    jobs='{"chief": ["a"], "worker": ["b"], "data": ["c"]}'
    task() { echo "TF_CONFIG={\"cluster\": $jobs, \"task\": {\"type\": \"$1\", \"index\": 0}}"; }
    program="python examples/dataset_rank.py"
    mpirun -n 1 env "$(task chief)" $program \
        : -n 1 env "$(task worker)" $program : -n 1 env "$(task data)" $program
"""

from __future__ import annotations

import argparse
from itertools import count

import numpy as np
from train_digits import Batches, Model, cross_entropy, load_data

from strategies import (
    DatasetWorker,
    LocalSGDStrategy,
    MultiWorkerMirroredStrategy,
    ReduceOp,
    optimizers,
)

BATCH_SIZE = 32  # of one replica


class NumberedBatches:
    """A dataset rank's part of the digits, in batches with their numbers in the epoch."""

    def __init__(self, context, seed):
        images, _, labels, _ = load_data(seed)
        self.first, self.step = context.input_pipeline_id, context.num_input_pipelines
        part = slice(self.first, None, self.step)
        self.batches = Batches(images[part], labels[part], BATCH_SIZE, seed=seed)

    def __iter__(self):
        for number, (images, labels) in zip(count(self.first, self.step), self.batches):
            yield np.array([number]), images, labels


def train(strategy, data, options) -> None:
    """Train on this rank's batches. The chief prints accuracy and batches of each replica."""
    _, test_images, _, test_labels = load_data(options.seed)
    with strategy.scope():
        model = Model(test_images.shape[1], np.random.default_rng(options.seed))
        optimizer = optimizers.Adam(0.003)
    replicas = strategy.communicator.size

    def print_on_chief(text):
        if strategy.is_chief:
            print(text, flush=True)

    def step(images, labels):
        hidden, logits = model(images)
        losses, logits_gradient = cross_entropy(logits, labels)
        # At the end of an epoch a replica may have an empty batch: it adds zero.
        share = logits_gradient / np.float32(BATCH_SIZE * strategy.num_replicas_in_sync)
        gradients = model.gradients(images, hidden, share)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return losses.sum()

    print_on_chief(f"{replicas} replicas train")
    totals = np.zeros(replicas, int)
    for epoch in range(1, options.epochs + 1):
        received, loss, examples = [], 0.0, 0
        for number, images, labels in data:
            loss += strategy.run(step, args=(images, labels))
            examples += len(labels)
            received.extend(number)
        loss, examples = strategy.reduce(ReduceOp.SUM, (loss, examples), axis=None)
        accuracy = np.mean(model(test_images)[1].argmax(axis=1) == test_labels)
        print_on_chief(
            f"epoch {epoch:2d}  loss {loss / examples:.4f}  test accuracy {accuracy:7.2%}"
        )
        for replica, numbers in enumerate(of_each_replica(strategy, received)):
            totals[replica] += len(numbers)
            if options.numbers:
                print_on_chief(
                    f"epoch {epoch:2d}  replica {replica} received {' '.join(map(str, numbers))}"
                )
    for replica, total in enumerate(totals):
        print_on_chief(f"replica {replica} received {total} batches")


def of_each_replica(strategy, numbers):
    """The numbers of every replica; how many they are may differ by replica."""
    mine = np.array([len(numbers)]), np.array(numbers, int)
    counts, joined = strategy.gather(mine, axis=0)
    return np.split(joined, np.cumsum(counts)[:-1])


def main() -> None:
    """Train, or serve the dataset."""
    options = parse_options()
    resolver = DatasetWorker.resolver(options.data_tasks)
    if options.every:
        strategy = LocalSGDStrategy(options.every, cluster_resolver=resolver)
    else:
        strategy = MultiWorkerMirroredStrategy(resolver)
    with DatasetWorker(
        strategy,
        lambda context: NumberedBatches(context, options.seed),
        agreed=not options.every,
    ) as data:
        if data.serves:
            print(f"served {data.serve()} epochs", flush=True)
        else:
            train(strategy, data, options)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train on batches of a dataset rank.")
    parser.add_argument("--data-tasks", type=int, default=1, help="dataset ranks; see TF_CONFIG")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--every", type=int, help="train independently, average every so many steps"
    )
    parser.add_argument("--numbers", action="store_true", help="print the number of every batch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
