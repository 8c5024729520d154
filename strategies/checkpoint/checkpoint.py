"""Checkpoint: save named objects of a program to one file, and restore them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from collectives import Communicator
from collectives.scope import named_scope
from strategies.base.strategy import Strategy, get_strategy
from strategies.checkpoint import tensor_file
from strategies.checkpoint.states import State, by_state, check_fit, refuse_different_names
from strategies.checkpoint.tracking import find_states
from strategies.core.same_error import call_on_all, call_on_first
from strategies.core.values import Array
from strategies.foreign.registry import refused
from strategies.replication.contexts import require_cross_replica
from strategies.synchronous.default import default_strategy

States = dict[str, State]
GetStates = Callable[[], States]
Parts = dict[str, dict[str, Array]]
"""The tensors of states by relative name."""

SUFFIX = ".safetensors"


class Checkpoint:
    """The state of named objects, as `tf.train.Checkpoint`.

    Args: variables, optimizers, metrics, objects with the protocol `Saveable`, torch modules,
    optimizers and schedulers (tensors by the names of `state_dict`, everything else as JSON,
    nothing pickled; under a strategy rank 0's are saved), and dicts, lists, tuples, named tuples
    and objects that contain such, by name. They are also attributes of the checkpoint, which may be
    set later: `Checkpoint(step=step).step`. A shared object is saved once. Raises TypeError for
    other objects, ValueError for the reserved name "__metadata__".

    All state is saved as whole arrays, so that a program with any number of ranks, or without a
    strategy, can restore what any other number saved. Of an ON_READ variable the aggregate is
    saved. (https://www.tensorflow.org/api_docs/python/tf/train/Checkpoint)
    """

    def __init__(self, /, **objects: Any) -> None:
        if "__metadata__" in objects:
            raise ValueError("__metadata__ is reserved by the file format: must be another name")
        states = find_states(objects)
        self._objects = objects
        self._default_strategy = get_strategy()
        strategies = (each for each in map(_strategy, states.values()) if each is not None)
        self._first_strategy = next(strategies, self._default_strategy)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            find_states({name: value})
            self._objects[name] = value

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name in objects:
            return objects[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def communicator(self) -> Communicator:
        """The communicator of the ranks that save and restore: that of the variables' strategy.

        Without variables, that of the current strategy when the checkpoint was made. Raises
        ValueError for variables of two strategies.
        """
        return self._strategy_of(find_states(self._objects)).communicator

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the state to a file, and return its path on every rank. Collective.

        Rank 0's path is used; ".safetensors" is appended where it is missing, and directories are
        created. Rank 0 writes a temporary file in the same directory, then renames it, so that no
        incomplete file ever has this name. It needs memory for two copies of the state.

        Under `LocalSGDStrategy` the replicas' values are averaged first, as by `synchronize`,
        unless they are equal already. Under `ParameterServerStrategy` the chief reads one variable
        after the other while workers train: variables read later may include more steps.

        Raises the same error on every rank: rank 0's OSError; ValueError where the ranks have
        different objects, a named object has no state, an ON_READ variable has aggregation NONE, or
        the path ends in no name; TypeError for a module or optimizer of torch that each rank trains
        apart: that no strategy distributes, in a program without torch's process group or a
        `GradientReducer` for it; RuntimeError inside `run`. A worker of parameter servers whose
        call or names are not the chief's raises MismatchError.
        """
        require_cross_replica("Checkpoint.save")
        strategy, get_states, what = self._states("Checkpoint.save", _saveable_states)
        with named_scope(strategy.communicator, "Checkpoint.save, a call for every rank"):
            written: str = strategy.chief_first(lambda: _save(get_states, strategy, path), what)
        # Raises this rank's own error where `chief_first` ran the action on the chief only.
        get_states()
        return written

    def restore(self, path: str | os.PathLike[str] | None, *, expect_partial: bool = False) -> None:
        """Restore the state from a file, which rank 0 reads. Collective; rank 0's path is used.

        path: ".safetensors" may be omitted; None, which `latest_checkpoint` returns where there
        is no checkpoint, changes nothing. expect_partial: ignore tensors in the file that belong
        to no object of this checkpoint.

        Raises the same error on every rank before anything is changed: rank 0's OSError;
        CheckpointError, naming the file, where it isn't a complete checkpoint, or tensors are
        missing, surplus, or of other shapes or dtypes; ValueError where the ranks have different
        objects; RuntimeError inside `run`. A worker of parameter servers whose call or names are
        not the chief's raises MismatchError.
        """
        require_cross_replica("Checkpoint.restore")
        strategy, get_states, what = self._states("Checkpoint.restore", find_states)
        called = []

        def restore_all() -> tuple[str, Parts] | None:
            called.append(True)
            return _restore_from(path, get_states, strategy.communicator, expect_partial)

        with named_scope(strategy.communicator, "Checkpoint.restore, a call for every rank"):
            restored = strategy.chief_first(restore_all, what)
            states = get_states()
            if restored is not None and not called:
                # The chief restored the servers' state; this process's own state is left.
                source, parts = restored
                own = {name: states[name] for name in parts}
                check_fit(own, parts, [], source)
                for name, state in own.items():
                    state.restore(parts[name])

    def _states(
        self, call: str, find: Callable[[Mapping[str, Any]], States]
    ) -> tuple[Strategy, GetStates, str]:
        """The strategy, a function that returns the states or raises the error of `find`, a text.

        The text has the call and the states' names, which workers must have alike; "" after errors.

        The error is deferred to the collective calls, which propagate it to all ranks.
        """
        try:
            states = find(self._objects)
            text = f"{call} of {', '.join(sorted(states))}"
            return self._strategy_of(states), lambda: states, text
        except Exception as error:
            problem = error

        def fail() -> NoReturn:
            raise problem

        return self._first_strategy, fail, ""

    def _strategy_of(self, states: Mapping[str, State]) -> Strategy:
        found = {id(each): each for each in map(_strategy, states.values()) if each is not None}
        if len(found) > 1:
            raise ValueError(f"variables of several strategies: {list(found.values())}")
        return next(iter(found.values()), self._default_strategy)


def run_once(checkpoint: Checkpoint, what: str, action: Callable[[], Any]) -> Any:
    """Run the action on one rank; its result on all ranks of the checkpoint. Collective.

    The result should be small, since it is pickled. An error is raised on all ranks.
    """
    strategy, get_states, text = checkpoint._states(what, find_states)
    communicator = strategy.communicator

    def run() -> Any:
        call_on_all(communicator, what, get_states)
        return call_on_first(communicator, action)

    with named_scope(communicator, f"{what}, a call for every rank"):
        result = strategy.chief_first(run, text)
    get_states()
    return result


def _strategy(state: State) -> Strategy | None:
    """The strategy that a state belongs to; None for state of the process, or if it is unknown."""
    strategy = getattr(state.owner, "strategy", None)
    known = isinstance(strategy, Strategy) and strategy is not default_strategy()
    return strategy if known else None


def _saveable_states(objects: Mapping[str, Any]) -> States:
    """The states. ValueError for an object without any, such as a list of arrays."""
    states = find_states(objects)
    for name, value in objects.items():
        empty = isinstance(value, Mapping | list | tuple | set) and not value
        if not empty and not find_states({name: value}):
            kind = type(value).__name__
            raise ValueError(
                f"{name} is a {kind} without state: must contain a Variable or Saveable"
            )
    return states


def _save(get_states: GetStates, strategy: Strategy, path: str | os.PathLike[str]) -> str:
    communicator = strategy.communicator
    states = call_on_all(communicator, "Checkpoint.save", get_states)
    refuse_different_names(communicator, "Checkpoint.save", states)
    if not strategy.trains_alone:
        call_on_all(communicator, "Checkpoint.save", lambda: _refuse_trained_apart(states))
    strategy.settle()
    tensors = call_on_all(communicator, "Checkpoint.save", lambda: _saved(states))

    def write() -> str:
        given = os.fsdecode(path)
        if not os.path.basename(given):
            raise ValueError(f"path={path!r}: must end in the name of a file")
        target = given if given.endswith(SUFFIX) else given + SUFFIX
        return tensor_file.write(target, tensor_file.encode(tensors))

    return call_on_first(communicator, write)


def _restore_from(
    path: str | os.PathLike[str] | None,
    get_states: GetStates,
    communicator: Communicator,
    expect_partial: bool,
) -> tuple[str, Parts] | None:
    """Restore from rank 0's path; None for a path of None. Collective.

    The result: the path of the file, and the tensors of states that no servers keep.
    """
    what = "Checkpoint.restore"
    states = call_on_all(communicator, what, get_states)
    refuse_different_names(communicator, what, states)
    source = call_on_first(communicator, lambda: None if path is None else _existing(path))
    if source is None:
        return None
    tensors = _read_and_broadcast(communicator, source)
    parts, unknown = by_state(tensors, states)
    surplus = [] if expect_partial else unknown
    call_on_all(communicator, what, lambda: check_fit(states, parts, surplus, source))

    def restore() -> None:
        for path, state in states.items():
            state.restore(parts[path])

    call_on_all(communicator, what, restore)
    return source, {name: parts[name] for name in states if not states[name].kept_by_strategy}


def _refuse_trained_apart(states: Mapping[str, State]) -> None:
    """TypeError for a framework's object of which every rank has different values."""
    for path, state in states.items():
        if getattr(state.owner, "trained_apart", False):
            raise refused(state.owner.owner, f"is {path!r} in Checkpoint.save")


def _saved(states: Mapping[str, State]) -> dict[str, Array]:
    return {
        state.full_name(name): array
        for state in states.values()
        for name, array in state.save().items()
    }


def _existing(given: str | os.PathLike[str]) -> str:
    path = os.fsdecode(given)
    return path if path.endswith(SUFFIX) or os.path.isfile(path) else path + SUFFIX


def _read_and_broadcast(communicator: Communicator, path: str) -> dict[str, Array]:
    """The file's tensors; rank 0 reads and checks the file. Collective."""
    contents: list[bytes] = []

    def read() -> int:
        with open(path, "rb") as file:
            content = file.read()
        tensor_file.decode(content, path)
        contents.append(content)
        return len(content)

    size = call_on_first(communicator, read)
    content = np.frombuffer(contents[0], np.uint8) if contents else np.empty(size, np.uint8)
    return tensor_file.decode(communicator.broadcast(content).tobytes(), path)
