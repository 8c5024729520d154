"""The context in which a strategy's `run` calls its function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensorflow.python.distribute import distribute_lib


class ReplicaContext(distribute_lib.ReplicaContext):
    """The context of this process's replica."""

    arguments: Sequence[Any] = ()
    """The tensors that `run` was given in a function that is traced."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As TensorFlow's, of arguments that the ranks check, and nests whose keys they compare."""
        if self.num_replicas_in_sync > 1:
            self._strategy.extended.check_all_reduce(reduce_op, value, options)
        return super().all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> Any:
        """As TensorFlow's, of nests whose keys the ranks compare."""
        if self.num_replicas_in_sync > 1:
            self._strategy.extended.compare_keys("all_gather", value)
        return super().all_gather(value, axis, options)

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's device."""
        devices: tuple[str, ...] = self._strategy.extended.worker_devices
        return devices
