"""The hooks of `tf.distribute.StrategyExtended` where each replica is a process."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.python.distribute import (
    distribute_lib,
    distribute_utils,
    one_device_strategy,
    reduce_util,
    values,
)

from collectives.consistency.signature import shortened
from strategies.core.nest import structure
from strategies.core.options import CommunicationOptions
from strategies.core.same_error import PropagatedErrors
from strategies.replication.replication import Replication
from strategies.tensorflow import variables
from strategies.tensorflow.cluster import options_of
from strategies.tensorflow.empty_batches import EmptyBatches
from strategies.tensorflow.input import distribute, distribute_from_function
from strategies.tensorflow.operations import Operations, local_value, op_of
from strategies.tensorflow.replica_context import ReplicaContext
from strategies.tensorflow.seeds import replica_seeds
from strategies.tensorflow.statistics import Statistics

_DEFAULT = CommunicationOptions()
_log = logging.getLogger("strategies")


class CollectiveExtended(one_device_strategy.OneDeviceExtended):
    """One replica in this process, and the others in the other ranks.

    `replication` is the strategy of NumPy arrays that does the communication.
    """

    _classes: ClassVar[Mapping[Any, Any]] = variables.CLASSES

    def __init__(self, strategy: Any, replication: Replication, device: str) -> None:
        super().__init__(strategy, device)
        self._replication, self._rank = replication, replication.communicator.rank
        self._size = replication.communicator.size
        self.operations = Operations(replication)
        self.empty_batches = EmptyBatches()
        self.statistics = Statistics(self.operations, self.empty_batches)
        self._own_step = False
        self._compared: MutableMapping[Any, set[Any]] = weakref.WeakKeyDictionary()
        """The numbers of the variables of an optimizer's steps that the ranks have compared."""
        self._default_device = self._input_device
        self.experimental_enable_get_next_as_optional = self._in_multi_worker_mode()
        # A function that is traced in `run` reduces, one that is traced outside does not.
        self._retrace_functions_for_each_device = True

    # Contexts.

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        context = ReplicaContext(self._container_strategy(), self._get_replica_id_in_sync_group(0))
        local_args = distribute_utils.select_replica(0, args)
        local_kwargs = distribute_utils.select_replica(0, kwargs)
        batches = self.empty_batches.run([*local_args, *local_kwargs.values()])
        given = tf.nest.flatten([local_args, local_kwargs], expand_composites=True)
        context.arguments = [each for each in given if tf.is_symbolic_tensor(each)]
        at = tf.device(self._device)
        with batches, at, self.statistics.run(), context, replica_seeds(self._rank):
            return fn(*local_args, **local_kwargs)

    @property
    def is_alone(self) -> bool:
        """Whether there is one replica, whose values cannot differ."""
        return self._size == 1

    def statistic_changed(self, variable: Any) -> None:
        """A replica assigned its own value to a running statistic."""
        self.statistics.changed(variable)

    # Variables.

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        colocate_with = kwargs.pop("colocate_with", None)
        device = self._device
        if isinstance(colocate_with, values.DistributedValues):
            device = colocate_with._devices[0]
        what = f"the initial value of {variables.described(kwargs)}"
        strategy, mirror = self._container_strategy(), partial(self.operations.mirror, what=what)
        with PropagatedErrors(self.operations.communicator, what):
            make = partial(variables.create, strategy, device, mirror, next_creator, self._classes)
            variable = make(**kwargs)
        variable.number = next(self._replication.variable_numbers)
        return variable

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        distribute_utils.validate_colocate_distributed_variable(colocate_with_variable, self)

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, values.DistributedVariable):
            raise ValueError(
                f"variable {getattr(var, 'name', var)!r} was created outside of the scope of"
                f" {type(self._container_strategy()).__name__}, so that the ranks would change it"
                " independently: create it, and the model that it belongs to, inside of the scope"
            )
        self._note_own_step(var)
        at, args = (var._primary.device,), (var._primary, *args)
        return self._update_non_slot(at, fn, args, kwargs, group)

    def _note_own_step(self, variable: Any) -> None:
        """Log a step of an optimizer that `run` has not called, once."""
        if self._own_step or self.is_alone or self.statistics.running:
            return
        if variables.updated_by_optimizer():
            self._own_step = True
            _log.warning(
                "variable %r is updated by an optimizer outside of run, where gradients are not"
                " summed over the ranks: where they differ, the ranks train apart. Call the step"
                " by %s.run",
                variable.name,
                type(self._container_strategy()).__name__,
            )

    def _update_non_slot(
        self, colocate_with: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        with tf.device(colocate_with[0]), distribute_lib.UpdateContext(0):
            local_args = distribute_utils.select_replica(0, args)
            updated = fn(*local_args, **distribute_utils.select_replica(0, kwargs))
        return distribute_utils.update_regroup(self, (updated,), group)

    def read_var(self, v: Any) -> Any:
        """The value that is saved: the aggregate, if each replica has its own."""
        if isinstance(v, values.SyncOnReadVariable):
            return v._get_cross_replica()
        return tf.identity(v._get() if isinstance(v, values.DistributedVariable) else v)

    def value_container(self, value: Any) -> Any:
        """The distributed variable of a replica's variable."""
        return distribute_utils.value_container(value)

    # Reductions.

    def _local_results(self, value: Any) -> Any:
        return distribute_lib.StrategyExtendedV2._local_results(self, value)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        self.compare_keys("reduce", value)
        leaves = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, self._reduce_all(reduce_op, leaves, options))

    def check_all_reduce(self, reduce_op: Any, value: Any, options: Any) -> None:
        """Raise the error of one rank's arguments on all ranks, before TensorFlow does on one."""
        with PropagatedErrors(self.operations.communicator, "all_reduce"):
            op_of(reduce_op)
            _options(options)
        self.compare_keys("all_reduce", value)

    def compare_keys(self, call: str, value: Any) -> None:
        """A MismatchError on every rank where the nests' keys differ, which no tensor shows."""
        text = structure(value)
        if "{" in text and not self.is_alone:
            self.operations.compare(f"{call} of {text}")

    def _batch_reduce_to(self, reduce_op: Any, pairs: Any, options: Any) -> list[Any]:
        if not self.is_alone:
            self._compare_step(*variables.step_that_sums(pairs))
        return self._reduce_all(reduce_op, [value for value, _ in pairs], options)

    def _compare_step(self, optimizer: Any, of: Sequence[Any]) -> None:
        """A MismatchError where the variables, or the optimizer's settings, differ between ranks.

        They are compared in the first step of these variables, whose values are fused by position.
        """
        numbers = tuple(getattr(each, "number", None) for each in of)
        known = self._compared.setdefault(self if optimizer is None else optimizer, set())
        if numbers in known or (optimizer is None and set(numbers) == {None}):
            return
        from strategies.keras.arguments import settings_of

        with tf.init_scope():
            what = "a reduction" if optimizer is None else f"a step of {settings_of(optimizer)}"
            self.operations.compare(f"{what}, of variables {shortened(list(map(str, numbers)))}")
        known.add(numbers)

    def _reduce_all(self, reduce_op: Any, leaves: Sequence[Any], options: Any) -> list[Any]:
        """The leaves reduced in one call, and with them the statistics that are due."""
        mean = reduce_op == reduce_util.ReduceOp.MEAN
        local, options = self._local("reduce", leaves, options)
        if self.is_alone:
            return local
        empty = self.empty_batches.is_empty()
        if mean:
            return self.operations.reduce(local, mean, options, empty=empty)
        return self._with_statistics(
            local,
            lambda values, statistics: self.operations.reduce(
                values, mean, options, statistics=statistics, empty=empty
            ),
        )

    def gradient_sums(self, gradients: Sequence[Any], rows: Any, of: Hashable = None) -> list[Any]:
        """The gradients of a mean over all replicas' rows, times their number.

        gradients: tensors of the mean over this replica's rows.
        rows: their number, a tensor. None, of compressed gradients, for plain sums.
        of: the name of gradients that are compressed, as `CompressedReducer` has it.
        """
        if self.is_alone:
            return list(gradients)

        def reduce(values: Sequence[Any], statistics: Sequence[Any]) -> list[Any]:
            if of is None:
                return self.operations.sums_by_rows(values, statistics, rows)
            empty = rows is None and self.empty_batches.is_empty()
            return self.operations.compressed_sums(values, statistics, rows, of, empty)

        return self._with_statistics(gradients, reduce)

    def _with_statistics(
        self, values: Sequence[Any], reduce: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    ) -> list[Any]:
        """Sums of values, and in the same call averages of the statistics that are due."""
        due = self.statistics.due()
        totals = reduce(values, list(map(variables.raw_value, due)))
        self.statistics.averaged(due, totals[len(values) :])
        return totals[: len(values)]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        (local,), options = self._local("gather", [value], options)
        return local if self.is_alone else self.operations.gather(local, axis, options)

    def _local(
        self, call: str, given: Sequence[Any], options: Any
    ) -> tuple[list[Any], CommunicationOptions | None]:
        """This process's components, and the options; an error of one rank's is raised on all."""
        with PropagatedErrors(self.operations.communicator, call):
            return [local_value(each) for each in given], _options(options)

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        return tensor if self.is_alone else self.operations.broadcast(local_value(tensor))

    # Data.

    def _input_context(self) -> Any:
        return tf.distribute.InputContext(self._size, self._rank, self._size)

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute(self, dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        return distribute_from_function(self, dataset_fn, options)

    def _experimental_distribute_values_from_function(self, value_fn: Any) -> Any:
        context = distribute_lib.ValueContext(self._rank, self._size)
        return distribute_utils.regroup((value_fn(context),), always_wrap=True)

    # Properties that TensorFlow reads.

    def _in_multi_worker_mode(self) -> bool:
        return self._size > 1

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._size

    @property
    def experimental_between_graph(self) -> bool:
        """True: each process has its own graph."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process is the chief."""
        return self._replication.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process is the chief."""
        return self._replication.is_chief

    @property
    def _support_per_replica_values(self) -> bool:
        return True

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> int:
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> int:
        return self._rank


def _options(options: Any) -> CommunicationOptions | None:
    """TensorFlow's options as those of `strategies`; None where they say nothing."""
    given = options_of(options)
    return None if given == _DEFAULT else given
