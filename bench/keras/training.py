"""Epochs of Keras's `fit`, with and without communication."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import keras
import numpy as np

import collectives

Epoch = Callable[[], Any]


def convolutional() -> Any:
    """The network of TensorFlow's tutorial of custom training: 122,000 parameters, 28 × 28."""
    layers = keras.layers
    return keras.Sequential(
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


def images_and_labels(count: int) -> tuple[Any, Any]:
    """Random images and classes."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(count, 28, 28, 1)).astype("float32")
    return images, generator.integers(0, 10, count)


def apart(batch: int, steps: int) -> Epoch:
    """Each rank for itself."""
    return _epoch_of(_compiled(), batch, steps)


def in_step(batch: int, steps: int) -> Epoch:
    """Each rank for itself, with a barrier after each step."""
    barrier = collectives.world().barrier
    after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: barrier())
    return _epoch_of(_compiled(), batch, steps, callbacks=[after])


def together(batch: int, steps: int) -> Epoch:
    """`compile` in a strategy's scope, with a batch of as many images for each rank."""
    on_tensorflow = keras.config.backend() == "tensorflow"
    module = import_module("strategies.tensorflow" if on_tensorflow else "strategies")
    strategy = module.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = _compiled()
    return _epoch_of(model, batch * strategy.num_replicas_in_sync, steps)


def _compiled() -> Any:
    model = convolutional()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001), loss, metrics=["accuracy"])
    return model


def _epoch_of(model: Any, batch: int, steps: int, **options: Any) -> Epoch:
    images, labels = images_and_labels(batch * steps)
    return lambda: model.fit(images, labels, batch_size=batch, verbose=0, **options)
