"""Pytrees in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from strategies.core.values import Array
from strategies.replication.replication import Replication


class PytreeState:
    """A pytree that begins with the chief's arrays, and that `strategies.Checkpoint` saves.

        state = PytreeState(strategy, (parameters, optimizer_state))
        checkpoint = strategies.Checkpoint(training=state)
        state.value = step(state.value, batch)

    Arrays of JAX don't change, so the program stores each step's pytree in `value`. Arrays are
    saved under the paths of their keys, numbers as arrays. Making one is collective.

    Raises a MismatchError on every rank where the ranks' pytrees differ in structure, shapes or
    dtypes.
    """

    def __init__(self, strategy: Replication, value: Any) -> None:
        self.value = value
        tensors = {name: np.array(each) for name, each in self.saved_tensors().items()}
        for name, each in tensors.items():
            strategy.mirror(each, f"PytreeState: {name}")
        self.restore_tensors(tensors)

    def saved_tensors(self) -> Mapping[str, Array]:
        """The arrays by their paths, such as "layers/0/kernel"."""
        return dict(zip(self._names(), map(np.asarray, jax.tree.leaves(self.value)), strict=True))

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Replace `value` by a pytree of the same structure."""
        leaves = [jax.numpy.array(tensors[name]) for name in self._names()]
        self.value = jax.tree.unflatten(jax.tree.structure(self.value), leaves)

    def _names(self) -> list[str]:
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(self.value)[0]]
        return ["/".join(_text(key) for key in path) for path in paths]


def _text(key: Any) -> str:
    """The name, key or index of a step on a path."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
