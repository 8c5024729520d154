"""ParameterServerStrategy: workers that train asynchronously on variables of parameter servers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from collectives import Communicator
from strategies import parameter_server
from strategies.parameter_server import Partitioner
from strategies.tensorflow import variables
from strategies.tensorflow.cluster import resolver_of
from strategies.tensorflow.exchange import Exchange
from strategies.tensorflow.extended import CollectiveExtended
from strategies.tensorflow.references import TensorReferences
from strategies.tensorflow.served import CLASSES, Place, ServedVariable
from strategies.tensorflow.strategy import Strategy


class ParameterServerStrategy(Strategy):
    """As `tf.distribute.experimental.ParameterServerStrategy`, over `strategies`' of that name.

    The cluster (`cluster_resolver`, else `TF_CONFIG`) has the jobs `ps`, `worker` and perhaps
    `chief`. Ranks of the job ps call `serve`. Without a coordinator all others run one script, each
    on its own data and at its own pace, which creates its variables in one order: the chief's
    initial values count. Each `run` pulls the variables of the scope, and pushes what it has added
    to each of them, which the servers add up: weights, optimizers' slots, counters and statistics
    alike, so that any optimizer of Keras or TensorFlow works. `fit` is a `run` for each batch. A
    read outside of `run` pulls; an assignment there replaces the value for all workers. ON_READ
    variables, as those of metrics, are each worker's own. `num_replicas_in_sync` is 1.

    With a coordinator (`ClusterCoordinator`) the chief alone runs the script, and the workers call
    `serve`, too.

    variable_partitioner splits variables by rows over the servers: one of `strategies`, or of
    `tf.distribute.experimental.partitioners`. staleness: how many steps a worker may be ahead of
    the slowest one; None: any number.

    Making one is collective. Raises as `strategies.ParameterServerStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        staleness: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self._served = parameter_server.ParameterServerStrategy(
            resolver_of(cluster_resolver),
            _partitioner(variable_partitioner),
            staleness=staleness,
            communicator=communicator,
        )
        super().__init__(self._served)
        if self._served.link is not None:
            self._served.link.make_references = partial(TensorReferences, self)

    def _make_extended(self, device: str) -> CollectiveExtended:
        return ServedExtended(self, self.array_strategy, device)

    def serve(self) -> None:
        """As a parameter server: answer until every worker has called `shutdown`, ended or died.

        As a worker, where the cluster has a chief: run what its `ClusterCoordinator` schedules,
        until the chief calls `shutdown` or ends. RuntimeError on other ranks, and a second time.
        """
        self._served.serve()

    def chief_first(self, action: Callable[[], Any], what: str = "") -> Any:
        """As of every strategy; the chief doesn't wait for the other workers.

        A worker whose `what` is another than the chief's raises MismatchError.
        """
        return self._served.chief_first(action, what)

    @property
    def is_server(self) -> bool:
        """Whether this rank has a task of the job ps."""
        return self._served.membership.place.task.type == "ps"

    def shutdown(self) -> None:
        """As a worker: wait until all that was pushed is applied, and withdraw.

        A chief first ends the service of its workers. Variables cannot be read afterwards.
        """
        self._served.shutdown()


class ServedExtended(CollectiveExtended):
    """One replica, whose variables are on the parameter servers."""

    def __init__(self, strategy: Any, arrays: Any, device: str) -> None:
        super().__init__(strategy, arrays, device)
        self.exchange = Exchange(arrays, self.operations)

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.exchange.step():
            return super()._call_for_each_replica(fn, args, kwargs)

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        with self.exchange.step(counts=False):
            return super()._update(var, fn, args, kwargs, group)

    def _note_own_step(self, variable: Any) -> None:
        """Nothing: each worker's steps are its own."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs.pop("colocate_with", None)
        if kwargs.get("per_worker_variable"):
            raise NotImplementedError(
                "per_worker_variable=True: a variable's value is on the servers, one for all"
                " workers. In a cluster without chief, an ON_READ variable is each worker's own"
            )
        place = Place()
        what = variables.described(kwargs)
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ

        def mirror(make: Callable[[], Any]) -> Any:
            return make() if on_read else self.exchange.serve(place, make(), what)

        variable = variables.create(
            self._container_strategy(), self._device, mirror, next_creator, CLASSES, **kwargs
        )
        self.exchange.add(variable, place)
        if "keras" in sys.modules:
            from strategies.tensorflow.loss_scaling import makes_scale

            # Two workers that halve a scale at once would leave 0.
            variable.is_assigned = makes_scale()
        return variable

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        self._refuse_chief("experimental_distribute_dataset")
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Any, options: Any) -> Any:
        self._refuse_chief("distribute_datasets_from_function")
        return super()._distribute_datasets_from_function(dataset_fn, options)

    def _refuse_chief(self, what: str) -> None:
        """Raise RuntimeError on a chief with a coordinator, whose loops would run on it alone."""
        link = self._replication.link  # type: ignore[attr-defined]  # of servers
        if link is not None and link.coordinator is not None:
            raise RuntimeError(
                f"{what} on a chief that has a ClusterCoordinator, whose workers alone train: call"
                " it in the function that is given to create_per_worker_dataset. Model.fit,"
                " evaluate and predict work on the workers of a cluster without chief"
            )

    def read_var(self, v: Any) -> Any:
        """The present value, for a checkpoint."""
        return v.read_value() if isinstance(v, ServedVariable) else super().read_var(v)

    def _input_context(self) -> Any:
        own = self._replication.input_context  # type: ignore[attr-defined]  # of servers
        return tf.distribute.InputContext(own.num_input_pipelines, own.input_pipeline_id, 1)


def _partitioner(given: Any) -> Any:
    """One of TensorFlow as one of `strategies`."""
    if given is None or isinstance(given, Partitioner) or not callable(given):
        return given

    def partition(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return given(shape=tf.TensorShape(shape), dtype=tf.as_dtype(dtype))

    return partition
