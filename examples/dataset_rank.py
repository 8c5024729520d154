r"""Some ranks train, another one makes the batches and deals them: a dataset rank.

    python examples/dataset_rank.py                          one process, making its own batches
    mpirun -n 3 python examples/dataset_rank.py              two ranks train, the last one deals
    mpirun -n 3 python examples/dataset_rank.py --every 5    they train on their own, and average

Or with a TF_CONFIG per process, in which the job `data` deals (the addresses are only names):

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
    """A dataset rank's part of the digits, in batches that tell their numbers in the epoch."""

    def __init__(self, context, seed):
        images, _, labels, _ = load_data(seed)
        self.first, self.step = context.input_pipeline_id, context.num_input_pipelines
        part = slice(self.first, None, self.step)
        self.batches = Batches(images[part], labels[part], BATCH_SIZE, seed=seed)

    def __iter__(self):
        for number, (images, labels) in zip(count(self.first, self.step), self.batches):
            yield np.array([number]), images, labels


def train(strategy, data, options) -> None:
    """Train on what this rank is dealt; the chief tells how well, and who took how much."""
    _, test_images, _, test_labels = load_data(options.seed)
    with strategy.scope():
        model = Model(test_images.shape[1], np.random.default_rng(options.seed))
        optimizer = optimizers.Adam(0.003)
    replicas = strategy.communicator.size

    def say(text):
        if strategy.is_chief:
            print(text, flush=True)

    def step(images, labels):
        hidden, logits = model(images)
        losses, logits_gradient = cross_entropy(logits, labels)
        # A replica that has no batch, since others took the last ones, adds nothing.
        share = logits_gradient / np.float32(BATCH_SIZE * strategy.num_replicas_in_sync)
        gradients = model.gradients(images, hidden, share)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        return losses.sum()

    say(f"{replicas} replicas train")
    totals = np.zeros(replicas, int)
    for epoch in range(1, options.epochs + 1):
        taken, loss, examples = [], 0.0, 0
        for number, images, labels in data:
            loss += strategy.run(step, args=(images, labels))
            examples += len(labels)
            taken.extend(number)
        loss, examples = strategy.reduce(ReduceOp.SUM, (loss, examples), axis=None)
        accuracy = np.mean(model(test_images)[1].argmax(axis=1) == test_labels)
        say(f"epoch {epoch:2d}  loss {loss / examples:.4f}  test accuracy {accuracy:7.2%}")
        for replica, numbers in enumerate(of_each_replica(strategy, taken)):
            totals[replica] += len(numbers)
            if options.numbers:
                say(f"epoch {epoch:2d}  replica {replica} took {' '.join(map(str, numbers))}")
    for replica, total in enumerate(totals):
        say(f"replica {replica} took {total} batches")


def of_each_replica(strategy, numbers):
    """The numbers of every replica, which may have more of them than another."""
    mine = np.array([len(numbers)]), np.array(numbers, int)
    counts, joined = strategy.gather(mine, axis=0)
    return np.split(joined, np.cumsum(counts)[:-1])


def main() -> None:
    """Train or deal."""
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
            print(f"dealt {data.serve()} epochs", flush=True)
        else:
            train(strategy, data, options)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Training ranks that are dealt their batches.")
    parser.add_argument("--data-tasks", type=int, default=1, help="ranks that deal; see TF_CONFIG")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--every", type=int, help="train independently, average every so many steps"
    )
    parser.add_argument("--numbers", action="store_true", help="tell the number of every batch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
