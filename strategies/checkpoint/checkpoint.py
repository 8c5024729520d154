"""Checkpoint: named parts of a program, saved to and restored from one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.scope import named_scope
from strategies.base.strategy import Strategy, get_strategy
from strategies.checkpoint import tensor_file
from strategies.checkpoint.errors import CheckpointError
from strategies.checkpoint.states import State, refuse_different_names
from strategies.checkpoint.tracking import find_states
from strategies.core.contexts import require_cross_replica
from strategies.core.same_error import call_on_all, call_on_first
from strategies.synchronous.default import default_strategy

Array = NDArray[Any]
States = dict[str, State]
Finding = Callable[[], States]

SUFFIX = ".safetensors"


class Checkpoint:
    """The state of everything that is named, as `tf.train.Checkpoint`.

    Named can be variables, optimizers, metrics, what speaks the protocol `Saveable`, and dicts,
    lists, tuples, named tuples and objects that hold such; TypeError for anything else. They are
    the checkpoint's attributes, too: `Checkpoint(step=step).step`, which may be set later. What is
    shared is saved once.

    All state is saved as whole arrays, so that any number of ranks, or a program without a
    strategy, can restore what any other number saved. An ON_READ variable's is its aggregate.
    """

    def __init__(self, /, **named_things: Any) -> None:
        if "__metadata__" in named_things:
            raise ValueError("__metadata__ is a name of the file format's own: take another")
        states = find_states(named_things)
        self._things = named_things
        self._made_under = get_strategy()
        strategies = (each for each in map(_strategy, states.values()) if each is not None)
        self._first_strategy = next(strategies, self._made_under)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            find_states({name: value})
            self._things[name] = value

    def __getattr__(self, name: str) -> Any:
        things = self.__dict__.get("_things", {})
        if name in things:
            return things[name]
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @property
    def communicator(self) -> Communicator:
        """Between the ranks that save and restore together: those of the variables' strategy.

        Where there are none, of the strategy that was in force when the checkpoint was made.
        Raises ValueError for variables of two strategies.
        """
        return self._strategy_of(find_states(self._things)).communicator

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write the state to a file, and return its path on every rank. Collective.

        The path of rank 0 counts; ".safetensors" is added where it lacks. Rank 0 writes another
        file in the same directory (made if missing), then renames it, so that there is never a
        half-written file of this name. It holds the whole state twice in memory meanwhile. Under
        `LocalSGDStrategy` the replicas' values are averaged first, as by `synchronize`, unless they
        are equal already. Under `ParameterServerStrategy` the chief reads one variable after the
        other while workers go on: those that are read later may hold more of their steps. Raises
        rank 0's OSError on every rank, ValueError where the ranks hold different things, what is
        named holds no state or an ON_READ variable has aggregation NONE, RuntimeError inside `run`.
        """
        require_cross_replica("Checkpoint.save")
        strategy, found = self._found(_saveable_states)
        with named_scope(strategy.communicator, "Checkpoint.save, a call for every rank"):
            written: str = strategy.chief_first(lambda: _save(found, strategy, path))
        # What is wrong here alone, where this rank has only waited for the chief.
        found()
        return written

    def restore(self, path: str | os.PathLike[str] | None, *, expect_partial: bool = False) -> None:
        """Take the state from a file. Collective; rank 0 reads it, and its path counts.

        ".safetensors" may be left out of the path; None, as `latest_checkpoint` gives where there
        is no checkpoint, changes nothing. `expect_partial` ignores what the file holds of
        things that aren't named here. Raises on every rank alike, and before anything is changed,
        rank 0's OSError; CheckpointError, naming the file, where it is no whole checkpoint, or
        where tensors are missing, too many, or of other shapes or dtypes; ValueError where the
        ranks hold different things. RuntimeError inside `run`.
        """
        require_cross_replica("Checkpoint.restore")
        (strategy, found), acted = self._found(find_states), []

        def act() -> str | None:
            acted.append(True)
            return _restore_from(path, found, strategy.communicator, expect_partial)

        with named_scope(strategy.communicator, "Checkpoint.restore, a call for every rank"):
            source = strategy.chief_first(act)
            states = found()
            if source is not None and not acted:
                # What servers hold is restored; each process's own is not.
                own = {name: each for name, each in states.items() if not each.kept_by_strategy}
                _restore_from(source, lambda: own, strategy.communicator, expect_partial=True)

    def _found(self, find: Callable[[Mapping[str, Any]], States]) -> tuple[Strategy, Finding]:
        """The strategy, and what gives the states, or raises what keeps them from being found.

        A rank that can't find them tells the others, where they wait for it.
        """
        try:
            states = find(self._things)
            return self._strategy_of(states), lambda: states
        except Exception as error:
            problem = error

        def fail() -> NoReturn:
            raise problem

        return self._first_strategy, fail

    def _strategy_of(self, states: Mapping[str, State]) -> Strategy:
        found = {id(each): each for each in map(_strategy, states.values()) if each is not None}
        if len(found) > 1:
            raise ValueError(f"variables of several strategies: {list(found.values())}")
        return next(iter(found.values()), self._made_under)


