"""How replicas communicate: the options of `tf.distribute.experimental.CommunicationOptions`."""

from __future__ import annotations

import enum
import operator
from typing import Any, ClassVar, cast

from strategies.core.declared import CheckedAttributes, Checks


class CommunicationImplementation(enum.Enum):
    """Which way collectives go, as `tf.distribute.experimental.CommunicationImplementation`.

    AUTO leaves it to `collectives`: each call goes the way that is expected to be the quickest for
    its bytes, ranks, nodes and dtype (`communicator.explain` tells), the same on every rank. RING
    is the ring of Patarasuk and Yuan (2009). NCCL reduces on the ranks' GPUs, to which packs are
    copied, and from which they return; what is gathered goes as under AUTO. It is a hint: where a
    rank lacks NCCL, or a GPU of its own, all take AUTO.

    They are for arrays of the host. An array on a GPU stays there, and goes over NCCL where the
    ranks have it, whatever is chosen here.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


def _checked_bytes(given: Any) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"bytes_per_pack={given!r}: must be an integer of at least 0")
    return number


def _checked_seconds(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise ValueError(f"timeout_seconds={given!r}: must be seconds, 0 (no deadline) or None")
    return float(given)


def _checked_implementation(given: Any) -> CommunicationImplementation:
    if isinstance(given, CommunicationImplementation):
        return given
    if isinstance(given, str) and given.upper() in CommunicationImplementation.__members__:
        return CommunicationImplementation[given.upper()]
    allowed = ", ".join(CommunicationImplementation.__members__)
    raise ValueError(
        f"implementation={given!r}: must be a CommunicationImplementation or one of {allowed}"
    )


class CommunicationOptions(CheckedAttributes):
    """Options of collectives, for a strategy or for a single call.

    bytes_per_pack: how many bytes are sent as one message, at least: arrays are packed per dtype,
    the last one first, and a pack that has more than that is full. 0: no pack is ever full, and
    under AUTO it is left to `collectives`.
    timeout_seconds: how long a call waits for ranks that don't come, before it raises
    DeadlineExceededError; None leaves the communicator's deadline, 0 is no deadline.
    implementation: a `CommunicationImplementation` or its name in any case.

    Raises ValueError for anything else, also where it is assigned, AttributeError for other
    attributes. As `tf.distribute.experimental.CommunicationOptions`.
    """

    checks: ClassVar[Checks] = {
        "bytes_per_pack": _checked_bytes,
        "timeout_seconds": _checked_seconds,
        "implementation": _checked_implementation,
    }

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        self.bytes_per_pack, self.timeout_seconds = bytes_per_pack, timeout_seconds
        self.implementation = cast(CommunicationImplementation, implementation)

    @property
    def leave_it_to_collectives(self) -> bool:
        """Whether they say nothing about the way and the size of messages."""
        auto = self.implementation is CommunicationImplementation.AUTO
        return auto and not self.bytes_per_pack

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """New options: the given ones where they aren't the defaults, these elsewhere.

        AUTO, 0 bytes and None can't be restored by a merge, therefore.
        """
        if options is None:
            return self
        auto = options.implementation is CommunicationImplementation.AUTO
        kept = options.timeout_seconds is None
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if kept else options.timeout_seconds,
            self.implementation if auto else options.implementation,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CommunicationOptions) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack},"
            f" timeout_seconds={self.timeout_seconds}, implementation={self.implementation.name})"
        )
