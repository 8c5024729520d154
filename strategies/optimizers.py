"""Optimizers in NumPy that sum the gradients over the replicas before they update the variables.

The update rules are those of `tf.keras.optimizers`, to the rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives import Fusion
from strategies.contexts import get_replica_context
from strategies.reduce_op import ReduceOp
from strategies.variable import Variable

if TYPE_CHECKING:
    from strategies.contexts import ReplicaContext
    from strategies.strategy import Strategy

Array = NDArray[Any]


class Optimizer(ABC):
    """Base of the optimizers. `learning_rate` may be changed between steps."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.iterations = 0
        self._slots: dict[tuple[int, str], Array] = {}
        self._variables: dict[int, Variable] = {}
        self._fused: tuple[list[Variable], Fusion] | None = None

    def gradient_views(self, variables: Sequence[Variable]) -> list[Array]:
        """Arrays to write the gradients into, one for each variable, zeros at first. Collective.

        They lie where the replicas sum them, so that `apply_gradients` of these variables, in this
        order, needs no copies where it is given them. It overwrites them. The latest ones count.
        """
        if not variables:
            raise ValueError("variables has no variable")
        kinds = [(variable.shape, variable.dtype) for variable in variables]
        fusion = Fusion(variables[0].strategy.communicator, kinds)
        self._fused = list(variables), fusion
        return fusion.views

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]]) -> None:
        """Sum each gradient over the replicas (fused), then update its variable. Collective.

        A pair whose gradient is None is left out. Raises RuntimeError in cross-replica context and
        for a variable of another strategy than that of `run`, TypeError for one of integers,
        ValueError where a gradient's shape isn't its variable's or where every gradient is None.
        """
        replica = get_replica_context()
        if replica is None:
            raise RuntimeError("apply_gradients must be called as a replica, inside `run`")
        pairs = [(grad, variable) for grad, variable in grads_and_vars if grad is not None]
        if not pairs:
            raise ValueError("grads_and_vars has no gradient: every one is None, or there are none")
        for _, variable in pairs:
            _check_updatable(variable, replica.strategy)
        gradients = self._summed(replica, pairs)
        self.iterations += 1
        for gradient, (_, variable) in zip(gradients, pairs, strict=True):
            self._update(variable.local, gradient, variable)

    def _summed(
        self, replica: ReplicaContext, pairs: list[tuple[Any, Variable]]
    ) -> Sequence[Array]:
        gradients = [_checked(*pair) for pair in pairs]
        fusion = self._fusion_for([variable for _, variable in pairs])
        if fusion is None:
            summed: Sequence[Array] = replica.all_reduce(ReduceOp.SUM, gradients)
            return summed
        places = list(zip(gradients, fusion.views, strict=True))
        # A gradient may lie in another one's view.
        kept = [gradient if gradient is view else gradient.copy() for gradient, view in places]
        for gradient, (_, view) in zip(kept, places, strict=True):
            if gradient is not view:
                view[...] = gradient
        return fusion.all_reduce()

    def _fusion_for(self, variables: list[Variable]) -> Fusion | None:
        """By the variables, which are the same on all ranks, not by this rank's own arrays."""
        known, fusion = self._fused or ([], None)
        alike = len(variables) == len(known) and all(map(is_, variables, known))
        return fusion if alike else None

    @abstractmethod
    def _update(self, value: Array, gradient: Array, variable: Variable) -> None:
        """Change the value in place; the gradient may be overwritten."""

    def _slot(self, variable: Variable, name: str) -> Array:
        """The optimizer's own array for the variable, zeros at first."""
        key = (id(variable), name)
        if key not in self._slots:
            self._variables[id(variable)] = variable  # keeps it alive, and so its id unique
            self._slots[key] = np.zeros_like(variable.local)
        return self._slots[key]


def _check_updatable(variable: Variable, strategy: Strategy) -> None:
    if variable.strategy is not strategy:
        raise RuntimeError(
            f"{variable} belongs to {variable.strategy}, but apply_gradients was called as a"
            f" replica of {strategy}: create variables in the scope of the strategy that runs"
        )
    if variable.dtype.kind in "biu":
        raise TypeError(f"{variable} holds integers: an optimizer needs floating-point numbers")


def _checked(gradient: Any, variable: Variable) -> Array:
    array = np.asarray(gradient, variable.dtype)
    if array.shape != variable.shape:
        raise ValueError(f"a gradient has shape {array.shape}: {variable} has {variable.shape}")
    return array


class SGD(Optimizer):
    """Gradient descent, with momentum, also Nesterov's (Sutskever et al. 2013)."""

    def __init__(
        self, learning_rate: float = 0.01, momentum: float = 0.0, nesterov: bool = False
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum={momentum!r}: must be from 0 to 1")
        super().__init__(learning_rate)
        self.momentum, self.nesterov = momentum, nesterov

    def _update(self, value: Array, gradient: Array, variable: Variable) -> None:
        gradient *= gradient.dtype.type(self.learning_rate)
        if self.momentum == 0:
            value -= gradient
            return
        momentum = gradient.dtype.type(self.momentum)
        velocity = self._slot(variable, "velocity")
        velocity *= momentum
        velocity -= gradient
        value += momentum * velocity - gradient if self.nesterov else velocity


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba 2015, arXiv:1412.6980)."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        super().__init__(learning_rate)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def _update(self, value: Array, gradient: Array, variable: Variable) -> None:
        number = gradient.dtype.type
        mean, square = self._slot(variable, "mean"), self._slot(variable, "square")
        mean += (gradient - mean) * number(1 - self.beta_1)
        square += (gradient * gradient - square) * number(1 - self.beta_2)
        correction = (1 - self.beta_2**self.iterations) ** 0.5 / (1 - self.beta_1**self.iterations)
        step = mean * number(self.learning_rate * correction)
        value -= step / (np.sqrt(square) + number(self.epsilon))
