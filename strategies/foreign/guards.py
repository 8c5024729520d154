"""Guards of `scope` and `run`: TypeError where a foreign model would train in a strategy.

In a scope, created objects are recorded by weak references. Those that still exist are checked at
the end of the scope, since a model may have been frozen by then, and layers that are built later
can then be distinguished from layers without weights. Steps of optimizers raise at once.
Parameters of torch outside of modules aren't recorded.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from strategies.foreign.distributed import strategy_of
from strategies.foreign.framework import Framework
from strategies.foreign.methods import Undo
from strategies.foreign.reach import find_trainable
from strategies.foreign.registry import framework_of, loaded, refused_on_all


class _ThreadState(threading.local):
    """This thread's nested scopes, with the objects created in each, and its active guards."""

    def __init__(self) -> None:
        self.created: list[list[weakref.ref[Any]]] = []
        self.active: list[tuple[str, int]] = []


_state = _ThreadState()
# `gc.collect` returns at once while another thread collects.
_collecting = threading.RLock()


class _SharedHooks:
    """One hook in each framework for all threads, installed while any context needs it."""

    def __init__(self, install: Callable[[Framework], Undo]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._installed: dict[str, tuple[int, Undo]] = {}

    def acquire(self, frameworks: Iterable[Framework]) -> None:
        """Install missing hooks; `release` takes the same frameworks."""
        with self._lock:
            for framework in frameworks:
                users, undo = self._installed.get(framework.name) or (0, self._install(framework))
                self._installed[framework.name] = users + 1, undo

    def release(self, frameworks: Iterable[Framework]) -> None:
        """Remove hooks that have no more users."""
        with self._lock:
            for framework in frameworks:
                users, undo = self._installed.pop(framework.name)
                if users > 1:
                    self._installed[framework.name] = users - 1, undo
                else:
                    undo()


def _record(thing: Any) -> None:
    if _state.created:
        _state.created[-1].append(weakref.ref(thing))


def _refuse_step(optimizer: Any) -> None:
    if _state.active and strategy_of(optimizer) is None:
        where, rank = _state.active[-1]
        raise refused_on_all(optimizer, f"would change variables inside the {where}", rank)


_step_hooks = _SharedHooks(lambda framework: framework.hook_steps(_refuse_step))
_creation_hooks = _SharedHooks(lambda framework: framework.hook_creation(_record))


def call_guarded(
    strategy: str,
    rank: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function as a replica, unless it or its arguments reach a foreign trainable object.

    `rank` is this rank's number in the strategy's communicator. Raises TypeError in that case, and
    where the function runs a step of a foreign optimizer that it gets in another way.
    """
    where = f"run of {strategy}"
    found = find_trainable(fn, args, kwargs)
    if found is not None:
        raise refused_on_all(found, f"is used in {where}", rank)
    with StepGuard(where, rank):
        return fn(*args, **kwargs)


class StepGuard:
    """A context in which this thread's steps of foreign optimizers raise TypeError."""

    __slots__ = ("_hooked", "_where")

    def __init__(self, where: str, rank: int) -> None:
        self._where = where, rank

    def __enter__(self) -> None:
        """Install the hooks."""
        self._hooked = loaded()
        _step_hooks.acquire(self._hooked)
        _state.active.append(self._where)

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        _state.active.pop()
        _step_hooks.release(self._hooked)


class ScopeGuard:
    """A context for a scope: TypeError at its end if a trainable object was created in it.

    An exception in the block is passed on without a check. For a framework that was imported in
    the block, all objects of the process are searched once, at the end.
    """

    def __init__(self, strategy: str, rank: int) -> None:
        self._where, self._rank = f"scope of {strategy}", rank
        self._created: list[weakref.ref[Any]] = []

    def __enter__(self) -> None:
        """Begin to record."""
        self._hooked = loaded()
        with ExitStack() as entered:
            entered.enter_context(StepGuard(self._where, self._rank))
            _creation_hooks.acquire(self._hooked)
            entered.callback(_creation_hooks.release, self._hooked)
            for framework in self._hooked:
                entered.enter_context(framework.creation_context(_record))
            _state.created.append(self._created)
            entered.callback(_state.created.pop)
            self._exits = entered.pop_all()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        """Check the recorded objects."""
        self._exits.__exit__(kind, error, traceback)
        if kind is not None or self._largest_trainable() is None:
            return
        with _collecting:
            gc.collect()  # else unreferenced objects would still exist on some ranks only
        found = self._largest_trainable()
        if found is not None:
            raise refused_on_all(found, f"was created in the {self._where}", self._rank)

    def _largest_trainable(self) -> Any:
        """The largest recorded object that still exists and trains; None without one."""
        imported = [framework for framework in loaded() if framework not in self._hooked]
        created = [thing for reference in self._created if (thing := reference()) is not None]
        if imported:
            created += [each for each in gc.get_objects() if framework_of(each) in imported]
        owned = [(framework_of(thing), thing) for thing in created]
        components = {
            id(each) for owner, thing in owned if owner for each in owner.components(thing)
        }
        for framework in loaded():
            own = [thing for owner, thing in owned if owner is framework]
            trainable = [
                each for each in own if id(each) not in components and framework.trains(each)
            ]
            if trainable:
                return max(trainable, key=framework.size)
        return None
