"""What assigning to a variable means: by its rules, and in the context at hand.

The rules are those of `tf.distribute`'s variables, except where TensorFlow lets the copies drift
apart silently: there an error is raised or the first replica's value is taken.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strategies.core.contexts import get_replica_context, has_strategy
from strategies.core.reduce_op import ReduceOp
from strategies.core.refusals import RefusedTogether
from strategies.variables.indexed_slices import IndexedSlices

if TYPE_CHECKING:
    from strategies.variables.variable import Variable

Array = NDArray[Any]

# A sum or a mean of the replicas' rows says nothing of these.
_UNSUMMED = ("scatter_min", "scatter_max", "scatter_update")


class VariableSynchronization(enum.Enum):
    """When the copies are brought together, as `tf.VariableSynchronization`. AUTO is ON_WRITE."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values become one, as `tf.VariableAggregation`."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    @property
    def reduce_op(self) -> ReduceOp | None:
        """How values are folded; None where the first replica's is taken, or nobody's."""
        return {"SUM": ReduceOp.SUM, "MEAN": ReduceOp.MEAN}.get(self.name)


def inside_run(variable: Variable) -> bool:
    """Whether one replica of the variable's strategy speaks; the default one has no other."""
    replica = get_replica_context()
    return not variable.distributed or (
        replica is not None and replica.strategy is variable.strategy
    )


def read_for_all(variable: Variable) -> Array:
    """The aggregate of an ON_READ variable's copies. Collective."""
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(f"{variable}: aggregation NONE says no way to read it outside of `run`")
    return _aggregated(variable, variable.local)


def to_assign(variable: Variable, value: Array) -> Array:
    """What this replica stores where `value` is assigned."""
    _refuse_other_replicas(variable)
    if not variable.on_read:
        return _aggregated(variable, value) if _each_has_its_own(variable) else value
    return value if inside_run(variable) else _share_of(variable, value)


def to_shift(variable: Variable, operand: Array, method: str) -> Array:
    """What this replica adds or subtracts where `operand` is."""
    _refuse_other_replicas(variable)
    if not variable.on_read:
        return _aggregated(variable, operand) if _each_has_its_own(variable) else operand
    if not inside_run(variable) and variable.aggregation is VariableAggregation.SUM:
        raise ValueError(
            f"{variable}: {method} outside of `run` has no meaning for a sum of replicas"
        )
    return operand


def to_scatter(variable: Variable, slices: IndexedSlices, method: str) -> IndexedSlices:
    """The rows that this replica changes where `slices` are scattered."""
    _refuse_other_replicas(variable)
    if variable.on_read:
        if inside_run(variable):
            return slices
        raise NotImplementedError(
            f"{variable}: ON_READ variables don't support {method} outside of `run`"
        )
    if not _each_has_its_own(variable):
        return slices
    op = variable.aggregation.reduce_op
    if op is not None and method in _UNSUMMED:
        raise NotImplementedError(
            f"{variable}: {method} inside `run` needs aggregation ONLY_FIRST_REPLICA, not"
            f" {op.name}, which says nothing of rows that aren't added up"
        )
    return variable.strategy.rows_of_all(slices, op)


def refused_together(variable: Variable, method: str) -> RefusedTogether:
    """A context for the checks of an operand: what others wait for is refused on all replicas.

    Where nobody waits, since every copy is changed by itself, one replica alone raises the error.
    """
    strategy = variable.strategy
    aggregated = (
        not variable.on_read
        and variable.distributed
        and strategy.aggregates
        and variable.aggregation is not VariableAggregation.NONE
        and inside_run(variable)
    )
    outside = variable.storage.changes_together and not inside_run(variable)
    others_wait = aggregated or outside
    return RefusedTogether(strategy.communicator if others_wait else None, variable, method)


def _each_has_its_own(variable: Variable) -> bool:
    """Whether each replica gives a value of its own to an ON_WRITE variable.

    ValueError where they can't be aggregated.
    """
    if not (variable.distributed and inside_run(variable) and variable.strategy.aggregates):
        return False
    if variable.aggregation is VariableAggregation.NONE:
        raise ValueError(
            f"{variable}: can't be assigned inside `run` with aggregation NONE, since the replicas'"
            " values may differ: give an aggregation, or assign outside of `run`"
        )
    return True


def _refuse_other_replicas(variable: Variable) -> None:
    """RuntimeError for a replica of another strategy, whose values nobody would aggregate.

    A variable made outside of every scope is its process's own: it may be changed by any replica,
    unless it asks for an aggregation with others.
    """
    replica = get_replica_context()
    if replica is None or not has_strategy() or replica.strategy is variable.strategy:
        return
    others = replica.strategy.communicator.size > 1
    aggregation = variable.aggregation is not VariableAggregation.NONE
    if variable.distributed or (aggregation and others):
        raise RuntimeError(
            f"{variable} belongs to {variable.strategy}: can't be assigned as a replica of"
            f" {replica.strategy}; create it in that strategy's scope"
        )


def _aggregated(variable: Variable, value: Array) -> Array:
    op = variable.aggregation.reduce_op
    if op is None:
        return variable.strategy.first_of(value)
    return variable.strategy.total_of(value, op)


def _share_of(variable: Variable, value: Array) -> Array:
    """What one replica stores of a value assigned to an ON_READ variable for all of them."""
    if variable.aggregation is not VariableAggregation.SUM:
        return value
    copies = variable.strategy.communicator.size
    if variable.dtype.kind not in "iu":
        return np.asarray(value / variable.dtype.type(copies), variable.dtype)
    # Whole shares, rounded towards zero; a float64 would lose bits of large integers.
    shares = value // copies
    return np.asarray(shares + ((value < 0) & (shares * copies != value)), variable.dtype)
