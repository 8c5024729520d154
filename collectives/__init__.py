"""Collective communication on arrays, over MPI.

`world()` returns the communicator of all ranks. It initializes MPI, which importing does not.
"""

from collectives.analysis.cost import Link, estimate
from collectives.analysis.registration import register_algorithm
from collectives.analysis.verify import verify
from collectives.communicator import Communicator
from collectives.errors import (
    BackendUnavailableError,
    CollectiveError,
    CollectiveMismatchError,
    DeadlineExceededError,
    DtypeMismatchError,
    LaunchError,
    MismatchError,
    OpMismatchError,
    RankFailedError,
    RootMismatchError,
    ScheduleError,
    ShapeMismatchError,
)
from collectives.fusion import Fusion
from collectives.lifecycle.futures import Handle
from collectives.messaging.mailbox import Mailbox
from collectives.messaging.message import Message, SendRequest
from collectives.reductions.reduction import ReduceOp
from collectives.world import world

__version__ = "0.1.0"

Sent = SendRequest
"""Former name of `SendRequest`."""

__all__ = [
    "BackendUnavailableError",
    "CollectiveError",
    "CollectiveMismatchError",
    "Communicator",
    "DeadlineExceededError",
    "DtypeMismatchError",
    "Fusion",
    "Handle",
    "LaunchError",
    "Link",
    "Mailbox",
    "Message",
    "MismatchError",
    "OpMismatchError",
    "RankFailedError",
    "ReduceOp",
    "RootMismatchError",
    "ScheduleError",
    "SendRequest",
    "Sent",
    "ShapeMismatchError",
    "estimate",
    "register_algorithm",
    "verify",
    "world",
]
