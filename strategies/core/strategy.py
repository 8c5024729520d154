"""What all strategies share: scope, run, reduce, gather and the input methods.

One process is one replica, so a value "per replica" is simply this process's value. Names and
semantics are those of `tf.distribute.Strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from collectives import Communicator
from strategies.cluster_resolver import ClusterResolver
from strategies.communication.options import CommunicationOptions
from strategies.communication.with_options import CollectivesWithOptions
from strategies.core import contexts, values
from strategies.core.consensus import Report, agree
from strategies.core.cross_replica import gather_nest, reduce_nest
from strategies.core.extended import StrategyExtended
from strategies.core.older_names import OlderNames
from strategies.core.pace import InStep
from strategies.core.reduce_op import ReduceOp
from strategies.core.run_options import RunOptions
from strategies.core.world import world_of
from strategies.cross_device_ops.base import CrossDeviceOps, reduce_by
from strategies.input import (
    ArraysDataset,
    InputContext,
    InputOptions,
    ValueContext,
    distribute,
    distribute_from_function,
    make_numpy_dataset,
)
from strategies.variables.indexed_slices import Gradient, IndexedSlices, first_slices, reduce_slices
from strategies.variables.storage import LocalStorage, Storage

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer
    from strategies.variables.variable import Variable


class Strategy(InStep, OlderNames):
    """Base of the strategies: replicas are the ranks of `communicator`.

    `cross_device_ops` reduce where they are given, else `collectives` does by the options.
    """

    device = "/device:CPU:0"
    """The name of this replica's device."""

    mirrors_variables = True
    """Whether variables follow their synchronization and aggregation; they are plain otherwise."""

    aggregates = True
    """Whether what replicas assign inside `run` is aggregated first, or applied as it comes."""

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
        self._plain = cross_device_ops is None and options.leave_it_to_collectives
        self.trains_alone = communicator.size == 1
        """Whether no other rank trains with this one."""
        self.variable_numbers = count()
        """By which ranks tell each other which variable they mean: the order of creation."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas whose gradients are aggregated."""
        return self.communicator.size

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver that knows the cluster and this process's task; None on a single worker."""
        return self._cluster_resolver

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once (checkpoints, logs)."""
        return self._is_chief

    @property
    def extended(self) -> StrategyExtended:
        """The methods for those who write libraries, as `tf.distribute.Strategy.extended`."""
        return StrategyExtended(self)

    @property
    def reduces_plainly(self) -> bool:
        """Whether `collectives` alone decides: arrays may be reduced where they lie then."""
        return self._plain

    def scope(self) -> AbstractContextManager[None]:
        """A context in which the strategy is in force and variables are mirrored when created.

        Raises RuntimeError inside `run` and another strategy's scope. Where several ranks train,
        leaving it raises TypeError for a trainable model of torch, Keras or TensorFlow made in it.
        """
        contexts.require_scope_allowed(self)
        return contexts.scope_of(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as one replica, and return its result.

        Raises ValueError where args is neither a tuple nor a list, RuntimeError inside `run` and
        another strategy's scope. Where several ranks train, TypeError for a trainable model of
        torch, Keras or TensorFlow that the function reaches, and for a step of its optimizer.
        """
        contexts.require_cross_replica("Strategy.run", self)
        if not isinstance(args, list | tuple):
            raise ValueError(f"args={args!r}: must be a tuple or list of positional arguments")
        local = values.local(args), values.local(kwargs or {})
        return contexts.call_as_replica(contexts.ReplicaContext(self), fn, *local)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """Fold each replica's value, a nest of arrays, into one result that every replica gets.

        axis None: element by element; shapes must be equal. Otherwise every replica first sums over
        `axis`, an int or a tuple; the lengths along it may differ, and MEAN divides by their sum.
        MEAN of integers is float64. Of `IndexedSlices` (axis None) the rows are joined, duplicates
        kept, and divided for MEAN. Raises, on every rank alike and before anything is reduced,
        ShapeMismatchError (also of nests), DtypeMismatchError or OpMismatchError (also of axes)
        where the replicas don't fit together, ValueError where an axis doesn't exist; TypeError for
        a list as axis, ValueError for an op that is neither SUM nor MEAN (MismatchError where not
        all ranks give these); RuntimeError inside `run` or another strategy's scope.
        """
        contexts.require_cross_replica("Strategy.reduce", self)
        by = partial(self.totals_of, batch=False)
        return reduce_nest(self.communicator, reduce_op, value, axis, by, plainly=self._plain)

    def gather(self, value: Any, axis: int) -> Any:
        """Join each array of a nest along the axis, in the order of the replicas, for all of them.

        Raises as `Communicator.all_gather`, on every rank alike (MismatchError where not all ranks
        would), ValueError for a number, which has no axis, NotImplementedError for `IndexedSlices`;
        RuntimeError inside `run` and inside the scope of another strategy.
        """
        contexts.require_cross_replica("Strategy.gather", self)
        return gather_nest(self.communicator, values.local(value), axis, self.joined)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas: a tuple of one."""
        return (values.local(value),)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Iterable[Any]:
        """This replica's share of a re-iterable of global batches, the same one on every rank.

        Batches are nests of arrays of equal length on axis 0. How they are shared out says the
        AutoShardPolicy in `options`, else the one in the dataset's own `options()`, else AUTO: a
        dataset of files by file where there are enough, any other by cutting each batch into
        contiguous parts of ⌈n/W⌉, the last of which may be shorter or empty. Collective, as is
        iteration: the end is agreed on at every step, and a rank whose data ends early gets empty
        batches until all have ended. Raises, on every rank alike, TypeError where the dataset can
        be iterated only once, ValueError where the policy doesn't fit it.
        """
        return distribute(self.communicator, dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """The dataset that `dataset_fn` makes for this rank, whose batches are taken as they are.

        The end is agreed on as in `experimental_distribute_dataset`. Where the function raises
        on a rank, the others raise DatasetError; ValueError for options that ask for sharding.
        """
        return distribute_from_function(self.communicator, dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """What `value_fn` gives for this replica: it is called once on every rank."""
        replicas = self.num_replicas_in_sync
        return value_fn(ValueContext(self.communicator.rank % replicas, replicas))

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> ArraysDataset:
        """The slices of a nest of arrays along axis 0, to be shuffled, batched and distributed.

        `session` is ignored. ValueError where the arrays lack an axis 0 or their lengths differ.
        """
        return make_numpy_dataset(numpy_input)

    def mirrored(self, value: NDArray[Any], what: str) -> NDArray[Any]:
        """Overwrite the array with the chief's, and return it. Collective.

        Raises the same MismatchError on every rank where shapes, dtypes or what they are differ.
        """
        self.meet(what)
        agree(self.communicator, Report(what).of([value]), what)
        mirrored: NDArray[Any] = self.communicator.broadcast(value)
        return mirrored

    def store(self, value: NDArray[Any], what: str) -> Storage:
        """Where a variable that all replicas see alike is kept, beginning with the chief's value.

        Collective. Raises as `mirrored`, which the values of variables go through.
        """
        return LocalStorage(self.mirrored(value, what))

    def colocate_with(self, variable: Variable) -> AbstractContextManager[None]:
        """A context in which variables are put where this one is, where there is a choice."""
        return nullcontext()

    def complete(self, variable: Variable) -> None:
        """Make a variable that was just created what it is to be under this strategy."""

    def first_of(self, value: NDArray[Any]) -> NDArray[Any]:
        """The first replica's value, for all. Collective."""
        first: NDArray[Any] = self.communicator.broadcast(value.copy())
        return first

    def total_of(self, value: NDArray[Any], op: ReduceOp) -> NDArray[Any]:
        """The replicas' values folded into one, for all. Collective."""
        total: NDArray[Any] = self.totals_of([value], op, batch=False)[0]
        return total

    def rows_of_all(self, slices: IndexedSlices, op: ReduceOp | None) -> IndexedSlices:
        """The replicas' rows joined, for all; the first replica's where op is None. Collective."""
        if op is None:
            return first_slices(self.communicator, slices)
        return reduce_slices(self.communicator, slices, op)

    def totals_of(
        self,
        arrays: Sequence[Any],
        op: ReduceOp,
        options: CommunicationOptions | None = None,
        *,
        batch: bool = True,
    ) -> list[Any]:
        """As `total_of`, of many arrays of any kinds. Collective.

        Cross-device ops reduce them as a batch; a single one alone where `batch` is false. Raises a
        MismatchError on every rank where the arrays differ.
        """
        if self._plain and options is None and len(arrays) == 1:
            return [self.communicator.all_reduce(arrays[0], op.value)]
        ops, collectives = self._cross_device_ops, self._collectives
        if ops is None:
            return collectives.all_reduce(arrays, op, options)
        together = batch or len(arrays) != 1
        with collectives.deadline(options), contexts.entered(self, None):
            merged = collectives.options.merge(options)
            return reduce_by(ops, op, arrays, merged, batch=together)

    def meet(self, what: str, options: CommunicationOptions | None = None) -> None:
        """Return when all replicas have come for the same; else a MismatchError on every one."""
        with self._collectives.deadline(options):
            self.communicator.barrier(what)

    def joined(self, array: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """The replicas' arrays joined along the axis, for all. Collective."""
        return self._collectives.all_gather(array, axis, options)

    @property
    def steps_together(self) -> bool:
        """Whether each step of an optimizer is collective."""
        return self.aggregates

    def apply_gradients(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Update the variables, as one replica; the optimizer has checked them. Collective."""
        optimizer.update(optimizer.sum_over_replicas(gradients, variables), variables)

    def __repr__(self) -> str:
        rank, size = self.communicator.rank, self.communicator.size
        return f"<{type(self).__name__} replica {rank} of {size}>"
