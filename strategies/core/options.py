"""Options: reductions and how collectives are done, and attributes that only a class declares.

A misspelt attribute is no option. A subclass declares its own by annotations in the class, as a
dataclass does.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias, cast

from collectives.compression import parse
from strategies.core.values import whole_number

Checks: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""For each attribute, by name, a function that returns the checked value or raises."""


def declared(kind: type) -> list[str]:
    """The names of the attributes that a class of options and its bases annotate."""
    classes = reversed(kind.__mro__)
    names = dict.fromkeys(name for each in classes for name in inspect.get_annotations(each))
    names.pop("checks", None)
    return list(names)


def refuse_unknown(owner: object, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raise AttributeError for an attribute that the owner doesn't have."""
    kind = type(owner).__name__
    raise AttributeError(f"{kind} has no attribute {name!r}: it has {', '.join(allowed)}")


def refuse_change(owner: object, name: str, allowed: Iterable[str]) -> NoReturn:
    """Raise AttributeError for an attribute of an owner whose attributes can't be set."""
    if name not in allowed:
        refuse_unknown(owner, name, allowed)
    kind = type(owner).__name__
    raise AttributeError(f"{kind}.{name} can't be changed: make a new one, {kind}({name}=…)")


class CheckedAttributes:
    """Base of options that may be changed: what is assigned is checked as in the constructor."""

    checks: ClassVar[Checks]

    def __setattr__(self, name: str, value: Any) -> None:
        check = self.checks.get(name)
        if check is None and name not in declared(type(self)):
            refuse_unknown(self, name, declared(type(self)))
        object.__setattr__(self, name, check(value) if check else value)


class FixedAttributes:
    """Base of dataclasses of options that can't be changed: each attribute is set once."""

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = declared(type(self))
        if name in vars(self) or name not in allowed:
            refuse_change(self, name, allowed)
        object.__setattr__(self, name, value)


class ReduceOp(enum.Enum):
    """SUM or MEAN over the replicas; the strings do as well, in any case."""

    SUM = "SUM"
    MEAN = "MEAN"


def as_reduce_op(op: Any) -> ReduceOp:
    """The op that `op` names; that of `collectives` or TensorFlow will do. ValueError otherwise."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, enum.Enum):
        # TensorFlow's has these names, that of `collectives` these values.
        op = op.name if op.name in ReduceOp.__members__ else op.value
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    raise ValueError(f"reduce_op={op!r}: must be ReduceOp.SUM, ReduceOp.MEAN or one of their names")


class CommunicationImplementation(enum.Enum):
    """The algorithm of collectives, as `tf.distribute.experimental.CommunicationImplementation`.

    AUTO: `collectives` selects what it expects to be fastest for the bytes, ranks, nodes and dtype
    of a call, the same on every rank (see `communicator.explain`). RING: the ring of Patarasuk and
    Yuan (2009). NCCL: packs are copied to the ranks' GPUs, reduced there and copied back; gathers
    are as under AUTO. It is a hint: all ranks use AUTO where a rank lacks NCCL or a GPU of its own.

    The choice is for arrays on the host. Arrays on GPUs stay there, and are reduced by NCCL where
    all ranks have it.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


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


def _checked_compression(given: Any) -> str | None:
    if given is None:
        return None
    text = given if isinstance(given, str) else repr(given)
    parse(text)
    return text


@dataclass(init=False, repr=False, unsafe_hash=True)
class CommunicationOptions(CheckedAttributes):
    """Options of collectives, for a strategy or for a single call.

    bytes_per_pack: the size of a message in bytes. Arrays of one dtype are joined into packs, the
    last array first. A pack that has more bytes takes no further array, so that only the last pack
    of a dtype may have fewer. 0: one pack for each dtype; under AUTO `collectives` decides.
    timeout_seconds: how long a call waits for other ranks before it raises DeadlineExceededError;
    None keeps the communicator's deadline, 0 is no deadline.
    implementation: a `CommunicationImplementation` or its name in any case.
    compression: of gradients between nodes, as `collectives.compression.CompressedReducer` does it:
    those of the optimizers of `strategies`, of models of torch, Keras and TensorFlow, and of
    `value_and_grad`. For a strategy, not for a single call. What was left out of a step is not kept
    in checkpoints.

    Raises ValueError or TypeError for anything else, also where it is assigned, AttributeError for
    other attributes. As `tf.distribute.experimental.CommunicationOptions`, but for the compression.
    """

    checks: ClassVar[Checks] = {
        "bytes_per_pack": lambda given: whole_number("bytes_per_pack", given, 0),
        "timeout_seconds": _checked_seconds,
        "implementation": _checked_implementation,
        "compression": _checked_compression,
    }

    bytes_per_pack: int
    timeout_seconds: float | None
    implementation: CommunicationImplementation
    compression: str | None

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        compression: str | None = None,
    ) -> None:
        self.bytes_per_pack, self.timeout_seconds = bytes_per_pack, timeout_seconds
        self.compression = compression
        self.implementation = cast(CommunicationImplementation, implementation)

    @property
    def leave_it_to_collectives(self) -> bool:
        """Whether they set neither the algorithm nor the size of messages, nor a compression."""
        auto = self.implementation is CommunicationImplementation.AUTO
        return auto and not self.bytes_per_pack and self.compression is None

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """New options: the given ones where they aren't the defaults, these elsewhere.

        So a merge can't restore AUTO, 0 bytes or None.
        """
        if options is None:
            return self
        auto = options.implementation is CommunicationImplementation.AUTO
        kept = options.timeout_seconds is None
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if kept else options.timeout_seconds,
            self.implementation if auto else options.implementation,
            options.compression or self.compression,
        )

    def __repr__(self) -> str:
        compression = "" if self.compression is None else f", compression={self.compression!r}"
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack},"
            f" timeout_seconds={self.timeout_seconds}, implementation={self.implementation.name}"
            f"{compression})"
        )


class RunOptions(NamedTuple):
    """TensorFlow's options for its TPU compiler, as `tf.distribute.RunOptions`: not used here.

    Raises AttributeError where an attribute is assigned.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        allowed = declared(type(self))
        if name in self._fields or name not in allowed or name in vars(self):
            refuse_change(self, name, allowed)
        object.__setattr__(self, name, value)
