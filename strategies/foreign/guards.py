"""What is made in a strategy's scope, and trained while a strategy is in force.

Objects that are made are noted by weak references, and those that still exist are judged when the
scope is left: by then they may have been frozen, and layers that are built later can be told from
those without weights. Steps of optimizers raise at once. Not noted are parameters of torch outside
of every module.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from strategies.foreign.framework import Framework
from strategies.foreign.known import framework_of, loaded
from strategies.foreign.refusal import refused_here
from strategies.foreign.watches import Watches


class _Here(threading.local):
    """What this thread is in: scopes with what was made in them, and strategies in force."""

    def __init__(self) -> None:
        self.made: list[list[weakref.ref[Any]]] = []
        self.in_force: list[tuple[str, int]] = []


_here = _Here()
# While a thread collects, another one's `gc.collect` returns at once.
_collecting = threading.RLock()


def _note(thing: Any) -> None:
    if _here.made:
        _here.made[-1].append(weakref.ref(thing))


def _refuse_step(optimizer: Any) -> None:
    if _here.in_force:
        where, rank = _here.in_force[-1]
        raise refused_here(optimizer, f"was to change variables inside the {where}", rank)


_steps = Watches(lambda framework: framework.watch_steps(_refuse_step))
_creation = Watches(lambda framework: framework.watch_creation(_note))


class StepsRefused:
    """A context in which this thread's steps of foreign optimizers raise TypeError."""

    __slots__ = ("_known", "_where")

    def __init__(self, where: str, rank: int) -> None:
        self._where = where, rank

    def __enter__(self) -> None:
        """Begin."""
        self._known = _steps.enter(loaded())
        _here.in_force.append(self._where)

    def __exit__(self, *_: object) -> None:
        """End."""
        _here.in_force.pop()
        _steps.leave(self._known)


class KeptOut:
    """A context for a scope: TypeError when it is left, for what was made in it and trains.

    An exception that leaves the context is left alone. A framework that was imported within is
    searched for when the context is left, by looking at every object of the program once.
    """

    def __init__(self, strategy: str, rank: int) -> None:
        self._where, self._rank = f"scope of {strategy}", rank
        self._exits = ExitStack()
        self._made: list[weakref.ref[Any]] = []

    def __enter__(self) -> None:
        """Begin to note."""
        self._known = loaded()
        with ExitStack() as entered:
            entered.enter_context(StepsRefused(self._where, self._rank))
            _creation.enter(self._known)
            entered.callback(_creation.leave, self._known)
            for framework in self._known:
                entered.enter_context(framework.creation_noted(_note))
            _here.made.append(self._made)
            entered.callback(_here.made.pop)
            self._exits = entered.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Judge what was made."""
        self._exits.__exit__(kind, error, traceback)
        if kind is not None:
            return
        if self._training() is None:
            return
        with _collecting:
            gc.collect()  # else what nothing refers to would be there on some ranks only
        found = self._training()
        if found is not None:
            raise refused_here(found, f"was made in the {self._where}", self._rank)

    def _training(self) -> Any:
        """The largest of what was made, still exists and trains; None where there is none."""
        imported = [framework for framework in loaded() if framework not in self._known]
        made = [thing for reference in self._made if (thing := reference()) is not None]
        made += _objects_of(imported) if imported else []
        by_framework = [(framework_of(thing), thing) for thing in made]
        held = {id(each) for owner, thing in by_framework if owner for each in owner.held(thing)}
        for framework in loaded():
            own = [thing for owner, thing in by_framework if owner is framework]
            training = [each for each in own if id(each) not in held and framework.trains(each)]
            if training:
                return max(training, key=framework.extent)
        return None


def _objects_of(frameworks: Sequence[Framework | None]) -> list[Any]:
    return [thing for thing in gc.get_objects() if framework_of(thing) in frameworks]
