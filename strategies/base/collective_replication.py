"""The hooks of a strategy implemented by collectives between the ranks of its communicator."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from collectives import Communicator, MismatchError
from collectives.consistency.uncaught import raised_on_all
from strategies.cluster.resolvers import ClusterResolver
from strategies.communication.with_options import CollectivesWithOptions
from strategies.core import contexts
from strategies.core.indexed_slices import (
    Gradient,
    IndexedSlices,
    first_slices,
    map_apart,
    reduce_slices,
)
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.replication import Replication
from strategies.core.reports import Report, agree
from strategies.core.same_error import compare
from strategies.core.storage import LocalStorage, Storage
from strategies.core.values import Array
from strategies.core.world import world_of
from strategies.cross_device_ops.base import CrossDeviceOps, reduce_by
from strategies.optimizers import Optimizer
from strategies.optimizers.optimizer import StepSeries
from strategies.variables.variable import Variable

_ON_HOSTS = frozenset({np.ndarray})


class CollectiveReplication(Replication):
    """Replicas that are the ranks of `communicator`.

    `cross_device_ops` reduce where they are given, else `collectives` does by the options.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        cluster_resolver: ClusterResolver | None = None,
        is_chief: bool | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        self.communicator = world_of(communicator)
        self._cluster_resolver = cluster_resolver
        self._is_chief = communicator.rank == 0 if is_chief is None else is_chief
        self._cross_device_ops = cross_device_ops
        options = communication_options or CommunicationOptions()
        self._collectives = CollectivesWithOptions(communicator, options)
        self.reduces_plainly = cross_device_ops is None and options.leave_it_to_collectives
        self.trains_alone = communicator.size == 1
        self.variable_numbers = count()
        self._series_numbers = count()

    def barrier(self, what: str, options: CommunicationOptions | None = None) -> None:
        """Wait for all replicas, no longer than the options' timeout."""
        with self._collectives.deadline(options):
            self.communicator.barrier(what)

    def all_reduce_arrays(
        self,
        arrays: Sequence[Any],
        op: ReduceOp,
        options: CommunicationOptions | None = None,
        *,
        batch: bool = True,
    ) -> list[Any]:
        """By the cross-device ops; without, by the options, in few messages."""
        if self.reduces_plainly and options is None:
            if len(arrays) == 1:
                return [self.communicator.all_reduce(arrays[0], op.value)]
            if _ON_HOSTS.issuperset(map(type, arrays)):
                return self.communicator.all_reduce_many(arrays, op.value)
        ops, collectives = self._cross_device_ops, self._collectives
        if ops is None:
            return collectives.all_reduce(arrays, op, options)
        together = batch or len(arrays) != 1
        with collectives.deadline(options), contexts.entered(self, None):
            merged = collectives.options.merge(options)
            return reduce_by(ops, op, arrays, merged, batch=together)

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """By the options."""
        return self._collectives.all_gather(array, axis, options)

    def gather_slices(self, slices: IndexedSlices, op: ReduceOp | None) -> IndexedSlices:
        """Rows in the order of the replicas, duplicates kept."""
        if op is None:
            return first_slices(self.communicator, slices)
        return reduce_slices(self.communicator, slices, op)

    def broadcast_first(self, value: Array) -> Array:
        """A copy of rank 0's array."""
        first: Array = self.communicator.broadcast(value.copy())
        return first

    def mirror(self, value: Array, what: str) -> Array:
        """Compare what is mirrored, then broadcast rank 0's array."""
        self.barrier(what)
        agree(self.communicator, Report(what).of([value]), what)
        mirrored: Array = self.communicator.broadcast(value)
        return mirrored

    def store(self, value: Array, what: str) -> Storage:
        """An array of this process's own."""
        return LocalStorage(self.mirror(value, what))

    def complete(self, variable: Variable) -> None:
        """Nothing is left to do."""

    def settle(self) -> None:
        """The replicas' values are equal already."""

    def leave_loops(self) -> None:
        """Loops have the same number of steps on all ranks."""

    def apply_gradients(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Sum the gradients over the replicas, then update the variables alike on all of them."""
        self._agree_on_step(optimizer)
        optimizer.update(self._sums(optimizer, gradients, variables), variables)

    def _agree_on_step(self, optimizer: Optimizer) -> None:
        """A MismatchError on every rank where the ranks would not take the same step.

        Shapes alone don't show it: one variable's gradient would be added to another one's. Ranks
        that have agreed on a step's number agree on the numbers of the steps after it. They compare
        the series of steps instead, a text that stays the same and is hashed once.
        """
        number, series = optimizer.iterations + 1, optimizer.series
        action = optimizer.action
        if series is not None and (series.owner is not self or series.next_step != number):
            series = None
        given = f"{number} of {action}"
        text = given if series is None else f"in series {series.number} of {action}"
        steps = compare(self.communicator, "optimizer step ", text, given, "apply_gradients")
        if steps is not None and len(set(steps)) > 1:
            calls = tuple(f"step {each}" for each in steps)
            error = MismatchError("the ranks would take different steps", calls)
            raise raised_on_all(error, self.communicator.rank)
        if series is None or steps is not None:
            # The numbers were compared, on all ranks.
            series = optimizer.series = StepSeries(self, next(self._series_numbers))
        series.next_step = number + 1

    def _sums(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> Sequence[Gradient]:
        """Each gradient's sum, which may be overwritten; rows of sparse ones are concatenated."""
        if IndexedSlices not in map(type, gradients):
            return self._dense_sums(optimizer, gradients, variables)  # type: ignore[arg-type]
        pairs = zip(gradients, variables, strict=True)
        dense = [each for grad, each in pairs if not isinstance(grad, IndexedSlices)]
        return map_apart(
            gradients,
            lambda arrays: self._dense_sums(optimizer, arrays, dense),
            lambda slices: self.gather_slices(slices, ReduceOp.SUM),
        )

    def _dense_sums(
        self, optimizer: Optimizer, gradients: Sequence[Array], variables: Sequence[Variable]
    ) -> Sequence[Array]:
        fusion = optimizer.fusion_of(variables) if self.reduces_plainly else None
        if fusion is None:
            return self.all_reduce_arrays(gradients, ReduceOp.SUM)
        views = fusion.views
        # A gradient may lie in another one's view.
        given = [
            gradient if gradient is view else gradient.copy()
            for gradient, view in zip(gradients, views, strict=True)
        ]
        for gradient, view in zip(given, views, strict=True):
            if gradient is not view:
                view[...] = gradient
        return fusion.all_reduce()
