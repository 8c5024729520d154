"""Replication: the hooks by which contexts, variables and optimizers use a strategy.

The layers below know this class alone. `strategies.base` implements the hooks over collectives and
adds what users call; a strategy overrides those in which it differs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from collectives import Communicator
from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.storage import Storage
from strategies.core.values import Array


class Replication(ABC):
    """The replicas of a program, one for each rank of `communicator`, and how they stay equal."""

    communicator: Communicator

    device = "/device:CPU:0"
    """The name of this replica's device."""

    mirrors_variables = True
    """Whether variables follow their synchronization and aggregation; they are plain otherwise."""

    aggregates = True
    """Whether values assigned inside `run` are aggregated first, or applied as they arrive."""

    steps_together = True
    """Whether each step of an optimizer is collective."""

    trains_alone: bool
    """Whether no other rank trains with this one."""

    reduces_plainly: bool
    """Whether `collectives` alone decides how arrays are reduced, which may then be in place."""

    variable_numbers: Iterator[int]
    """The numbers of new variables: the order of creation, equal on all ranks."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are aggregated."""
        return self.communicator.size

    @property
    @abstractmethod
    def is_chief(self) -> bool:
        """Whether this process writes what is written once (checkpoints, logs)."""

    @abstractmethod
    def scope(self) -> AbstractContextManager[None]:
        """A context in which the strategy is in force, for all replicas."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as one replica, and return its result."""

    # Communication between the replicas. All of it is collective, and every rank gets the result.

    @abstractmethod
    def barrier(self, what: str, options: CommunicationOptions | None = None) -> None:
        """Wait for all replicas; a MismatchError on every rank where their texts differ."""

    @abstractmethod
    def all_reduce_arrays(
        self,
        arrays: Sequence[Any],
        op: ReduceOp,
        options: CommunicationOptions | None = None,
        *,
        batch: bool = True,
    ) -> list[Any]:
        """Fold arrays of any kinds over the replicas, each with its peers.

        Cross-device ops reduce them as a batch; a single one alone where `batch` is false. Raises a
        MismatchError on every rank where the arrays differ.
        """

    @abstractmethod
    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the replicas' arrays along the axis."""

    @abstractmethod
    def gather_slices(self, slices: IndexedSlices, op: ReduceOp | None) -> IndexedSlices:
        """Concatenate the replicas' rows; with op None the first replica's rows."""

    @abstractmethod
    def broadcast_first(self, value: Array) -> Array:
        """The first replica's value."""

    @abstractmethod
    def mirror(self, value: Array, what: str) -> Array:
        """Overwrite the array with the chief's, and return it.

        Raises the same MismatchError on every rank where shapes, dtypes or `what` differ.
        """

    # Variables.

    @abstractmethod
    def store(self, value: Array, what: str) -> Storage:
        """Storage for a variable that all replicas see alike, with the chief's value. Collective.

        Raises as `mirror`.
        """

    @abstractmethod
    def complete(self, variable: Any) -> None:
        """Finish a variable that was just created."""

    def colocate_with(self, variable: Any) -> AbstractContextManager[None]:
        """A context in which variables are stored where this one is, where there is a choice."""
        return nullcontext()

    # Training.

    @abstractmethod
    def apply_gradients(
        self, optimizer: Any, gradients: Sequence[Gradient], variables: Sequence[Any]
    ) -> None:
        """Update the variables, as one replica; the optimizer has checked them. Collective."""

    @abstractmethod
    def settle(self) -> None:
        """Make the replicas' values equal, before a checkpoint takes the chief's. Collective."""

    # Replicas that don't take each step together override the following.

    def chief_first(self, action: Callable[[], Any]) -> Any:
        """The action's result, on all ranks.

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

    @abstractmethod
    def leave_loops(self) -> None:
        """Wait for the ranks that are in a loop that this one has ended. Collective."""
