"""Training of JAX's pytrees under a strategy; imported when the program imports it or uses it."""

from strategies.jax.gradients import value_and_grad
from strategies.jax.states import PytreeState

__all__ = ["PytreeState", "value_and_grad"]
