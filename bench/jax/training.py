"""A training step of a small model, with and without communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import strategies
from bench.in_step import IN_STEP, with_barrier

_LAYERS = {
    "first": (3, 3, 1, 32),
    "second": (3, 3, 32, 64),
    "dense": (1600, 64),
    "out": (64, 10),
}
_DIMENSIONS = ("NHWC", "HWIO", "NHWC")

Step = Callable[[], Any]


def convolutional() -> dict[str, tuple[Any, Any]]:
    """The network of TensorFlow's tutorial of custom training: 122,000 parameters, 28 × 28."""
    generator = np.random.default_rng(0)
    return {
        name: (
            generator.normal(0, np.sqrt(2 / np.prod(shape[:-1])), shape).astype("float32"),
            np.zeros(shape[-1], "float32"),
        )
        for name, shape in _LAYERS.items()
    }


def loss_of(parameters: Any, images: Any, labels: Any) -> Any:
    """The mean cross entropy."""
    for name in ("first", "second"):
        kernel, bias = parameters[name]
        images = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "VALID", dimension_numbers=_DIMENSIONS
        )
        window = (1, 2, 2, 1)
        images = jax.nn.relu(images + bias)
        images = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, window, window, "VALID")
    hidden = images.reshape(len(images), -1)
    kernel, bias = parameters["dense"]
    kernel_out, bias_out = parameters["out"]
    logits = jax.nn.relu(hidden @ kernel + bias) @ kernel_out + bias_out
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def steps(batch: int) -> dict[str, Step]:
    """A step of each way to train; the first two communicate no data."""
    strategy = strategies.MultiWorkerMirroredStrategy()
    apart = _step(jax.value_and_grad(loss_of), batch)
    return {
        "apart": apart,
        IN_STEP: with_barrier(apart),
        "strategy.value_and_grad": _step(strategy.value_and_grad(loss_of), batch),
    }


def _step(value_and_grad: Callable[..., Any], batch: int) -> Step:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch, 28, 28, 1)).astype("float32")
    labels = generator.integers(0, 10, batch)

    def update(parameters: Any, images: Any, labels: Any) -> Any:
        _, gradients = value_and_grad(parameters, images, labels)
        return jax.tree.map(lambda p, g: p - 0.001 * g, parameters, gradients)

    compiled = jax.jit(update, donate_argnums=0)
    state = [jax.tree.map(jnp.asarray, convolutional())]

    def step() -> None:
        state[0] = jax.block_until_ready(compiled(state[0], images, labels))

    return step
