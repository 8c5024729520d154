"""Training of JAX's pytrees under a strategy; imported when the program imports it or uses it."""

from strategies.jax.gradients import value_and_grad
from strategies.jax.mesh import REPLICA, DeviceAssignment, Topology, initialize_tpu_system
from strategies.jax.states import PytreeState

__all__ = [
    "REPLICA",
    "DeviceAssignment",
    "PytreeState",
    "Topology",
    "initialize_tpu_system",
    "value_and_grad",
]
