"""The older names of `tf.distribute.experimental`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives import Communicator
from strategies.tensorflow import mirrored
from strategies.tensorflow.cluster import options_of
from strategies.tensorflow.mirrored import CentralStorageStrategy
from strategies.tensorflow.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
]

CommunicationImplementation = tf.distribute.experimental.CommunicationImplementation
CommunicationOptions = tf.distribute.experimental.CommunicationOptions
CollectiveCommunication = CommunicationImplementation


class MultiWorkerMirroredStrategy(mirrored.MultiWorkerMirroredStrategy):
    """`MultiWorkerMirroredStrategy` with its older arguments, an implementation first."""

    def __init__(
        self,
        communication: Any = None,
        cluster_resolver: Any = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__(cluster_resolver, options_of(communication), communicator=communicator)
