"""A fake framework, to test the refusal of other frameworks' models without one."""

import sys
import types

import pytest

from strategies.foreign import reach, registry
from strategies.foreign.framework import Framework


class Model:
    """An object that trains, unless it is frozen."""

    def __init__(self, name="model", frozen=False):
        self.name, self.frozen = name, frozen
        for hook in list(HOOKS["made"]):
            hook(self)


class Optimizer:
    name = "Descent"
    frozen = False

    def step(self):
        for hook in list(HOOKS["steps"]):
            hook(self)


HOOKS = {"made": [], "steps": []}


class Imagined(Framework):
    name = "Imagined"
    module = "imagined"
    classes = ("Model", "Optimizer")
    alternative = "do it by hand"
    inference_mark = "model.frozen = True"

    def trains(self, thing):
        return not thing.frozen

    def size(self, thing):
        return len(thing.name)

    def describe(self, thing):
        return f"{type(thing).__name__} {thing.name!r}"

    def hook_steps(self, refuse):
        return hooked("steps", refuse)

    def hook_creation(self, record):
        return hooked("made", record)


def hooked(kind, hook):
    HOOKS[kind].append(hook)
    return lambda: HOOKS[kind].remove(hook)


def load():
    """Simulate the import of the framework."""
    module = types.ModuleType("imagined")
    module.Model, module.Optimizer = Model, Optimizer
    sys.modules["imagined"] = module


@pytest.fixture
def unloaded(monkeypatch):
    """The fake framework is the only one, and not imported yet."""
    monkeypatch.setattr(registry, "FRAMEWORKS", (Imagined(),))
    monkeypatch.setattr(registry, "_MODULES", frozenset(["imagined"]))
    forget()
    yield
    sys.modules.pop("imagined", None)
    forget()
    assert HOOKS == {"made": [], "steps": []}


@pytest.fixture
def imagined(unloaded):
    """The fake framework is the only one, and imported."""
    load()


def forget():
    """Clear the caches by class, which belong to other frameworks."""
    registry.framework_of_class.cache_clear()
    reach._children_function.cache_clear()
