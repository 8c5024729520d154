"""Collectives on pickled objects, for small metadata."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.calls import Operation
from collectives.consistency.signature import Signature
from collectives.consistency.uncaught import raised_on_all
from collectives.errors import in_step, portable
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array


def numbers_of_all(engine: Engine, first: int, second: int = 0) -> list[list[int]]:
    """Every rank's two numbers, from 0 to 2^63 − 1, in rank order."""
    if engine.size == 1:
        return [[first, second]]
    if engine.node is not None and engine.node.memory_is_all:
        return engine.node.steps.exchange_numbers(first, second)
    table = np.zeros((engine.size, 2), np.int64)
    table[engine.rank] = first, second
    engine.run("all_gather", None, table.reshape(-1), lengths=[2] * engine.size)
    numbers: list[list[int]] = table.tolist()
    return numbers


def broadcast_pickle(engine: Engine, make: Callable[[], Any]) -> Any:
    """The result of `make`, which rank 0 alone calls, pickled, on every rank; its exception too.

    Thus no rank waits for a rank 0 that failed.
    """
    content = b"" if engine.rank else outcome_of(make)
    length = np.array([len(content)], np.int64)
    engine.run("broadcast", None, length, root=0)
    buffer = np.empty(int(length[0]), np.uint8)
    if engine.rank == 0:
        buffer[:] = np.frombuffer(content, np.uint8)
    engine.run("broadcast", None, buffer, root=0)
    return result_of(engine, buffer)


def result_of(engine: Engine, content: Array) -> Any:
    """The result that `outcome_of` has pickled on one rank; raises its exception, on all ranks."""
    result, error = _read(content)
    if error is not None:
        raise raised_on_all(error, engine.rank)
    return result


def outcome_of(make: Callable[[], Any]) -> bytes:
    """The pickle of (result, None), or of (None, exception)."""
    try:
        return pickle.dumps((make(), None), pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        return pickle.dumps((None, portable(error)), pickle.HIGHEST_PROTOCOL)


def make_on_all(engine: Engine, make: Callable[[], Any]) -> list[Any]:
    """Every rank's result of `make`; if it raises on any rank, its exception on all ranks."""
    return _results_of_all(engine, outcome_of(make))


def _results_of_all(engine: Engine, outcome: bytes) -> list[Any]:
    outcomes = gather_pickles(engine, outcome)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            if engine.size > 1:
                _name(error, rank)
            raise raised_on_all(error, engine.rank)
    return [result for result, _ in outcomes]


def _name(error: BaseException, rank: int) -> None:
    """Put the rank first in the error's text."""
    if isinstance(error, OSError) and error.strerror:
        error.strerror = f"rank {rank}: {error.strerror}"
    elif not isinstance(error, UnicodeError):
        # Of which neither the text nor the pickle would follow.
        error.args = (f"rank {rank}: {error}",)


def all_gather_object(obj: Any) -> Operation:
    """Every rank's object, in rank order; the error of one that can't be pickled on all ranks."""
    content = outcome_of(lambda: obj)
    signature = Signature("all_gather_object", nbytes=len(content))
    return Operation(signature, lambda engine: _results_of_all(engine, content))


def gather_pickles(engine: Engine, pickled: bytes) -> list[Any]:
    """Every rank's unpickled object, in rank order."""
    content = np.frombuffer(pickled, np.uint8)
    lengths = [length for length, _ in numbers_of_all(engine, len(content))]
    ends = np.cumsum(lengths)
    buffer = np.empty(int(ends[-1]), np.uint8)
    buffer[ends[engine.rank] - len(content) : ends[engine.rank]] = content
    engine.run("all_gather", None, buffer, lengths=lengths)
    parts = np.split(buffer, ends[:-1])
    return [_read(part) for part in parts]


def _read(content: Array) -> Any:
    """Unpickle an object. A failure does not affect the call's other ranks."""
    try:
        return pickle.loads(content.data)
    except Exception as error:  # of the object's class, whose own code runs
        raise in_step(error) from None
