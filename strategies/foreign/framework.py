"""What must be known of a framework to refuse its models."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ClassVar

Undo = Callable[[], None]
Note = Callable[[Any], None]


class Framework(ABC):
    """One framework, found in `sys.modules` and never imported."""

    name: ClassVar[str]
    """As users call it."""

    module: ClassVar[str]
    """The package."""

    classes: ClassVar[tuple[str, ...]]
    """The classes of variables, models and optimizers: names within the package."""

    instead: ClassVar[str]
    """What to do today, in place of training in a strategy."""

    reading: ClassVar[str] = ""
    """How a model is marked that is only read; nothing where there is no mark."""

    def __init__(self) -> None:
        self._loaded = False

    @property
    def loaded(self) -> bool:
        """Whether the program has imported it, to the end."""
        if not self._loaded and self.module in sys.modules:
            self._loaded = self.find(self.classes[-1]) is not None
        return self._loaded

    def find(self, path: str) -> Any:
        """What the package has under a dotted name; None where it isn't there, or not yet."""
        found, full = sys.modules.get(self.module), self.module
        for name in path.split("."):
            full = f"{full}.{name}"
            # A package may have deleted the name of a module in it.
            found = getattr(found, name, sys.modules.get(full))
        return found

    def owns(self, kind: type) -> bool:
        """Whether objects of this class are its variables, models or optimizers."""
        kinds = tuple(filter(None, map(self.find, self.classes)))
        return issubclass(kind, kinds)

    @abstractmethod
    def trains(self, thing: Any) -> bool:
        """Whether one of its objects changes by training: frozen ones don't, optimizers do."""

    def is_input(self, thing: Any) -> bool:
        """Whether it may be reached by `run` though it trains: what gradients are taken for."""
        return False

    def held(self, thing: Any) -> Sequence[Any]:
        """What the object is made of in another framework, and speaks for."""
        return ()

    @abstractmethod
    def extent(self, thing: Any) -> int:
        """How much belongs to the object: of a model more than of its layers."""

    @abstractmethod
    def told(self, thing: Any) -> str:
        """The object in words that are equal on every rank."""

    @abstractmethod
    def watch_steps(self, refuse: Note) -> Undo:
        """Have `refuse` called with every optimizer before it changes variables."""

    def watch_creation(self, note: Note) -> Undo:
        """Have `note` called with models, layers and variables as they are made, in any thread."""
        return lambda: None

    def creation_noted(self, note: Note) -> AbstractContextManager[Any]:
        """A context in which `note` is called with what this thread makes."""
        return nullcontext()


def replaced(owner: Any, method: str, make: Callable[[Any], Any]) -> Undo:
    """Replace a method where a class, or one of its bases, defines it."""
    defining = next(kind for kind in owner.__mro__ if method in vars(kind))
    original = vars(defining)[method]
    setattr(defining, method, make(original))
    return lambda: setattr(defining, method, original)


def preceded(owner: Any, method: str, note: Note) -> Undo:
    """Have `note` called with the object before each call of a method."""

    def make(original: Any) -> Callable[..., Any]:
        @wraps(original)
        def call(thing: Any, *args: Any, **kwargs: Any) -> Any:
            note(thing)
            return original(thing, *args, **kwargs)

        return call

    return replaced(owner, method, make)
