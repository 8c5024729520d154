"""Train a TensorFlow model on all ranks by a loop of your own.

    python examples/tensorflow_custom_loop.py                     one process
    mpirun -n 2 python examples/tensorflow_custom_loop.py         two ranks, half of each batch each

Only the strategy's constructor differs from a program for `tf.distribute`. An epoch is one
`tf.function`. The chief prints, and writes the checkpoint; a second start continues from it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from digits_plot import plot_file, plot_training
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits

import strategies.tensorflow


def main() -> None:
    """Train, and print a line for each epoch."""
    given = _options()
    strategy = strategies.tensorflow.MultiWorkerMirroredStrategy()
    train, test = _datasets(given.batch_size)
    train = strategy.experimental_distribute_dataset(train)
    test = strategy.experimental_distribute_dataset(test)

    with strategy.scope():
        model = _network()
        optimizer = tf.keras.optimizers.Adam(1e-3)
        accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
        loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    step = _step(model, optimizer, loss_of, given.batch_size)

    def evaluate(batch: Any) -> None:
        images, labels = batch
        accuracy.update_state(labels, model(images, training=False))

    @tf.function
    def train_epoch() -> tuple[Any, Any]:
        total, images = 0.0, 0
        for batch in train:
            loss, rows = strategy.run(step, args=(batch,))
            total += strategy.reduce("SUM", loss, axis=None)
            images += strategy.reduce("SUM", rows, axis=None)
        return total, images

    @tf.function
    def test_epoch() -> None:
        for batch in test:
            strategy.run(evaluate, args=(batch,))

    number = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=number)
    manager = None
    if given.checkpoints:
        manager = tf.train.CheckpointManager(checkpoint, given.checkpoints, max_to_keep=2)
        manager.restore_or_initialize()
    losses, speeds = [], []
    shown = strategy.is_chief and sys.stderr.isatty()
    epochs = range(int(number) + 1, given.epochs + 1)
    console = Console(stderr=True)
    for epoch in track(epochs, "epochs", transient=True, console=console, disable=not shown):
        began = time.perf_counter()
        total, images = train_epoch()
        speeds.append(int(images) / (time.perf_counter() - began))
        losses.append(float(total) * given.batch_size / int(images))
        test_epoch()
        result = float(accuracy.result())  # on every rank, since it is over all replicas
        accuracy.reset_state()
        number.assign(epoch)
        if manager is not None:
            manager.save()
        if strategy.is_chief:
            line = f"epoch {epoch:2d}  loss {losses[-1]:.4f}  test accuracy {result:7.2%}"
            print(f"{line}  {speeds[-1]:8.0f} images/s", flush=True)
    if strategy.is_chief and given.plot:
        plot_training(given.plot, losses, speeds)


def _step(model: Any, optimizer: Any, loss_of: Any, batch_size: int) -> Callable[[Any], Any]:
    """A step of one replica: its part of the loss, and the number of its images."""

    def step(batch: Any) -> tuple[Any, Any]:
        images, labels = batch
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=batch_size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, tf.shape(images)[0]

    return step


def _datasets(batch_size: int) -> tuple[Any, Any]:
    """Batches of images of 8 × 8 pixels, scaled to 0 … 1, with their labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    order = np.random.default_rng(0).permutation(len(images))
    parts = np.split(order, [len(images) * 4 // 5])
    train, test = (
        tf.data.Dataset.from_tensor_slices((images[part], labels[part])) for part in parts
    )
    return train.shuffle(len(images)).batch(batch_size), test.batch(batch_size)


def _network() -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="images over all ranks")
    parser.add_argument("--checkpoints", metavar="FOLDER", help="write checkpoints, and continue")
    parser.add_argument(
        "--plot", metavar="FILE", type=plot_file, help="write a plot of loss and throughput"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
