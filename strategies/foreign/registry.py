"""The frameworks, which of them an object belongs to, and the errors for such objects."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from collectives.consistency.uncaught import shown_by_one
from strategies.foreign.framework import Framework
from strategies.foreign.keras_models import Keras
from strategies.foreign.tensorflow_models import TensorFlow
from strategies.foreign.torch_models import Torch

# Keras comes first, since on the torch backend its layers are modules of torch as well.
_KERAS = Keras()
FRAMEWORKS: tuple[Framework, ...] = (_KERAS, Torch(), TensorFlow())

_MODULES = frozenset(framework.module for framework in FRAMEWORKS)


def any_loaded() -> bool:
    """Whether the program has imported one of the frameworks."""
    return not sys.modules.keys().isdisjoint(_MODULES)


def loaded() -> list[Framework]:
    """The frameworks that the program has imported."""
    return [framework for framework in FRAMEWORKS if framework.loaded]


def trains_keras() -> bool:
    """Whether the program has imported Keras, with a backend whose models `compile` prepares."""
    return _KERAS.loaded and _KERAS.compiles


def framework_of(thing: Any) -> Framework | None:
    """The framework whose variable, model or optimizer the object is; None for other objects."""
    kind: type = type(thing)
    return framework_of_class(kind)


@lru_cache(maxsize=4096)
def framework_of_class(kind: type) -> Framework | None:
    """As `framework_of`, for the objects of a class.

    The result can be cached: a class of a framework can't exist before the framework is loaded.
    """
    return next((framework for framework in loaded() if framework.owns(kind)), None)


def refused(thing: Any, what: str) -> TypeError:
    """The error for a framework's object; the text is the same on every rank.

    `what` completes the sentence about the object: where it was created or used.
    """
    framework = framework_of(thing)
    assert framework is not None
    mark = framework.inference_mark
    inference = f"\n  A model that isn't trained is allowed: {mark}." if mark else ""
    return TypeError(
        f"the {framework.name} {framework.describe(thing)} {what}: it would train independently on"
        " every rank.\n"
        f"  Instead: {framework.alternative}.{inference}"
    )


def refused_on_all(thing: Any, what: str, rank: int) -> TypeError:
    """As `refused`, where all ranks run the same program and find the same object.

    `rank` is this rank's number in the strategy's communicator. Rank 0 shows the traceback.
    """
    return shown_by_one(refused(thing, what), rank)


def refused_for_variable(thing: Any, position: int) -> TypeError | None:
    """The error for a pair of `apply_gradients`; None where the object is of no framework."""
    if framework_of(thing) is None:
        return None
    return refused(thing, f"at position {position} of apply_gradients is not a strategies.Variable")


def has_torch_state(thing: Any) -> bool:
    """Whether it is a module, optimizer, scheduler or other object of torch with a `state_dict`."""
    kind: type = type(thing)
    return "torch" in sys.modules and _has_torch_state(kind)


@lru_cache(maxsize=4096)
def _has_torch_state(kind: type) -> bool:
    framework = framework_of_class(kind)
    if framework is not None and framework.name != "torch":
        return False
    of_torch = any(each.__module__.partition(".")[0] == "torch" for each in kind.__mro__)
    return of_torch and hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")


def refused_by_checkpoint(thing: Any, path: str, *, named: bool) -> TypeError | None:
    """The error for an object that a checkpoint can't save; None for one that it may ignore.

    It may ignore objects of no framework and, unless named directly, objects that don't train.
    """
    framework = framework_of(thing)
    if framework is None or not (named or framework.trains(thing)):
        return None
    return TypeError(
        f"{path} is the {framework.name} {framework.describe(thing)}, which a Checkpoint can't"
        f" save: it saves {framework.saved}.\n"
        f"  Instead: save it with {framework.name}'s own functions on the chief"
        " (strategy.is_chief), or give the Checkpoint an object with saved_tensors and"
        " restore_tensors"
    )
