"""The synchronous strategies: a copy of every variable on every rank, in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended as Plain

from collectives import Communicator
from strategies.cross_device_ops import ops
from strategies.synchronous import central_storage, default, mirrored
from strategies.tensorflow.cluster import options_of, resolver_of
from strategies.tensorflow.extended import CollectiveExtended
from strategies.tensorflow.strategy import Strategy


class MirroredStrategy(Strategy):
    """As `tf.distribute.MirroredStrategy`; the replicas are the ranks of one node.

    Started by `mpirun -n` with one rank for each replica. `devices` and `cross_device_ops` are as
    those of `strategies.MirroredStrategy`, which raises what is wrong with them;
    `tf.distribute`'s cross-device operations are taken, too. Making one is collective.
    """

    def __init__(
        self,
        devices: str | Sequence[str] | None = None,
        cross_device_ops: Any = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        reduced_by = _cross_device_ops(cross_device_ops)
        super().__init__(mirrored.MirroredStrategy(devices, reduced_by, communicator=communicator))


class MultiWorkerMirroredStrategy(Strategy):
    """As `tf.distribute.MultiWorkerMirroredStrategy`; the replicas are all ranks.

    The cluster comes from `cluster_resolver` (of TensorFlow or of `strategies`), else from
    `TF_CONFIG`, else every rank is a worker; see `strategies.MultiWorkerMirroredStrategy`.
    `communication_options` are `tf.distribute.experimental.CommunicationOptions`, or those of
    `strategies`. Making one is collective.
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: Any = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            mirrored.MultiWorkerMirroredStrategy(
                resolver_of(cluster_resolver),
                options_of(communication_options),
                communicator=communicator,
            )
        )


class CentralStorageStrategy(Strategy):
    """As `tf.distribute.experimental.CentralStorageStrategy`, with a copy on every rank.

    TensorFlow's variables cannot lie in memory that processes share, so each rank has its own copy;
    the values are the same. Arguments as `strategies.CentralStorageStrategy`. Collective.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(
            central_storage.CentralStorageStrategy(
                compute_devices, parameter_device, communicator=communicator
            )
        )


class OneDeviceStrategy(Strategy):
    """As `tf.distribute.OneDeviceStrategy`: one replica on the device. No communication."""

    def __init__(self, device: str, *, communicator: Communicator | None = None) -> None:
        super().__init__(default.OneDeviceStrategy(device, communicator=communicator), device)

    def _make_extended(self, device: str) -> CollectiveExtended:
        return OneDeviceExtended(self, self.array_strategy, device)


class OneDeviceExtended(CollectiveExtended):
    """Of one replica: its variables and results are TensorFlow's own."""

    _create_variable = Plain._create_variable
    _validate_colocate_with_variable = Plain._validate_colocate_with_variable
    _update = Plain._update
    _update_non_slot = Plain._update_non_slot
    _reduce_to = Plain._reduce_to
    _experimental_distribute_values_from_function = (
        Plain._experimental_distribute_values_from_function
    )
    read_var = Plain.read_var
    value_container = Plain.value_container


def _cross_device_ops(given: Any) -> Any:
    """TensorFlow's operations as those of `strategies`; others unchanged."""
    if isinstance(given, tf.distribute.HierarchicalCopyAllReduce):
        return ops.HierarchicalCopyAllReduce()
    if isinstance(given, tf.distribute.ReductionToOneDevice):
        return ops.ReductionToOneDevice()
    if isinstance(given, tf.distribute.NcclAllReduce):
        return None
    return given
