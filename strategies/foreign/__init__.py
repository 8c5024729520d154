"""Refusal of models of torch, Keras and TensorFlow, which no strategy synchronizes yet.

A strategy synchronizes its own `Variable` only. A model of another framework would train
independently on each rank. Nothing here imports a framework: unless the program has imported it,
its objects can't exist.
"""

from strategies.foreign.guards import ScopeGuard, call_guarded
from strategies.foreign.registry import (
    any_loaded,
    framework_of,
    refused_by_checkpoint,
    refused_for_variable,
)

__all__ = [
    "ScopeGuard",
    "any_loaded",
    "call_guarded",
    "framework_of",
    "refused_by_checkpoint",
    "refused_for_variable",
]
