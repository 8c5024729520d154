"""Optimizers that sum the gradients over the replicas before they update the variables.

The arithmetic is NumPy's, also of device arrays, which run its functions on their GPU (NEP 13, 18).
"""

from strategies.optimizers.algorithms import SGD, Adam
from strategies.optimizers.optimizer import Optimizer

__all__ = ["SGD", "Adam", "Optimizer"]
