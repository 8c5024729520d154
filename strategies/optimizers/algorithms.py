"""Gradient descent and Adam."""

from __future__ import annotations

from strategies.optimizers.optimizer import Optimizer, Rate
from strategies.optimizers.update_rules import AdaptiveMomentsRule, DescentRule


class SGD(Optimizer):
    """Gradient descent, with momentum, also Nesterov's (Sutskever et al. 2013)."""

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum={momentum!r}: must be from 0 to 1")
        super().__init__(learning_rate, clipnorm, global_clipnorm)
        self.momentum, self.nesterov = momentum, nesterov

    @property
    def rule(self) -> DescentRule:
        """With the numbers of now."""
        return self._made_of(DescentRule, self.learning_rate, self.momentum, self.nesterov)


class Adam(Optimizer):
    """Adaptive moments (Kingma and Ba 2015, arXiv:1412.6980)."""

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
    ) -> None:
        super().__init__(learning_rate, clipnorm, global_clipnorm)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    @property
    def rule(self) -> AdaptiveMomentsRule:
        """With the numbers of now."""
        numbers = self.learning_rate, self.beta_1, self.beta_2, self.epsilon
        return self._made_of(AdaptiveMomentsRule, *numbers)
