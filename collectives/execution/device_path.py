"""Interface of the paths that move a communicator's device arrays between ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from collectives.cuda.interface import DeviceArray, Event
from collectives.cuda.runtime import wait_for
from collectives.errors import in_step
from collectives.reductions.reduction import ReduceOp, Reduction, reduction_for

Move: TypeAlias = Callable[[DeviceArray, DeviceArray], None]
"""A collective from the first array into the second, which may be the same array."""

BoundCall: TypeAlias = Callable[[DeviceArray, Any], Any]
"""A whole call, (array, out) → result; `out` may be None."""


class Request(NamedTuple):
    """A collective on flat, contiguous device arrays, with the arguments of `Engine.run`."""

    collective: str
    source: DeviceArray | None
    target: DeviceArray
    lengths: Sequence[int] | None
    op: ReduceOp | None
    root: int
    algorithm: str | None

    @property
    def given(self) -> DeviceArray:
        """The input, which lies in the target if the source is None."""
        return self.target if self.source is None else self.source

    def reduction(self) -> Reduction | None:
        """That of the host, if the call reduces; TypeError, on every rank, for 8-bit floats."""
        try:
            return None if self.op is None else reduction_for(self.op, self.target.dtype)
        except TypeError as error:
            raise in_step(error) from None

    @property
    def empty(self) -> bool:
        """Whether no rank has anything to do, as far as this rank can determine."""
        if self.collective == "all_to_all":
            return False
        return not (self.target.size if self.lengths is None else sum(self.lengths))


class Kind(NamedTuple):
    """What is the same in every call of a bound collective."""

    collective: str
    op: ReduceOp | None
    dtype: np.dtype[Any]
    lengths: Sequence[int]
    """The elements of every rank's part, or of the whole alone."""
    root: int = 0


class DevicePath(ABC):
    """One path, which all ranks take together. Its collectives divide the sum of a MEAN."""

    name: str
    """Name in errors and in the flight recorder."""

    @abstractmethod
    def run(self, request: Request) -> str:
        """Run the collective; the name of the algorithm, for the flight recorder."""

    def bind(self, kind: Kind) -> Move | None:
        """A faster `run` for contiguous, non-empty arrays, or None."""
        return None

    @abstractmethod
    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """Raise RuntimeError if a CUDA graph can't capture the collective."""

    def beside(self, held: object) -> AbstractContextManager[None]:
        """A context whose calls run beside what the caller's stream does next.

        They use `held` besides their own arrays, and leave their work on the stream that is current
        in the context. By default it is the caller's: the host waits in these calls.
        """
        return nullcontext()

    def wait(self, name: str, event: Event, timeout: float | None) -> None:
        """Block the host until an event of the current stream after a collective is done.

        By default it waits for this GPU's work alone: the ranks have finished theirs.
        """
        wait_for(event, timeout)

    @abstractmethod
    def close(self) -> None:
        """Release the path's resources. Collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Release what one rank alone can release, after an error."""


class OnDevices(Protocol):
    """Runs collectives on arrays that lie on GPUs."""

    @property
    def over_host(self) -> bool:
        """Whether arrays are staged through the host, whatever the ranks support."""

    @property
    def gpus_requested(self) -> bool:
        """Whether the caller requested GPUs, and therefore new arrays on them."""

    def room(self, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory on this rank's GPU, for a rank that has no array there yet. Collective."""

    def bind(
        self, collective: str, array: DeviceArray, op: ReduceOp | str | None, root: int
    ) -> BoundCall | None:
        """A function for blocking calls of arrays like this one, or None."""

    def run(self, request: Request) -> str:
        """Run the collective, including the division of a MEAN; the algorithm's name."""

    def beside(self, held: object) -> AbstractContextManager[None]:
        """As `DevicePath.beside`."""

    def as_torch(self) -> AbstractContextManager[None]:
        """A context whose calls are made on torch's current stream."""
