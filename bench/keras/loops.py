"""Epochs of a custom loop in a `tf.function`, as in TensorFlow's tutorial of it on several workers.

https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from typing import Any

import keras
import tensorflow as tf

from bench.keras.training import Epoch, convolutional, images_and_labels


def tensorflows_own(world: Any) -> Any:
    """TensorFlow's strategy, whose workers are the ranks. Before any other use of TensorFlow."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        # All ranks have theirs before any gives its port back.
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        cluster = {"worker": world.allgather(address)}
    task = {"type": "worker", "index": world.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        del os.environ["TF_CONFIG"]


def epoch_of(
    strategy: Any, batch: int, steps: int, around: Callable[[Epoch], Epoch] = lambda step: step
) -> Epoch:
    """Steps of `batch` images for each replica, each of them wrapped by `around`."""
    rows = batch * strategy.num_replicas_in_sync
    images, labels = images_and_labels(batch * steps)

    def data(context: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(batch)

    iterator = iter(strategy.distribute_datasets_from_function(data))
    with strategy.scope():
        model = convolutional()
        optimizer = keras.optimizers.SGD(0.001)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    train = tf.function(_step(strategy, model, optimizer, loss_of, rows))

    step = around(lambda: train(iterator))

    def epoch() -> float:
        total = 0.0
        for _ in range(steps):
            total += step()
        return float(total)

    return epoch


def _step(
    strategy: Any, model: Any, optimizer: Any, loss_of: Any, rows: int
) -> Callable[[Any], Any]:
    def step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            losses = loss_of(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def train(iterator: Any) -> Any:
        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce("SUM", losses, axis=None)

    return train
