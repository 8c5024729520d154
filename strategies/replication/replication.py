"""Replication: the hooks by which contexts, variables and optimizers use a strategy.

They know a strategy by this class alone. `strategies.base` adds what users call; a strategy
overrides the hooks in which it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any

from collectives import Communicator, MismatchError
from collectives.compression import CompressedReducer
from strategies.communication.packing import ON_HOSTS
from strategies.communication.with_options import CollectivesWithOptions
from strategies.core.indexed_slices import Gradient, IndexedSlices, map_apart, reduce_slices
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.reports import Report, agree
from strategies.core.storage import LocalStorage, ReplacedArrays, Storage
from strategies.core.values import Array
from strategies.core.world import world_of
from strategies.replication.step_series import STEP, StepSeries, compare_steps, named_step


class Replication:
    """The replicas of a program, one for each rank of `communicator`, and how they stay equal."""

    device = "/device:CPU:0"
    """The name of this replica's device."""

    mirrors_variables = True
    """Whether variables follow their synchronization and aggregation; they are plain otherwise."""

    variables_on_gpus = True
    """Whether a variable may be an array on a GPU."""

    aggregates = True
    """Whether values assigned inside `run` are aggregated first, or applied as they arrive."""

    steps_together = True
    """Whether each step of an optimizer is collective."""

    def __init__(
        self,
        communicator: Communicator | None,
        *,
        is_chief: bool | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        communicator = self.communicator = world_of(communicator)
        self._is_chief = communicator.rank == 0 if is_chief is None else is_chief
        options = communication_options or CommunicationOptions()
        self._collectives = CollectivesWithOptions(communicator, options)
        self.deadline = self._collectives.deadline
        """(options): a context with the call's own deadline, if it has one."""
        own = type(self).all_reduce_arrays is not Replication.all_reduce_arrays
        if own and options.compression is not None:
            raise ValueError(f"{type(self).__name__}.all_reduce_arrays would not be compressed")
        self.reduces_plainly = options.leave_it_to_collectives and not own
        """Whether `collectives` alone decides how arrays are reduced, which may be in place."""
        self.compresses = options.compression is not None
        self.trains_alone = communicator.size == 1
        """Whether no other rank trains with this one."""
        self.variable_numbers, self.derivative_numbers = count(), count()
        """Numbers of variables and differentiated functions, by creation: equal on all ranks."""
        self._series_numbers = count()

    @property
    def compressed(self) -> CompressedReducer | None:
        """What compresses gradients, if the options say so. Collective at the first use."""
        return self._collectives.compressed if self.compresses else None

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are aggregated."""
        return self.communicator.size

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once (checkpoints, logs)."""
        return self._is_chief

    # Communication between the replicas. All of it is collective, and every rank gets the result.

    def barrier(self, what: str, options: CommunicationOptions | None = None) -> None:
        """Wait for all replicas; a MismatchError on every rank where their texts differ."""
        with self.deadline(options):
            self.communicator.barrier(what)

    def all_reduce_arrays(
        self,
        arrays: Sequence[Any],
        op: ReduceOp,
        options: CommunicationOptions | None = None,
        *,
        batch: bool = True,
        out: Sequence[Array] | None = None,
    ) -> list[Any]:
        """Fold arrays of any kinds over the replicas, each with its peers.

        An override makes every reduction. Cross-device ops reduce a batch, or a single array alone
        where `batch` is false. `out`: arrays of the results' shapes and dtypes, in which they may
        be stored. Raises a MismatchError on every rank where the arrays differ.
        """
        plain = self.reduces_plainly and options is None
        if plain and (len(arrays) == 1 or ON_HOSTS.issuperset(map(type, arrays))):
            return self._reduce_plainly(arrays, op.value, out)
        return self._all_reduce_by(arrays, op, options, batch or len(arrays) != 1)

    def _reduce_plainly(
        self, arrays: Sequence[Any], op: str, out: Any = None, what: str | None = None
    ) -> list[Any]:
        """By one call of the communicator."""
        if len(arrays) == 1:
            target = None if out is None else out[0]
            return [self.communicator.all_reduce(arrays[0], op, out=target, what=what)]
        return self.communicator.all_reduce_many(arrays, op, out=out, what=what)

    def _all_reduce_by(
        self, arrays: Sequence[Any], op: ReduceOp, options: CommunicationOptions | None, batch: bool
    ) -> list[Any]:
        return self._collectives.all_reduce(arrays, op, options)

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the replicas' arrays along the axis."""
        return self._collectives.all_gather(array, axis, options)

    def gather_slices(self, slices: IndexedSlices, op: ReduceOp | None) -> IndexedSlices:
        """Concatenate the replicas' rows, in their order; with op None the first replica's rows."""
        return reduce_slices(self.communicator, slices, op)

    def broadcast_first(self, value: Array) -> Array:
        """A copy of the first replica's value."""
        first: Array = self.communicator.broadcast(value.copy())
        return first

    def mirror(self, value: Array, what: str) -> Array:
        """Overwrite the array with the chief's, and return it.

        Raises the same MismatchError on every rank where shapes, dtypes or `what` differ.
        """
        self.barrier(what)
        agree(self.communicator, Report(what).of([value]), what)
        mirrored: Array = self.communicator.broadcast(value)
        return mirrored

    # Variables.

    def store(self, value: Array, what: str) -> Storage:
        """Storage for a variable that all replicas see alike, with the chief's value. Collective.

        Here it is an array of this process's own. Raises as `mirror`.
        """
        return LocalStorage(self.mirror(value, what))

    def complete(self, variable: Any) -> None:
        """Finish a variable that was just created."""

    def colocate_with(self, variable: Any) -> AbstractContextManager[None]:
        """A context in which variables are stored where this one is, where there is a choice."""
        return nullcontext()

    # Training.

    def apply_gradients(
        self, optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Update the variables, as one replica; the optimizer has checked them. Collective.

        Here the gradients are summed over the replicas, which all take the same step.
        """
        sums = self._agree_on_step(optimizer, gradients, variables)
        if sums is None:
            sums = self._sums(optimizer, gradients, variables)
        optimizer.update(sums, variables)

    def _agree_on_step(
        self, optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> Sequence[Gradient] | None:
        """A MismatchError on every rank where the ranks would not take the same step.

        Shapes alone don't show it: one variable's gradient would be added to another one's. Ranks
        that have agreed on a step's number agree on the numbers of the steps after it. They compare
        the series of steps instead, a text that stays the same and is hashed once. Where it was the
        text of the step before, the gradients are summed by the call that compares it; returns the
        sums then, else None.
        """
        number, series = optimizer.iterations + 1, optimizer.series
        action, sums = optimizer.action, None
        first = None if series is None or series.owner is not self else series.first
        step = f"{number} of {action}"
        if series is None or first is None or series.next_step != number:
            series = None
        else:
            series.next_step = 0  # No step follows one that fails: numbers are compared anew.
        try:
            if series is None:
                self.communicator.barrier(f"{STEP}{named_step(step, first)}")
            elif series.action is not action or not self._in_one_call(
                optimizer, gradients, variables
            ):
                text = f"{STEP}in series {series.number} of {action}"
                self.communicator.barrier(text)
                series.action, series.text = action, text
            else:
                sums = self._reduce_plainly(gradients, "sum", what=series.text)
        except MismatchError as error:
            first = compare_steps(error, self.communicator, step, first)
            series = None
        if series is None:
            # The numbers were compared, on all ranks.
            own = next(self._series_numbers)
            series = optimizer.series = StepSeries(self, own, own if first is None else first)
        series.next_step = number + 1
        return sums

    def _in_one_call(
        self, optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> bool:
        """Whether one call of the communicator sums the gradients; the same on all ranks."""
        plain = self.reduces_plainly and not optimizer.fusion_of(variables)
        return plain and ON_HOSTS.issuperset(map(type, gradients))

    def _sums(
        self, optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> Sequence[Gradient]:
        """Each gradient's sum, which may be overwritten; rows of sparse ones are concatenated."""
        if IndexedSlices not in map(type, gradients):
            return self._dense_sums(optimizer, gradients, variables)  # type: ignore[arg-type]  # no slices
        pairs = zip(gradients, variables, strict=True)
        dense = [each for grad, each in pairs if not isinstance(grad, IndexedSlices)]
        return map_apart(
            gradients,
            lambda arrays: self._dense_sums(optimizer, arrays, dense),
            lambda slices: self.gather_slices(slices, ReduceOp.SUM),
        )

    def _dense_sums(
        self, optimizer: Any, gradients: Sequence[Array], variables: Sequence[Any]
    ) -> Sequence[Array]:
        if self.compresses:
            numbers = tuple(each.number for each in variables)
            return self._collectives.compressed_sums(gradients, f"variables {numbers}", variables)
        fusion = optimizer.fusion_of(variables) if self.reduces_plainly else None
        if fusion is None:
            return self.all_reduce_arrays(gradients, ReduceOp.SUM)
        views: list[Array] = fusion.views
        # A gradient may lie in another one's view.
        given = [
            gradient if gradient is view else gradient.copy()
            for gradient, view in zip(gradients, views, strict=True)
        ]
        for gradient, view in zip(given, views, strict=True):
            if gradient is not view:
                view[...] = gradient
        sums: list[Array] = fusion.all_reduce()
        return sums

    def settle(self) -> None:
        """Make the replicas' values equal, before a checkpoint takes the chief's. Collective."""

    def restored(self, parameters: Iterable[Any]) -> None:
        """Note that all replicas have restored the same values of a framework's parameters."""

    # Replicas that don't take each step together override the following.

    def averaged(self, arrays: Callable[[], Sequence[Array]]) -> ReplacedArrays | None:
        """What averages the arrays that the function gives, equal on all replicas.

        Here None: the function isn't called.
        """
        return None

    def chief_first(self, action: Callable[[], Any], what: str = "") -> Any:
        """The action's result, on all ranks; `what` is equal on all.

        Here every rank runs it. Where replicas aren't in step the chief alone does, and the others
        wait for its outcome.
        """
        return action()

    def evaluating(self) -> AbstractContextManager[None]:
        """A context in which checkpoints are restored into variables made in it, and evaluated.

        Where replicas aren't in step, these variables are each process's own.
        """
        return nullcontext()

    def loop_over(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """One rank's batches, of which it may have more or fewer than the others.

        Where replicas aren't in step, a rank without batches takes part in the others' averagings.
        """
        return batches

    def leave_loops(self) -> None:
        """Wait for the ranks that are in a loop that this one has ended. Collective."""
