"""The interface to a framework: recognize its objects, hook their creation and training."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from strategies.foreign.methods import Undo

Callback = Callable[[Any], None]


class Framework(ABC):
    """One framework, found in `sys.modules` and never imported."""

    name: ClassVar[str]
    """The name in error messages."""

    module: ClassVar[str]
    """The package's name."""

    classes: ClassVar[tuple[str, ...]]
    """Dotted names, within the package, of the classes of variables, models and optimizers."""

    alternative: ClassVar[str]
    """What a program does instead, for error messages."""

    saved: ClassVar[str] = "strategies.Variable"
    """What a checkpoint saves instead, for error messages."""

    inference_mark: ClassVar[str] = ""
    """Code that marks a model as not trained; empty where there is none."""

    def __init__(self) -> None:
        self._loaded = False

    @property
    def loaded(self) -> bool:
        """Whether the program has imported it completely."""
        if not self._loaded and self.module in sys.modules:
            self._loaded = self.find(self.classes[-1]) is not None
        return self._loaded

    def find(self, path: str) -> Any:
        """The package's object of a dotted name; None where it doesn't exist (yet)."""
        found, full = sys.modules.get(self.module), self.module
        for name in path.split("."):
            full = f"{full}.{name}"
            # A package may have deleted the attribute of a submodule.
            found = getattr(found, name, sys.modules.get(full))
        return found

    def owns(self, kind: type) -> bool:
        """Whether the class is one of its variables, models or optimizers."""
        kinds = tuple(filter(None, map(self.find, self.classes)))
        return issubclass(kind, kinds)

    @abstractmethod
    def trains(self, thing: Any) -> bool:
        """Whether training changes the object. True for optimizers, False for frozen objects."""

    def is_input(self, thing: Any) -> bool:
        """Whether `run` may use the object though it trains: an input to take gradients for."""
        return False

    def components(self, thing: Any) -> Sequence[Any]:
        """Objects of another framework that the object consists of; it is checked for them."""
        return ()

    @abstractmethod
    def size(self, thing: Any) -> int:
        """A number that is larger for a model than for its layers."""

    @abstractmethod
    def describe(self, thing: Any) -> str:
        """The object as text, the same on every rank."""

    @abstractmethod
    def hook_steps(self, refuse: Callback) -> Undo:
        """Have `refuse` called with every optimizer before it changes variables."""

    def hook_creation(self, record: Callback) -> Undo:
        """Have `record` called with each new model, layer and variable, in any thread."""
        return lambda: None

    def creation_context(self, record: Callback) -> AbstractContextManager[Any]:
        """A context in which `record` is called with each object that this thread creates."""
        return nullcontext()
