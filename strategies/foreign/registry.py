"""The frameworks, and which object is whose."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from strategies.foreign.framework import Framework
from strategies.foreign.keras_models import Keras
from strategies.foreign.tensorflow_models import TensorFlow
from strategies.foreign.torch_models import Torch

# A layer of Keras is a module of torch on that backend: Keras comes first.
FRAMEWORKS: tuple[Framework, ...] = (Keras(), Torch(), TensorFlow())

_MODULES = frozenset(framework.module for framework in FRAMEWORKS)


def any_loaded() -> bool:
    """Whether the program has imported one of the frameworks."""
    return not sys.modules.keys().isdisjoint(_MODULES)


def loaded() -> list[Framework]:
    """Those that the program has imported."""
    return [framework for framework in FRAMEWORKS if framework.loaded]


def framework_of(thing: Any) -> Framework | None:
    """Whose variable, model or optimizer the object is."""
    kind: type = type(thing)
    return owner_of(kind)


@lru_cache(maxsize=4096)
def owner_of(kind: type) -> Framework | None:
    """As `framework_of`, of the objects of a class.

    What was said of a class holds: a framework is loaded before a class can derive from its own.
    """
    return next((framework for framework in loaded() if framework.owns(kind)), None)
