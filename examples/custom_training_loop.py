"""All of TensorFlow's tutorial "Custom training with tf.distribute.Strategy", on digits.

It has a loss with regularization, training and test metrics, a checkpoint every second epoch that
is restored and evaluated without a strategy, an iterator in place of a loop over the dataset, and
an epoch inside of a function:

    python examples/custom_training_loop.py                      one process
    mpirun -n 2 python examples/custom_training_loop.py          two ranks, the same numbers
"""

from __future__ import annotations

import argparse
import os
import tempfile

import numpy as np
from train_digits import Batches, Model, cross_entropy, load_data

from strategies import (
    Checkpoint,
    MultiWorkerMirroredStrategy,
    ReduceOp,
    compute_average_loss,
    get_strategy,
    latest_checkpoint,
    metrics,
    optimizers,
    scale_regularization_loss,
)

BATCH_SIZE = 64
REGULARIZATION = np.float32(1e-5)
STEPS_PER_ITERATOR = 10


class RegularizedModel(Model):
    """A model with L2 regularization of the weights, without the biases."""

    @property
    def losses(self):
        """The regularization loss of each weight matrix."""
        return [REGULARIZATION * np.sum(np.square(w)) for w in self.variables if w.numpy().ndim > 1]

    def loss_gradients(self):
        """The gradient of the sum of `losses`."""
        return [
            2 * REGULARIZATION * variable if variable.numpy().ndim > 1 else np.zeros_like(variable)
            for variable in self.variables
        ]


class Loop:
    """The objects that the tutorial creates in the strategy's scope, and its steps."""

    def __init__(self, strategy, inputs, seed):
        self.strategy = strategy
        with strategy.scope():
            self.model = RegularizedModel(inputs, np.random.default_rng(seed))
            self.optimizer = optimizers.Adam(0.003)
            self.test_loss = metrics.Mean(name="test_loss")
            self.train_accuracy = metrics.SparseCategoricalAccuracy(name="train_accuracy")
            self.test_accuracy = metrics.SparseCategoricalAccuracy(name="test_accuracy")
            self.checkpoint = Checkpoint(optimizer=self.optimizer, model=self.model)

    def train_step(self, inputs):
        """A training step of one replica; returns its part of the loss."""
        images, labels = inputs
        hidden, logits = self.model(images)
        losses, logits_gradient = cross_entropy(logits, labels)
        loss = compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        loss += scale_regularization_loss(np.add.reduce(self.model.losses))
        # Gradients are summed over the replicas, and of_weights is the same on all of them.
        replicas = np.float32(self.strategy.num_replicas_in_sync)
        gradients = [
            of_examples + of_weights / replicas
            for of_examples, of_weights in zip(
                self.model.gradients(images, hidden, logits_gradient / np.float32(BATCH_SIZE)),
                self.model.loss_gradients(),
                strict=True,
            )
        ]
        self.optimizer.apply_gradients(zip(gradients, self.model.variables, strict=True))
        self.train_accuracy.update_state(labels, logits)
        return loss

    def test_step(self, inputs):
        """A test step of one replica."""
        images, labels = inputs
        _, logits = self.model(images)
        losses, _ = cross_entropy(logits, labels)
        self.test_loss.update_state(losses)
        self.test_accuracy.update_state(labels, logits)

    def distributed_train_step(self, batch):
        """A training step of all replicas; returns the loss of the global batch."""
        per_replica_losses = self.strategy.run(self.train_step, args=(batch,))
        return self.strategy.reduce(ReduceOp.SUM, per_replica_losses, axis=None)

    def distributed_train_epoch(self, dataset):
        """An epoch inside of a function; returns the mean loss."""
        losses = [self.distributed_train_step(batch) for batch in dataset]
        return np.mean(losses)

    def report(self, heading, loss):
        """Print a line on the chief and reset the metrics. Every rank must call it."""
        line = f"{heading}  loss {loss:.4f}  accuracy {self.train_accuracy.result():7.2%}"
        tested, accuracy = self.test_loss.result(), self.test_accuracy.result()
        if tested:
            line += f"  test loss {tested:.4f}  test accuracy {accuracy:7.2%}"
        if self.strategy.is_chief:
            print(line, flush=True)
        for metric in (self.train_accuracy, self.test_loss, self.test_accuracy):
            metric.reset_state()


def main() -> None:
    """Run the tutorial."""
    options = parse_options()
    strategy = MultiWorkerMirroredStrategy()
    train_images, test_images, train_labels, test_labels = load_data(options.seed)
    train_data = strategy.experimental_distribute_dataset(
        Batches(train_images, train_labels, BATCH_SIZE, seed=options.seed, drop_remainder=True)
    )
    test_batches = Batches(test_images, test_labels, BATCH_SIZE)
    test_data = strategy.experimental_distribute_dataset(test_batches)
    loop = Loop(strategy, train_images.shape[1], options.seed)
    if strategy.is_chief:
        print(f"Number of replicas: {strategy.num_replicas_in_sync}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        for epoch in range(options.epochs):
            loss = np.mean([loop.distributed_train_step(batch) for batch in train_data])
            for batch in test_data:
                strategy.run(loop.test_step, args=(batch,))
            if epoch % 2 == 0:
                loop.checkpoint.save(os.path.join(directory, f"ckpt-{epoch + 1}"))
            loop.report(f"epoch {epoch + 1}", loss)
        if strategy.is_chief:
            evaluate_without_a_strategy(directory, test_batches, options.seed)
    for part in range(options.epochs):
        batches = iter(train_data)
        losses = [loop.distributed_train_step(next(batches)) for _ in range(STEPS_PER_ITERATOR)]
        loop.report(f"iterator {part + 1}", np.mean(losses))
    for part in range(options.epochs):
        loss = loop.distributed_train_epoch(train_data)
        loop.report(f"function {part + 1}", loss)


def evaluate_without_a_strategy(directory, batches, seed):
    """Restore the last checkpoint into a new model, outside of every scope."""
    loop = Loop(get_strategy(), batches.images.shape[1], seed + 1)
    path = latest_checkpoint(directory)
    loop.checkpoint.restore(path)
    for batch in batches:
        loop.test_step(batch)
    accuracy, name = loop.test_accuracy.result(), os.path.basename(path)
    print(f"restored {name} without a strategy: test accuracy {accuracy:7.2%}", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="TensorFlow's custom training loop on digits.")
    parser.add_argument("--epochs", type=int, default=5, help="of each of the three loops")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