def done_once(checkpoint: Checkpoint, action: Callable[[], Any]) -> Any:
    """What one rank gets from the action, for all that save and restore together. Collective.

    The outcome should be small; what the action raises is raised on all.
    """
    strategy = checkpoint._strategy_of(find_states(checkpoint._things))
    return strategy.chief_first(lambda: call_on_first(strategy.communicator, action))


def _strategy(state: State) -> Strategy | None:
    """The strategy that a state belongs to; None for a process's own, and where it isn't told."""
    strategy = getattr(state.holder, "strategy", None)
    known = isinstance(strategy, Strategy) and strategy is not default_strategy()
    return strategy if known else None


def _saveable_states(things: Mapping[str, Any]) -> States:
    states = find_states(things)
    _refuse_stateless(things)
    return states


def _refuse_stateless(things: Mapping[str, Any]) -> None:
    """Else nothing would be saved of arrays, or of another framework's model."""
    for name, thing in things.items():
        empty = isinstance(thing, Mapping | list | tuple | set) and not thing
        if not empty and not find_states({name: thing}):
            kind = type(thing).__name__
            raise ValueError(f"{name} is a {kind} that holds no Variable, nor any other state")


def _save(found: Finding, strategy: Strategy, path: str | os.PathLike[str]) -> str:
    communicator = strategy.communicator
    states = call_on_all(communicator, "Checkpoint.save", found)
    refuse_different_names(communicator, "Checkpoint.save", list(states))
    strategy.settle()
    tensors = call_on_all(communicator, "Checkpoint.save", lambda: _saved(states))
    return call_on_first(
        communicator, lambda: tensor_file.write(_target(path), tensor_file.encode(tensors))
    )


def _restore_from(
    path: str | os.PathLike[str] | None,
    found: Finding,
    communicator: Communicator,
    expect_partial: bool,
) -> str | None:
    """The path that was restored; None where there is none."""
    what = "Checkpoint.restore"
    states = call_on_all(communicator, what, found)
    refuse_different_names(communicator, what, list(states))
    source = call_on_first(communicator, lambda: None if path is None else _existing(path))
    if source is None:
        return None
    tensors = _read_together(communicator, source)
    shares, unknown = _shared_out(tensors, states)
    surplus = [] if expect_partial else unknown
    call_on_all(communicator, what, lambda: _check_fit(states, shares, surplus, source))
    call_on_all(communicator, what, lambda: _restore(states, shares))
    return source


def _target(path: str | os.PathLike[str]) -> str:
    target = os.fspath(path)
    return target if target.endswith(SUFFIX) else target + SUFFIX


def _saved(states: Mapping[str, State]) -> dict[str, Array]:
    return {
        state.full_name(name): array
        for state in states.values()
        for name, array in state.save().items()
    }


def _restore(states: Mapping[str, State], shares: Mapping[str, Mapping[str, Array]]) -> None:
    for path, state in states.items():
        state.restore(shares[path])


def _existing(given: str | os.PathLike[str]) -> str:
    path = os.fspath(given)
    return path if path.endswith(SUFFIX) or os.path.isfile(path) else path + SUFFIX


def _read_together(communicator: Communicator, path: str) -> dict[str, Array]:
    """The file's tensors, read and checked by rank 0. Collective."""
    kept: list[bytes] = []

    def read() -> int:
        with open(path, "rb") as file:
            content = file.read()
        tensor_file.decode(content, path)
        kept.append(content)
        return len(content)

    size = call_on_first(communicator, read)
    content = np.frombuffer(kept[0], np.uint8) if kept else np.empty(size, np.uint8)
    return tensor_file.decode(communicator.broadcast(content).tobytes(), path)


def _shared_out(
    tensors: Mapping[str, Array], states: Mapping[str, State]
) -> tuple[dict[str, dict[str, Array]], list[str]]:
    """Each state's tensors by their relative names, and the names of those that are no state's.

    A state's path begins its tensors' names.
    """
    shares: dict[str, dict[str, Array]] = {path: {} for path in states}
    unknown = []
    for name, array in sorted(tensors.items()):
        parts = name.split("/")
        heads = ("/".join(parts[:length]) for length in range(1, len(parts) + 1))
        path = next((head for head in heads if head in shares), None)
        if path is None:
            unknown.append(name)
        else:
            shares[path][name[len(path) + 1 :]] = array
    return shares, unknown


def _check_fit(
    states: Mapping[str, State],
    shares: Mapping[str, Mapping[str, Array]],
    surplus: list[str],
    source: str,
) -> None:
    """CheckpointError for all that keeps the file from being restored."""
    problems = [f"{name}: is in the file, but not named here" for name in surplus]
    for path, state in states.items():
        problems += state.problems(shares[path])
    if problems:
        raise CheckpointError("\n  ".join([f"{source} does not fit:", *problems]))
