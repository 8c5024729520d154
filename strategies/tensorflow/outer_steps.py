"""Outer steps of local SGD (DiLoCo; Douillard et al. 2023, arXiv:2311.08105).

The outer optimizer is one of NumPy arrays, which is called when the ranks average.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from strategies.core.storage import LocalStorage
from strategies.core.values import Array
from strategies.optimizers import Optimizer
from strategies.tensorflow.operations import Operations


class OuterSteps:
    """The values that weights have at the beginning of a round, and the optimizer that moves them.

    Statistics, which are not trained, are replaced by their means.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._began = False

    def begin(self, operations: Operations, variables: Sequence[Any]) -> None:
        """Before a step: keep the weights, if it is the round's first one."""
        weights = [each for each in variables if each.trainable]

        def call(*arrays: Array) -> Sequence[Array]:
            if not self._began:
                for variable, array in zip(weights, arrays, strict=True):
                    self._keep(variable, array)
                self._began = True
            return arrays

        if weights:
            # Reads of variables would become part of the gradient of the reduction around this.
            own = [
                tf.raw_ops.ReadVariableOp(resource=each._primary.handle, dtype=each.dtype)
                for each in weights
            ]
            operations.execute(call, own, [each.shape for each in weights])

    def _keep(self, variable: Any, array: Array) -> None:
        # One storage for each variable, to which the optimizer's slots belong.
        if variable.outer_value is None:
            variable.outer_value = LocalStorage(array.copy())
        else:
            variable.outer_value.own_part()[...] = array

    def step(
        self, variables: Sequence[Any], own: Sequence[Array], means: Sequence[Array]
    ) -> list[Array]:
        """The variables' values in the next round."""
        weights = [number for number, each in enumerate(variables) if each.trainable]
        for number in weights:
            # A rank that has taken no step since has the value that the round began with.
            if not self._began or variables[number].outer_value is None:
                self._keep(variables[number], own[number])
        self._began = False
        storages = [variables[number].outer_value for number in weights]
        gradients = [
            storage.view() - means[number]
            for number, storage in zip(weights, storages, strict=True)
        ]
        self._optimizer.update_clipped(self._optimizer.clipped(gradients), storages)
        results = list(means)
        for number, storage in zip(weights, storages, strict=True):
            results[number] = storage.read()
        return results
