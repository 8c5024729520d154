"""Variables: arrays of a program's state, with a copy on each replica.

Names are those of `tf.Variable`; `aggregation` has the rules for reads and assignments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from collectives.cuda.runtime import on_gpu
from strategies.core.indexed_slices import IndexedSlices, as_indices, check_rows
from strategies.core.same_error import PropagatedErrors
from strategies.core.storage import Change, LocalStorage, Storage, assign, assign_add, assign_sub
from strategies.core.values import Array, as_array, on_host
from strategies.replication.contexts import get_strategy, has_strategy
from strategies.replication.replication import Replication
from strategies.variables import scatter
from strategies.variables.aggregation import (
    Replicated,
    VariableAggregation,
    VariableSynchronization,
)
from strategies.variables.initial import as_initial, check_held

__all__ = ["Variable", "VariableAggregation", "VariableSynchronization"]


class Variable(Replicated, NDArrayOperatorsMixin):
    """An array that a strategy keeps equal on all replicas, or aggregates when it is read.

    initial_value: an array, a number, or a function that gives one; the chief's counts, on every
    rank, and names, shapes and dtypes must agree (MismatchError, ShapeMismatchError,
    DtypeMismatchError on every rank). An array on a GPU stays there, on every rank (TypeError where
    the strategy keeps values on the host). Creating a variable in a strategy's scope is collective.
    dtype: None is the array's own; numbers of Python alone, and lists and ranges of them, are
    float32 or int32 (int64 where that is too small), as in TensorFlow. TypeError where fractions or
    imaginary parts would be lost, OverflowError for an integer that the dtype can't hold,
    ValueError for a list of a bool and then numbers.

    ON_WRITE (the default): an assignment inside `run` aggregates the replicas' values first; with
    aggregation NONE it raises ValueError. ON_READ: `run` reads and writes the replica's own value,
    and reading outside of it aggregates. Raises ValueError for synchronization NONE and for what
    isn't of the two enums, and for MEAN of anything but floating-point numbers.

    `strategy` is the one in force when the variable was made; `distributed` is False under the
    default strategy and OneDeviceStrategy.
    """

    def __init__(
        self,
        initial_value: Any,
        trainable: bool = True,
        name: str | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        dtype: Any = None,
    ) -> None:
        self.name, self.trainable = name, trainable
        self.synchronization, self.aggregation = synchronization, aggregation
        self.strategy: Replication = get_strategy()
        self.distributed = has_strategy() and self.strategy.mirrors_variables
        what = f"Variable {name!r}" if name else "Variable"
        with made_together(what):
            _check_rules(synchronization, aggregation)
            local = as_initial(initial_value, dtype)
            if on_gpu(local) and not self.strategy.variables_on_gpus:
                kind = type(self.strategy).__name__
                raise TypeError(f"{what} lies on a GPU: {kind} keeps values on the host")
        what += self._rules()
        self.storage: Storage = (
            LocalStorage(self.strategy.mirror(local, what))
            if self.on_read
            else self.strategy.store(local, what)
        )
        # Only now, since the ranks' dtypes might have differed.
        floats = local.dtype.kind in "fc" or "float" in local.dtype.name
        if aggregation is VariableAggregation.MEAN and not floats:
            raise ValueError(
                f"aggregation={aggregation}: needs a floating dtype, not {local.dtype}"
            )
        self.strategy.complete(self)
        self.number = next(self.strategy.variable_numbers)
        """The variable's number among those of its strategy, equal on all ranks."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, which never changes."""
        return self.storage.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self.storage.dtype

    @property
    def local(self) -> Array:
        """This replica's copy itself, read-only where other ranks read the same one."""
        return self.storage.view()

    def read_value(self) -> Array:
        """A copy of the value; of ON_READ outside of `run` the replicas' aggregate (collective)."""
        if not self.on_read or self._inside_run():
            return self.storage.read()
        return self._read_for_all()

    def value(self) -> Array:
        """As `read_value`."""
        return self.read_value()

    def numpy(self) -> Array:
        """As `read_value`, on the host."""
        return on_host(self.read_value())

    def assign(self, value: Any) -> Variable:
        """Replace the value, by one of the same shape (ValueError otherwise).

        Outside of `run` every rank that mirrors the variable must give the same value, which is not
        compared, as those of `assign_add` and `assign_sub`.

        TypeError where fractions or imaginary parts would be lost.
        """
        self.storage.change(assign, self._to_assign(self._checked(value, "assign")))
        return self

    def assign_add(self, value: Any) -> Variable:
        """Add to the value."""
        return self._shift(assign_add, value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract from the value."""
        return self._shift(assign_sub, value)

    def _shift(self, change: Change, value: Any) -> Variable:
        operand = self._to_shift(self._checked(value, change.__name__), change.__name__)
        self.storage.change(change, operand)
        return self

    def _checked(self, value: Any, method: str) -> Array:
        with self._propagating(method):
            gpu = self.storage.on_gpu
            given = as_array(value, "value", gpu=gpu and on_gpu(value))
            check_held("value", given, self.dtype, self)
            array = as_array(value, "value", self.dtype, gpu=gpu)
            if array.shape != self.shape:
                raise ValueError(f"value has shape {array.shape}: {self} has shape {self.shape}")
            return array

    def sparse_read(self, indices: Any) -> Array:
        """Copies of rows, an array of shape (*indices.shape, *row shape).

        Raises ValueError for rows that don't exist, TypeError for indices that aren't integers, and
        for a variable without an axis.
        """
        self._refuse_rows_on_gpu()
        whole = self.on_read and not self._inside_run()
        with PropagatedErrors(self.strategy.communicator if whole else None, self, "sparse_read"):
            places = as_indices(indices)
            check_rows(places, len(self), self)
        return self.read_value()[places] if whole else self.storage.rows(places)

    def scatter_add(self, sparse_delta: IndexedSlices) -> Variable:
        """Add to some rows. Inside `run` the replicas' rows are joined, duplicates kept.

        As all scatter methods it raises ValueError for rows that don't exist or are of another
        shape, and otherwise as `assign`; NotImplementedError of an ON_READ variable outside `run`.
        """
        return self._scatter(scatter.scatter_add, sparse_delta)

    def scatter_sub(self, sparse_delta: IndexedSlices) -> Variable:
        """Subtract from some rows."""
        return self._scatter(scatter.scatter_sub, sparse_delta)

    def scatter_mul(self, sparse_delta: IndexedSlices) -> Variable:
        """Multiply some rows."""
        return self._scatter(scatter.scatter_mul, sparse_delta)

    def scatter_div(self, sparse_delta: IndexedSlices) -> Variable:
        """Divide some rows; TypeError of integers, which fractions would be lost of."""
        if self.dtype.kind in "biu":
            raise TypeError(f"{self} holds integers: scatter_div would lose fractions")
        return self._scatter(scatter.scatter_div, sparse_delta)

    def scatter_min(self, sparse_delta: IndexedSlices) -> Variable:
        """Replace elements of some rows by lesser values.

        As `scatter_max` and `scatter_update`: NotImplementedError inside `run` with aggregation SUM
        or MEAN.
        """
        return self._scatter(scatter.scatter_min, sparse_delta)

    def scatter_max(self, sparse_delta: IndexedSlices) -> Variable:
        """Replace elements of some rows by greater values."""
        return self._scatter(scatter.scatter_max, sparse_delta)

    def scatter_update(self, sparse_delta: IndexedSlices) -> Variable:
        """Replace some rows; of duplicates the last counts."""
        return self._scatter(scatter.scatter_update, sparse_delta)

    def _scatter(self, change: Change, slices: IndexedSlices) -> Variable:
        method = change.__name__
        self._refuse_rows_on_gpu()
        with self._propagating(method):
            if not isinstance(slices, IndexedSlices):
                raise TypeError(f"sparse_delta is a {type(slices).__name__}: must be IndexedSlices")
            check_held("value", slices.values, self.dtype, self)
            fitted = slices.fitted(self.shape, self.dtype, self)
        given = self._to_scatter(fitted, method)
        self.storage.change(change, given.indices, given.values)
        return self

    def _refuse_rows_on_gpu(self) -> None:
        if self.storage.on_gpu:
            raise NotImplementedError(
                f"{self} lies on a GPU: rows are read and changed on the host"
            )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self} can't be read without a copy: use copy=None, or np.asarray")
        if self.storage.on_gpu:
            raise TypeError(f"{self} lies on a GPU, and isn't copied implicitly: use numpy()")
        value = self.read_value() if self.on_read else self.storage.read()
        return np.asarray(value, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Variable) for each in kwargs.get("out", ())):
            raise TypeError("a Variable can't be the output: use assign, assign_add or assign_sub")
        if method == "at" and isinstance(inputs[0], Variable):
            raise TypeError(f"{ufunc.__name__}.at can't change a Variable: use assign")
        values = [each._value() if isinstance(each, Variable) else each for each in inputs]
        return getattr(ufunc, method)(*values, **kwargs)

    def _value(self) -> Array:
        """The value, without a copy where possible, for arithmetic that doesn't change it."""
        return self.read_value() if self.on_read else self.storage.view()

    def __getitem__(self, index: Any) -> Any:
        return self._value()[index].copy()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read_value())

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"len() of unsized {self}: it is a single number")
        return self.shape[0]

    def _rules(self) -> str:
        """The rules that aren't the usual ones, as the end of a name."""
        given = ["synchronization=ON_READ"] * self.on_read
        if self.aggregation is not VariableAggregation.NONE:
            given.append(f"aggregation={self.aggregation.name}")
        given += ["trainable=False"] * (not self.trainable)
        return f" ({', '.join(given)})" * bool(given)

    def __bool__(self) -> bool:
        return bool(self._value())

    def __float__(self) -> float:
        return float(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<Variable{name} {self.dtype}{list(self.shape)}>"


def made_together(what: str) -> PropagatedErrors:
    """A context for checks before variables are created: errors are raised on all replicas."""
    strategy = get_strategy()
    return PropagatedErrors(strategy.communicator if strategy.aggregates else None, what)


def compare_made(what: str) -> None:
    """A MismatchError on every replica where the texts of what they create differ. Collective."""
    strategy = get_strategy()
    if strategy.aggregates:
        strategy.barrier(what)


def _check_rules(synchronization: Any, aggregation: Any) -> None:
    known = isinstance(synchronization, VariableSynchronization)
    if not known or synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"synchronization={synchronization}: must be AUTO, ON_WRITE or ON_READ of"
            " VariableSynchronization"
        )
    if not isinstance(aggregation, VariableAggregation):
        names = ", ".join(VariableAggregation.__members__)
        raise ValueError(f"aggregation={aggregation!r}: must be of VariableAggregation ({names})")
