"""The older names of `tf.distribute.experimental`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from collectives import Communicator
from strategies.cluster_resolver import ClusterResolver
from strategies.core.options import (
    CollectiveCommunication,
    CommunicationImplementation,
    CommunicationOptions,
)
from strategies.experimental import coordinator, partitioners
from strategies.synchronous.mirrored import (
    MultiWorkerMirroredStrategy as _MultiWorkerMirroredStrategy,
)
from strategies.synchronous.tpu import TPUStrategy

__all__ = [
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "TPUStrategy",
    "coordinator",
    "partitioners",
]

# Those of `strategies` itself, which imports this module.
_LATER = ("CentralStorageStrategy", "ParameterServerStrategy", "ValueContext")


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
        options = CommunicationOptions(implementation=communication)
        super().__init__(cluster_resolver, options, communicator=communicator)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module("strategies"), name)
    raise AttributeError(f"module 'strategies.experimental' has no attribute {name!r}")
