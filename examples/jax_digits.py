"""Train a JAX model of handwritten digits on all ranks, with a compiled step.

    python examples/jax_digits.py                     one process
    mpirun -n 2 python examples/jax_digits.py         two ranks, each with half of every batch

With --sync-every N the ranks train by themselves, and average their parameters every N steps (local
SGD); with --outer an outer optimizer moves them (DiLoCo, arXiv:2311.08105). With --checkpoint FILE,
parameters and the optimizer's state are saved at the end, and restored if the file exists.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_plot import plot_file, plot_training
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import strategies
from strategies.jax import PytreeState


def initial_parameters():
    """Two convolutions and two dense layers."""
    generator = np.random.default_rng(0)
    shapes = {"first": (3, 3, 1, 16), "second": (3, 3, 16, 32), "dense": (512, 64), "out": (64, 10)}
    return {
        name: {
            "kernel": generator.normal(0, np.sqrt(2 / np.prod(shape[:-1])), shape).astype(
                "float32"
            ),
            "bias": np.zeros(shape[-1], "float32"),
        }
        for name, shape in shapes.items()
    }


@jax.jit
def logits_of(parameters, images):
    """The network's outputs for images of 8 × 8 pixels."""
    layers = ("NHWC", "HWIO", "NHWC")
    for name in ("first", "second"):
        layer = parameters[name]
        images = jax.lax.conv_general_dilated(
            images, layer["kernel"], (1, 1), "SAME", dimension_numbers=layers
        )
        images = jax.nn.relu(images + layer["bias"])
    images = jax.lax.reduce_window(
        images, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"
    )
    hidden = images.reshape(len(images), -1) @ parameters["dense"]["kernel"]
    hidden = jax.nn.relu(hidden + parameters["dense"]["bias"])
    return hidden @ parameters["out"]["kernel"] + parameters["out"]["bias"]


def loss_of(parameters, images, labels):
    """The mean cross entropy."""
    chosen = jax.nn.log_softmax(logits_of(parameters, images))
    return -jnp.take_along_axis(chosen, labels[:, None], 1).mean()


def main() -> None:
    """Train, and print a line for each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="examples over all ranks")
    parser.add_argument(
        "--plot", metavar="FILE", type=plot_file, help="write a plot of loss and throughput"
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        type=lambda path: Path(path).with_suffix(".safetensors"),
        help="saved at the end; restored first",
    )
    parser.add_argument("--sync-every", type=int, metavar="N", help="average every N steps")
    parser.add_argument("--outer", action="store_true", help="with an outer optimizer, as DiLoCo")
    given = parser.parse_args()
    if given.sync_every is None:
        strategy = strategies.MultiWorkerMirroredStrategy()
    else:
        outer = strategies.optimizers.SGD(0.7, momentum=0.9, nesterov=True) if given.outer else None
        strategy = strategies.LocalSGDStrategy(given.sync_every, outer_optimizer=outer)
    comm = strategy.communicator

    digits = load_digits()
    images = (digits.images / 16).astype("float32")[..., None]
    train, test, labels, test_labels = train_test_split(
        images, digits.target, test_size=0.2, random_state=0
    )
    if not 1 <= given.batch_size <= len(train) or given.batch_size % comm.size:
        raise SystemExit(
            f"--batch-size {given.batch_size}: must be from 1 to {len(train)}, and a multiple of"
            f" the {comm.size} ranks"
        )
    parameters = initial_parameters()
    optimizer = optax.adam(0.003)
    training = parameters, optimizer.init(parameters)
    state = PytreeState(strategy, training, parameters=lambda training: training[0])
    checkpoint = strategies.Checkpoint(training=state)
    if given.checkpoint and given.checkpoint.exists():
        checkpoint.restore(given.checkpoint)
    value_and_grad = strategy.value_and_grad(loss_of)  # means over the replicas in sync

    @jax.jit
    def step(training, images, labels):
        parameters, slots = training
        loss, gradients = value_and_grad(parameters, images, labels)
        updates, slots = optimizer.update(gradients, slots)
        return loss, (optax.apply_updates(parameters, updates), slots)

    part = given.batch_size // comm.size
    losses, speeds = [], []
    for epoch in range(1, given.epochs + 1):
        order = np.random.default_rng(epoch).permutation(len(train))
        start, total = time.perf_counter(), 0.0
        steps = len(order) // given.batch_size
        for batch in order[: steps * given.batch_size].reshape(steps, -1):
            own = batch[comm.rank * part : (comm.rank + 1) * part]
            loss, state.value = step(state.value, train[own], labels[own])
            total += float(loss)
        if given.sync_every is not None:
            strategy.synchronize()
        speeds.append(steps * given.batch_size / (time.perf_counter() - start))
        losses.append(float(strategy.reduce("mean", total / steps, axis=None)))
        right = (logits_of(state.value[0], test).argmax(1) == test_labels).mean()
        if comm.rank == 0:
            print(
                f"epoch {epoch:2d}  loss {losses[-1]:.4f}  test accuracy {right:7.2%}"
                f"  {speeds[-1]:8.0f} images/s",
                flush=True,
            )
    if given.checkpoint:
        checkpoint.save(given.checkpoint)
    if given.plot and comm.rank == 0:
        plot_training(given.plot, losses, speeds)


if __name__ == "__main__":
    main()
