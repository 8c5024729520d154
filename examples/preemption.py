"""Restarting killed training: the result is that of uninterrupted training, bit for bit.

    mpirun -n 2 python examples/preemption.py --directory /tmp/digits --die-at 47  killed at a step
    mpirun -n 2 python examples/preemption.py --directory /tmp/digits              continues

Parameters, optimizer, metric and step are saved every few steps. Everything else must be a function
of the step: the data's order follows from the epoch's number, so that no generator must be saved.
Training can continue with another number of ranks; sums are then rounded in another order.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import numpy as np
from train_digits import Model, cross_entropy, load_data

from strategies import (
    Checkpoint,
    CheckpointManager,
    MultiWorkerMirroredStrategy,
    Variable,
    metrics,
    optimizers,
)

BATCH_SIZE = 64


class BatchesFrom:
    """The global batches of the steps from `start` to `stop`, each a function of its number."""

    def __init__(self, images, labels, start, stop, seed):
        self.images, self.labels = images, labels
        self.steps, self.seed = range(start, stop), seed

    def __iter__(self):
        per_epoch = len(self.images) // BATCH_SIZE
        for step in self.steps:
            epoch, number = divmod(step, per_epoch)
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
            indices = order[number * BATCH_SIZE : (number + 1) * BATCH_SIZE]
            yield self.images[indices], self.labels[indices]


def main() -> None:
    """Train from the last checkpoint, or from the beginning."""
    options = parse_options()
    strategy = MultiWorkerMirroredStrategy()
    images, test_images, labels, test_labels = load_data(options.seed)
    with strategy.scope():
        model = Model(images.shape[1], np.random.default_rng(options.seed))
        optimizer = optimizers.Adam(0.003)
        loss = metrics.Mean(name="loss")
        step = Variable(0, trainable=False, name="step")
    checkpoint = Checkpoint(model=model, optimizer=optimizer, loss=loss, step=step)
    manager = CheckpointManager(checkpoint, options.directory, max_to_keep=2)
    manager.restore_or_initialize()
    print_on_chief = print if strategy.is_chief else lambda *words, **options: None
    print_on_chief(
        f"{strategy.num_replicas_in_sync} replicas start at step {int(step)}", flush=True
    )

    def train_step(batch):
        batch_images, batch_labels = batch
        hidden, logits = model(batch_images)
        losses, logits_gradient = cross_entropy(logits, batch_labels)
        loss.update_state(losses)
        share = logits_gradient / np.float32(BATCH_SIZE)
        gradients = model.gradients(batch_images, hidden, share)
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))

    batches = BatchesFrom(images, labels, int(step), options.steps, options.seed)
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(train_step, args=(batch,))
        step.assign_add(1)
        if int(step) == options.die_at and strategy.is_chief:
            os.kill(os.getpid(), signal.SIGKILL)  # as by a cluster that preempts the job
        if int(step) % options.save_every == 0:
            manager.save(int(step))
    _, logits = model(test_images)
    accuracy, mean_loss = np.mean(logits.argmax(axis=1) == test_labels), loss.result()
    print_on_chief(f"step {int(step)}  loss {mean_loss:.6f}  test accuracy {accuracy:7.2%}")
    print_on_chief(f"parameters {digest(model)}", flush=True)


def digest(model) -> str:
    """A SHA-256 digest of the parameters."""
    parameters = b"".join(variable.numpy().tobytes() for variable in model.variables)
    return hashlib.sha256(parameters).hexdigest()


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Training that survives being killed.")
    parser.add_argument("--directory", default="digits_checkpoints", help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--die-at", type=int, help="step after which the chief kills itself")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
