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
        self._strategy.extended.check_all_reduce(reduce_op, value, options)
        return super().all_reduce(reduce_op, value, options)

    @property
    def devices(self) -> tuple[str, ...]:
        """The replica's device."""
        devices: tuple[str, ...] = self._strategy.extended.worker_devices
        return devices
