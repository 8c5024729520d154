"""How reads and assignments of a variable aggregate the replicas' values.

The rules are those of `tf.distribute`'s variables, except where TensorFlow lets the copies diverge
silently: there an error is raised or the first replica's value is taken.
"""

from __future__ import annotations

import enum

from strategies.core.indexed_slices import IndexedSlices
from strategies.core.options import ReduceOp
from strategies.core.same_error import PropagatedErrors
from strategies.core.storage import Storage
from strategies.core.values import Array, cast
from strategies.replication.contexts import get_replica_context, has_strategy
from strategies.replication.replication import Replication

# A sum or a mean of the replicas' rows has no meaning for these.
_UNSUMMED = ("scatter_min", "scatter_max", "scatter_update")


class VariableSynchronization(enum.Enum):
    """When the copies are synchronized, as `tf.VariableSynchronization`. AUTO is ON_WRITE."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the replicas' values are aggregated, as `tf.VariableAggregation`."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3

    @property
    def reduce_op(self) -> ReduceOp | None:
        """The reduction; None for ONLY_FIRST_REPLICA and NONE."""
        return {"SUM": ReduceOp.SUM, "MEAN": ReduceOp.MEAN}.get(self.name)


class Replicated:
    """Base of variables: a value of which each replica has a copy, and the rules for changes."""

    strategy: Replication
    name: str | None
    number: int
    distributed: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    storage: Storage
    """Where the value is kept; those who update all copies alike (optimizers) use it."""

    @property
    def on_read(self) -> bool:
        """Whether each replica has a value of its own, and reads aggregate."""
        return self.synchronization is VariableSynchronization.ON_READ

    def _inside_run(self) -> bool:
        """Whether a replica of the variable's strategy runs; the default one has no other."""
        replica = get_replica_context()
        return not self.distributed or (replica is not None and replica.strategy is self.strategy)

    def _read_for_all(self) -> Array:
        """The aggregate of an ON_READ variable's copies. Collective."""
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(f"{self}: with aggregation NONE it can't be read outside of `run`")
        return self._aggregated(self.storage.view(), "read")

    def _to_assign(self, value: Array) -> Array:
        """What this replica stores where `value` is assigned."""
        self._refuse_other_replicas()
        if not self.on_read:
            return self._aggregated(value, "assign") if self._each_has_its_own() else value
        return value if self._inside_run() else self._share_of(value)

    def _to_shift(self, operand: Array, method: str) -> Array:
        """What this replica adds or subtracts where `operand` is."""
        self._refuse_other_replicas()
        if not self.on_read:
            return self._aggregated(operand, method) if self._each_has_its_own() else operand
        if not self._inside_run() and self.aggregation is VariableAggregation.SUM:
            raise ValueError(
                f"{self}: {method} outside of `run` has no meaning for a sum of replicas"
            )
        return operand

    def _to_scatter(self, slices: IndexedSlices, method: str) -> IndexedSlices:
        """The rows that this replica changes where `slices` are scattered."""
        self._refuse_other_replicas()
        if self.on_read:
            if self._inside_run():
                return slices
            raise NotImplementedError(
                f"{self}: ON_READ variables don't support {method} outside of `run`"
            )
        if not self._each_has_its_own():
            return slices
        op = self.aggregation.reduce_op
        if op is not None and method in _UNSUMMED:
            raise NotImplementedError(
                f"{self}: {method} inside `run` needs aggregation ONLY_FIRST_REPLICA, not"
                f" {op.name}, which is defined for sums of rows only"
            )
        self._compare(method)
        return self.strategy.gather_slices(slices, op)

    def _propagating(self, method: str) -> PropagatedErrors:
        """A context for the checks of an operand, whose errors are raised on all replicas.

        Where every copy is changed by itself no other replica waits, and this one raises alone.
        """
        strategy = self.strategy
        aggregated = (
            not self.on_read
            and self.distributed
            and strategy.aggregates
            and self.aggregation is not VariableAggregation.NONE
            and self._inside_run()
        )
        outside = self.storage.changes_together and not self._inside_run()
        others_wait = aggregated or outside
        return PropagatedErrors(strategy.communicator if others_wait else None, self, method)

    def _each_has_its_own(self) -> bool:
        """Whether each replica gives a value of its own to an ON_WRITE variable.

        ValueError where they can't be aggregated.
        """
        if not (self.distributed and self._inside_run() and self.strategy.aggregates):
            return False
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{self}: can't be assigned inside `run` with aggregation NONE, since the replicas'"
                " values may differ: give an aggregation, or assign outside of `run`"
            )
        return True

    def _refuse_other_replicas(self) -> None:
        """RuntimeError for a replica of another strategy, whose values would not be aggregated.

        A variable made outside of every scope is its process's own: any replica may change it,
        unless its aggregation involves others.
        """
        replica = get_replica_context()
        if replica is None or not has_strategy() or replica.strategy is self.strategy:
            return
        others = replica.strategy.communicator.size > 1
        aggregation = self.aggregation is not VariableAggregation.NONE
        if self.distributed or (aggregation and others):
            raise RuntimeError(
                f"{self} belongs to {self.strategy}: can't be assigned as a replica of"
                f" {replica.strategy}; create it in that strategy's scope"
            )

    def _compare(self, method: str) -> None:
        """A MismatchError on every rank where ranks change different variables, or otherwise."""
        self.strategy.barrier(f"{method} of variable {self.number}, {self.name}")

    def _aggregated(self, value: Array, method: str) -> Array:
        self._compare(method)
        op = self.aggregation.reduce_op
        if op is None:
            return self.strategy.broadcast_first(value)
        (total,) = self.strategy.all_reduce_arrays([value], op, batch=False)
        return cast(total, None)

    def _share_of(self, value: Array) -> Array:
        """What one replica stores of a value assigned to an ON_READ variable for all of them."""
        if self.aggregation is not VariableAggregation.SUM:
            return value
        copies = self.strategy.communicator.size
        if self.storage.dtype.kind not in "iu":
            return cast(value / self.storage.dtype.type(copies), self.storage.dtype)
        # Whole shares, rounded towards zero; a float64 would lose bits of large integers.
        shares = value // copies
        return cast(shares + ((value < 0) & (shares * copies != value)), self.storage.dtype)
