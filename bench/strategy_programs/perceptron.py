"""A network of a million parameters and its gradients, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strategies import Variable

Array = NDArray[Any]

WIDTHS = (784, 1000, 200, 10)


class Perceptron:
    """Dense layers with ReLU between them and a cross-entropy loss; float32."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        generator = np.random.default_rng(0)
        self.variables: list[Variable] = []
        for rows, columns in pairwise(widths):
            weights = generator.normal(0, np.sqrt(2 / rows), (rows, columns))
            self.variables.append(Variable(weights.astype(np.float32)))
            self.variables.append(Variable(np.zeros(columns, np.float32)))

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(variable.local.size for variable in self.variables)

    def gradients(self, images: Array, labels: Array, targets: Sequence[Array]) -> None:
        """Write the gradients of the mean loss into the targets, one for each variable."""
        values = [variable.local for variable in self.variables]
        activations = [images]
        for weights, bias in zip(values[0::2], values[1::2], strict=True):
            activations.append(np.maximum(activations[-1] @ weights + bias, 0))
        backward = _loss_gradient(activations[-2] @ values[-2] + values[-1], labels)
        for layer in reversed(range(len(values) // 2)):
            np.matmul(activations[layer].T, backward, out=targets[2 * layer])
            np.sum(backward, axis=0, out=targets[2 * layer + 1])
            if layer:
                backward = (backward @ values[2 * layer].T) * (activations[layer] > 0)


def _loss_gradient(logits: Array, labels: Array) -> Array:
    probabilities: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    probabilities /= np.float32(len(labels))
    return probabilities
