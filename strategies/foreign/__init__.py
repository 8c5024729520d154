"""Models of torch, Keras and TensorFlow, which no strategy keeps in step yet, are refused.

A strategy knows its own `Variable` alone: a model of another framework would train apart on each
rank. Nothing here imports a framework; what isn't loaded isn't looked for.
"""

from strategies.foreign.call import call_guarded
from strategies.foreign.known import any_loaded, framework_of
from strategies.foreign.refusal import refused_by_checkpoint, refused_for_variable
from strategies.foreign.scope import KeptOut

__all__ = [
    "KeptOut",
    "any_loaded",
    "call_guarded",
    "framework_of",
    "refused_by_checkpoint",
    "refused_for_variable",
]
