"""Optimizers in NumPy that sum the gradients over the replicas before they update the variables."""

from strategies.optimizers.algorithms import SGD, Adam
from strategies.optimizers.optimizer import Optimizer

__all__ = ["SGD", "Adam", "Optimizer"]
