"""A variable in several parts."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from strategies.parameter_server.requests import ShardInfo, VariableInfo
from strategies.parameter_server.storage import ServedStorage, SplitStorage
from strategies.variables.variable import Variable


class ShardedVariable(Variable):
    """What a variable becomes that a partitioner splits by rows over parameter servers.

    As TensorFlow's `ShardedVariable`: it reads, assigns and computes as a whole; `variables` are
    its parts. Programs don't make one themselves (TypeError): they make a `Variable` in the scope
    of a strategy that has a partitioner.
    """

    def __init__(self, *variables: Any, **named: Any) -> None:
        raise TypeError(
            "a ShardedVariable isn't made of variables: make a Variable in the scope of a"
            " ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2)), which splits"
            " it"
        )

    _parts: list[Variable] | None = None

    @property
    def variables(self) -> list[Variable]:
        """The parts in the order of their rows, each a variable of its own."""
        if self._parts is None:
            shards = self._split.info.shards
            self._parts = [self._part(number, info) for number, info in enumerate(shards)]
        return self._parts

    @property
    def _split(self) -> SplitStorage:
        assert isinstance(self.storage, SplitStorage)
        return self.storage

    def _part(self, number: int, info: ShardInfo) -> Variable:
        part = Variable.__new__(Variable)
        part.__dict__.update(self.__dict__)
        part.name = f"{self.name or 'Variable'}/part_{number}"
        whole = VariableInfo(part.name, info.shape, info.dtype, (info,), split=False)
        part.storage = ServedStorage(self._split.client, whole)
        return part

    def __getitem__(self, index: Any) -> Any:
        """As of an array; of rows given by a number or a slice no others are moved."""
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(first, slice):
            rows = np.arange(*first.indices(self.shape[0]))
            return self.storage.rows(rows)[(slice(None), *rest)]
        if hasattr(first, "__index__") and not isinstance(first, bool | np.bool_ | np.ndarray):
            number = operator.index(first)
            if not -self.shape[0] <= number < self.shape[0]:
                raise IndexError(f"row {number}: {self} has rows 0 to {self.shape[0] - 1}")
            return self.storage.rows(np.array([number % self.shape[0]]))[0][rest or ...]
        return super().__getitem__(index)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        shards = len(self._split.info.shards)
        return f"<ShardedVariable{name} {self.dtype}{list(self.shape)} in {shards} parts>"
