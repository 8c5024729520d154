"""Pickled objects, for small metadata."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from collectives.engine import Engine
from collectives.operations import Operation
from collectives.reduction import Array


def numbers_of_all(engine: Engine, own: list[int]) -> Array:
    """Every rank's row of as many integers: an array of shape (size, len(own))."""
    table = np.zeros((engine.size, len(own)), np.int64)
    table[engine.rank] = own
    engine.run("all_gather", None, table.reshape(-1), lengths=[len(own)] * engine.size)
    return table


def broadcast_object(obj: Any, root: int) -> Operation:
    """The root's object: its length goes first, then its pickle."""

    def perform(engine: Engine) -> Any:
        if engine.size == 1:
            return pickle.loads(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL))
        sending = engine.rank == root
        content = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if sending else b""
        length = np.array([len(content)], np.int64)
        engine.run("broadcast", None, length, root=root)
        buffer = np.empty(int(length[0]), np.uint8)
        if sending:
            buffer[:] = np.frombuffer(content, np.uint8)
        engine.run("broadcast", None, buffer, root=root)
        return pickle.loads(buffer.data)

    return perform


def all_gather_object(obj: Any) -> Operation:
    """Every rank's object, in rank order."""
    content = np.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), np.uint8)

    def perform(engine: Engine) -> list[Any]:
        lengths = numbers_of_all(engine, [len(content)])[:, 0].tolist()
        ends = np.cumsum(lengths)
        buffer = np.empty(int(ends[-1]), np.uint8)
        buffer[ends[engine.rank] - len(content) : ends[engine.rank]] = content
        engine.run("all_gather", None, buffer, lengths=lengths)
        parts = np.split(buffer, ends[:-1])
        return [pickle.loads(part.data) for part in parts]

    return perform
