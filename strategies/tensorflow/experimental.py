"""The names of `tf.distribute.experimental`, most of them older ones."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives import Communicator
from strategies.checkpoint import preemption
from strategies.checkpoint.preemption import TerminationConfig
from strategies.tensorflow import mirrored
from strategies.tensorflow.mirrored import CentralStorageStrategy
from strategies.tensorflow.parameter_server import ParameterServerStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
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
        super().__init__(cluster_resolver, communication, communicator=communicator)


class PreemptionCheckpointHandler(preemption.PreemptionCheckpointHandler):
    """The same of `tf.train.Checkpoint` and `tf.train.CheckpointManager`.

    communicator: by default that of the strategy in whose scope it is made. Raises ValueError where
    there is none.
    """

    checkpoints = tf.train.Checkpoint
    managers = tf.train.CheckpointManager

    def _communicator_of(self, given: Any) -> Any:
        communicator = getattr(tf.distribute.get_strategy(), "communicator", None)
        if communicator is None:
            raise ValueError("communicator=None: must be given outside of a strategy's scope")
        return communicator

    def _save_as(self, number: int) -> None:
        # Whatever `checkpoint_interval` the manager has.
        self._manager.save(number, check_interval=False)
