r"""Some ranks train, and an evaluator evaluates each checkpoint, by the roles in TF_CONFIG.

    jobs='{"chief": ["a"], "worker": ["b"], "evaluator": ["c"]}'
    task() { echo "TF_CONFIG={\"cluster\": $jobs, \"task\": {\"type\": \"$1\", \"index\": 0}}"; }
    program="python examples/evaluator_side_by_side.py"
    mpirun -n 1 env "$(task chief)" $program \
        : -n 1 env "$(task worker)" $program : -n 1 env "$(task evaluator)" $program

The addresses are only names. Without an evaluator the training ranks evaluate the checkpoints
together, after training:

    mpirun -n 2 python examples/evaluator_side_by_side.py
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
from train_digits import Batches, Model, cross_entropy, load_data

import collectives
from strategies import (
    Checkpoint,
    CheckpointManager,
    Variable,
    metrics,
    optimizers,
    train_and_evaluate,
)

BATCH_SIZE = 64


class Program:
    """Model and data of training and evaluation."""

    def __init__(self, options, directory):
        self.options, self.directory = options, directory
        self.images, self.test_images, self.labels, self.test_labels = load_data(options.seed)

    def make_model(self):
        """A model, and a variable with the number of its last epoch."""
        generator = np.random.default_rng(self.options.seed)
        return Model(self.images.shape[1], generator), Variable(0, trainable=False, name="epoch")

    def train(self, strategy):
        """Train, and save a checkpoint after each epoch."""
        with strategy.scope():
            model, epoch = self.make_model()
            optimizer = optimizers.Adam(0.003)
        batches = Batches(
            self.images, self.labels, BATCH_SIZE, seed=self.options.seed, drop_remainder=True
        )
        dataset = strategy.experimental_distribute_dataset(batches)
        checkpoint = Checkpoint(model=model, epoch=epoch, optimizer=optimizer)
        manager = CheckpointManager(checkpoint, self.directory, max_to_keep=None)

        def step(batch):
            images, labels = batch
            hidden, logits = model(images)
            _, logits_gradient = cross_entropy(logits, labels)
            gradients = model.gradients(images, hidden, logits_gradient / np.float32(BATCH_SIZE))
            optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

        for _ in range(self.options.epochs):
            for batch in dataset:
                strategy.run(step, args=(batch,))
            epoch.assign_add(1)
            manager.save(int(epoch))
        if strategy.is_chief:
            print(f"{strategy.num_replicas_in_sync} replicas have trained", flush=True)

    def evaluation(self, strategy):
        """The evaluation's `model_fn`: returns a checkpoint and a function that evaluates."""
        model, epoch = self.make_model()
        accuracy = metrics.SparseCategoricalAccuracy()
        batches = Batches(self.test_images, self.test_labels, BATCH_SIZE)
        dataset = strategy.experimental_distribute_dataset(batches)

        def step(batch):
            images, labels = batch
            accuracy.update_state(labels, model(images)[1])

        def evaluate():
            accuracy.reset_state()
            for batch in dataset:
                strategy.run(step, args=(batch,))
            result = float(accuracy.result())
            if strategy.is_chief:
                print(f"checkpoint of epoch {int(epoch)}: test accuracy {result:7.2%}", flush=True)
            return result

        return Checkpoint(model=model, epoch=epoch), evaluate


@contextlib.contextmanager
def common_directory() -> Iterator[str]:
    """The path of one temporary directory for all ranks."""
    world = collectives.world()
    directory = world.broadcast_object(tempfile.mkdtemp() if world.rank == 0 else None)
    try:
        yield directory
        world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(directory)


def main() -> None:
    """Train or evaluate."""
    options = parse_options()
    with common_directory() as directory:
        program = Program(options, directory)
        train_and_evaluate(program.train, program.evaluation, directory, poll_seconds=0.1)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train, and evaluate at the same time.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
