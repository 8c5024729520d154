"""Train a classifier of handwritten digits synchronously on all ranks.

The custom training loop of TensorFlow's tutorial, on scikit-learn's bundled digits, with a
two-layer network whose gradients are written by hand in NumPy:

    python examples/train_digits.py                      one process
    mpirun -n 2 python examples/train_digits.py          two ranks, each with half of every batch

With a TF_CONFIG per process the cluster's workers are the ranks. Loop and numbers are the same
under every `--strategy` except local_sgd, where each rank gets whole batches and runs fewer steps.
Under one_device and default each rank trains, and prints, by itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import strategies
from strategies import ReduceOp, Variable, compute_average_loss

STRATEGIES: dict[str, Callable[[], strategies.Strategy]] = {
    "multi_worker": strategies.MultiWorkerMirroredStrategy,
    "mirrored": strategies.MirroredStrategy,
    "central_storage": strategies.CentralStorageStrategy,
    "local_sgd": lambda: strategies.LocalSGDStrategy(sync_every=8),
    "one_device": lambda: strategies.OneDeviceStrategy("/cpu:0"),
    "default": strategies.get_strategy,
}
HIDDEN = 128
CLASSES = 10


class Batches:
    """Re-iterable global batches, reshuffled in each epoch, with the same order on every rank."""

    def __init__(self, images, labels, batch_size, *, seed=None, drop_remainder=False):
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self.generator = None if seed is None else np.random.default_rng(seed)
        self.stop = len(images) - len(images) % batch_size if drop_remainder else len(images)

    def __len__(self) -> int:
        return -(-self.stop // self.batch_size)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        order = np.arange(len(self.images))
        if self.generator is not None:
            self.generator.shuffle(order)
        for start in range(0, self.stop, self.batch_size):
            indices = order[start : min(start + self.batch_size, self.stop)]
            yield self.images[indices], self.labels[indices]


class Model:
    """Two dense layers with a ReLU between them."""

    def __init__(self, inputs, generator):
        def weights(rows, columns):
            return generator.normal(0, np.sqrt(2 / rows), (rows, columns)).astype(np.float32)

        self.variables = [
            Variable(weights(inputs, HIDDEN), name="hidden/weights"),
            Variable(np.zeros(HIDDEN, np.float32), name="hidden/bias"),
            Variable(weights(HIDDEN, CLASSES), name="output/weights"),
            Variable(np.zeros(CLASSES, np.float32), name="output/bias"),
        ]

    def __call__(self, images):
        """The hidden layer and the logits."""
        weights, bias, out_weights, out_bias = self.variables
        hidden = np.maximum(images @ weights + bias, 0)
        return hidden, hidden @ out_weights + out_bias

    def gradients(self, images, hidden, logits_gradient):
        """The gradient of each variable, from that of the logits."""
        hidden_gradient = (logits_gradient @ self.variables[2].numpy().T) * (hidden > 0)
        return [
            images.T @ hidden_gradient,
            hidden_gradient.sum(axis=0),
            hidden.T @ logits_gradient,
            logits_gradient.sum(axis=0),
        ]


def cross_entropy(logits, labels):
    """The loss of each example, and the gradient of their sum with respect to the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    probabilities = np.exp(shifted)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    examples = np.arange(len(labels))
    losses = -np.log(probabilities[examples, labels] + np.float32(1e-12))
    probabilities[examples, labels] -= 1
    return losses, probabilities


def load_data(seed):
    """Training and test images, scaled to 0 … 1, with their labels."""
    digits = load_digits()
    images = (digits.data / 16).astype(np.float32)
    return train_test_split(
        images, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )


def main() -> None:
    """Train, and print a line for each epoch."""
    options = parse_options()
    strategy = STRATEGIES[options.strategy]()
    train_images, test_images, train_labels, test_labels = load_data(options.seed)
    batch_size = options.batch_size
    if not 1 <= batch_size <= len(train_images):
        raise SystemExit(f"--batch-size {batch_size}: must be from 1 to {len(train_images)}")
    train_batches = Batches(
        train_images, train_labels, batch_size, seed=options.seed, drop_remainder=True
    )
    train_data = strategy.experimental_distribute_dataset(train_batches)
    test_data = strategy.experimental_distribute_dataset(
        Batches(test_images, test_labels, batch_size)
    )
    with strategy.scope():
        model = Model(train_images.shape[1], np.random.default_rng(options.seed))
        optimizer = strategies.optimizers.Adam(options.learning_rate)

    def train_step(batch):
        images, labels = batch
        hidden, logits = model(images)
        losses, logits_gradient = cross_entropy(logits, labels)
        gradients = model.gradients(images, hidden, logits_gradient / np.float32(batch_size))
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        loss = compute_average_loss(losses, global_batch_size=batch_size)
        return loss, np.sum(logits.argmax(axis=1) == labels)

    def test_step(batch):
        images, labels = batch
        _, logits = model(images)
        losses, _ = cross_entropy(logits, labels)
        return losses.sum(), np.sum(logits.argmax(axis=1) == labels)

    def sum_over(step, batches, total, description):
        """The sums of the results of `step` over all batches and replicas."""
        visible = options.progress and strategy.is_chief
        console = Console(stderr=True, force_terminal=visible)
        sums = np.zeros(2)
        for batch in track(
            batches, description, total, transient=True, console=console, disable=not visible
        ):
            per_replica = strategy.run(step, args=(batch,))
            sums += strategy.reduce(ReduceOp.SUM, per_replica, axis=None)
        return sums

    if strategy.is_chief:
        print(f"{strategy}: {strategy.num_replicas_in_sync} replicas in sync", flush=True)
    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        steps = len(train_batches)
        loss, correct = sum_over(train_step, train_data, steps, f"epoch {epoch}")
        seconds = time.perf_counter() - start
        test_loss, test_correct = sum_over(test_step, test_data, None, "test")
        if strategy.is_chief:
            examples = steps * batch_size
            print(
                f"epoch {epoch:2d}  loss {loss / steps:.4f}  accuracy {correct / examples:7.2%}"
                f"  test loss {test_loss / len(test_labels):.4f}"
                f"  test accuracy {test_correct / len(test_labels):7.2%}"
                f"  {examples / seconds:8.0f} images/s",
                flush=True,
            )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="multi_worker")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="examples over all replicas")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=sys.stderr.isatty(),
        help="a progress bar on the chief's stderr (the default in a terminal; mpirun makes pipes)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
