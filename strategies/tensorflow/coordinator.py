"""ClusterCoordinator: a chief that schedules `tf.function`s on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import tensorflow as tf

from strategies import coordinator
from strategies.coordinator import PerWorkerDataset, RemoteValue
from strategies.tensorflow.parameter_server import ParameterServerStrategy


class ClusterCoordinator(coordinator.ClusterCoordinator):
    """Schedules functions on the workers of a `ParameterServerStrategy`. For the chief alone.

    As `tf.distribute.coordinator.ClusterCoordinator`, over `strategies.ClusterCoordinator`, which
    has the rules for errors and for workers that die. A function is sent to the workers when it is
    first scheduled, with the models, optimizers and metrics that it refers to. Their variables,
    metrics' included, are then on the servers, and are created by the chief: build models and
    optimizers (`optimizer.build(model.trainable_variables)`) before.

    Raises ValueError for another strategy; RuntimeError on a rank that is not the chief.
    """

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        """The strategy's coordinator, which is made where it has none."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                f"strategy is a {type(strategy).__name__}: must be a ParameterServerStrategy of"
                " strategies.tensorflow"
            )
        return cast("ClusterCoordinator", super().__new__(cls, strategy.array_strategy))

    @property
    def strategy(self) -> Any:
        """The strategy whose workers it schedules functions on."""
        return self._references.tensor_strategy  # type: ignore[attr-defined]  # of this module's

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule a `tf.function` on some worker, and return at once.

        Raises TypeError for anything but a `tf.function`, else as
        `strategies.ClusterCoordinator.schedule`.
        """
        if not isinstance(fn, tf.types.experimental.PolymorphicFunction):
            raise TypeError(f"fn is a {type(fn).__name__}: must be a tf.function")
        return super().schedule(fn, args, kwargs)

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> PerWorkerDataset:
        """A dataset for each worker: what `dataset_fn()` returns there, called once.

        Raises TypeError for a dataset, which cannot be sent.
        """
        if isinstance(dataset_fn, tf.data.Dataset):
            raise TypeError("dataset_fn is a dataset: must be a function that returns one")
        return super().create_per_worker_dataset(getattr(dataset_fn, "python_function", dataset_fn))
