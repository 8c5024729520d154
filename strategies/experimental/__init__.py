"""The names of `tf.distribute.experimental`, most of them older ones."""

from __future__ import annotations

from collectives import Communicator
from strategies.checkpoint.preemption import PreemptionCheckpointHandler, TerminationConfig
from strategies.cluster_resolver import ClusterResolver
from strategies.core.options import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
)
from strategies.core.same_error import PropagatedErrors
from strategies.core.world import world_of
from strategies.experimental import coordinator, partitioners
from strategies.input import ValueContext
from strategies.parameter_server import ParameterServerStrategy
from strategies.synchronous.central_storage import CentralStorageStrategy
from strategies.synchronous.mirrored import (
    MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy,
)
from strategies.synchronous.tpu import TPUStrategy

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
]


class MultiWorkerMirroredStrategy(_MultiWorkerMirroredStrategy):
    """`strategies.MultiWorkerMirroredStrategy` with its older arguments.

    communication: an implementation, or its name. Raises ValueError for anything else.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        with PropagatedErrors(world_of(communicator), "MultiWorkerMirroredStrategy"):
            options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options, communicator=communicator)
