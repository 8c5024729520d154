"""Optimizers in NumPy that sum the gradients over the replicas before they update the variables."""

from strategies.optimizers.optimizer import SGD, Adam, Optimizer

__all__ = ["SGD", "Adam", "Optimizer"]
