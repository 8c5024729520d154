"""Epochs of Keras's `fit`, with and without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import strategies

Epoch = Callable[[], Any]


def convolutional() -> Any:
    """The network of TensorFlow's tutorial of custom training: 122,000 parameters, 28 × 28."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001), loss, metrics=["accuracy"])
    return model


def _epoch_of(model: Any, batch: int, steps: int) -> Epoch:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch * steps, 28, 28, 1)).astype("float32")
    labels = generator.integers(0, 10, batch * steps)
    return lambda: model.fit(images, labels, batch_size=batch, verbose=0)


def apart(batch: int, steps: int) -> Epoch:
    """Each rank for itself."""
    return _epoch_of(convolutional(), batch, steps)


def together(batch: int, steps: int) -> Epoch:
    """`compile` in a strategy's scope, with a batch of as many images for each rank."""
    strategy = strategies.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = convolutional()
    return _epoch_of(model, batch * strategy.num_replicas_in_sync, steps)
