"""Train a Keras model on all ranks by `compile` in a strategy's scope, and `fit`.

    KERAS_BACKEND=torch python examples/keras_fit.py                  one process
    KERAS_BACKEND=torch mpirun -n 2 python examples/keras_fit.py      two ranks
    KERAS_BACKEND=jax mpirun -n 2 python examples/keras_fit.py        the same with JAX

Every rank is given the whole data, and takes its piece of each batch. Everything but the strategy
and its scope is Keras's own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from digits_plot import plot_file, plot_training
from sklearn.datasets import load_digits

import strategies


def main() -> None:
    """Train, and print the accuracy on images that were not trained on."""
    given = _options()
    strategy = strategies.MultiWorkerMirroredStrategy()
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order].astype("int32")

    with strategy.scope():
        model = _network()
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    speed = Speed(len(images) * 4 // 5)
    history = model.fit(
        images,
        labels,
        batch_size=given.batch_size,
        epochs=given.epochs,
        validation_split=0.2,
        callbacks=[speed, keras.callbacks.EarlyStopping(patience=5)],
        verbose=1 if sys.stderr.isatty() else 2,
    )
    if strategy.is_chief:
        accuracy = history.history["val_accuracy"][-1]
        print(f"test accuracy {accuracy:.2%}, {max(speed.speeds):.0f} images/s", flush=True)
        if given.plot:
            plot_training(given.plot, history.history["loss"], speed.speeds)


def _network() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


class Speed(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes each epoch's throughput."""

    def __init__(self, images: int) -> None:
        super().__init__()
        self._images = images
        self.speeds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin to measure."""
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note images per second, over all ranks, validation included."""
        self.speeds.append(self._images / (time.perf_counter() - self._began))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="images over all ranks")
    parser.add_argument(
        "--plot", metavar="FILE", type=plot_file, help="write a plot of loss and throughput"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
