"""What takes a communicator's device arrays from rank to rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from collectives.cuda.interface import DeviceArray, Event
from collectives.reductions.reduction import ReduceOp

Reduce: TypeAlias = Callable[[DeviceArray, DeviceArray], None]
"""The reduction of all ranks' first array, into the second, which may be the first."""


class Request(NamedTuple):
    """A collective on flat, contiguous device arrays, as `Engine.run` has it."""

    collective: str
    source: DeviceArray | None
    target: DeviceArray
    lengths: Sequence[int] | None
    op: ReduceOp | None
    root: int
    algorithm: str | None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do for any rank, as far as this one can see."""
        if self.collective == "all_to_all":
            return False
        return not (self.target.size if self.lengths is None else sum(self.lengths))


class DevicePath(ABC):
    """One way, which all ranks take alike. Its collectives divide what a MEAN sums."""

    name: str
    """What errors and the record call it."""

    @abstractmethod
    def run(self, request: Request) -> str:
        """Take part; the name of the way that it went, for the record."""

    def bind_all_reduce(self, op: ReduceOp, dtype: np.dtype[Any]) -> Reduce | None:
        """The shortest way to reduce contiguous arrays that aren't empty; None for `run` alone."""
        return None

    @abstractmethod
    def check_capture(self, collective: str, op: str | None, dtype: np.dtype[Any]) -> None:
        """RuntimeError where a graph can't capture it."""

    @abstractmethod
    def wait(self, name: str, event: Event, timeout: float | None) -> None:
        """Let the host wait for an event of the caller's stream behind a collective."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Collective."""

    @abstractmethod
    def abandon(self) -> None:
        """Give back what can be given back by one rank alone, after an error."""


class OnDevices(Protocol):
    """What runs collectives on arrays that lie on GPUs."""

    @property
    def over_host(self) -> bool:
        """Whether arrays go by way of the host, whatever the ranks have."""

    @property
    def asked_for(self) -> bool:
        """Whether the caller asked for GPUs, and so for new arrays on them."""

    def check(self, collective: str, op: str | None, dtypes: Iterable[np.dtype[Any]]) -> None:
        """Before the ranks meet: what this one can see to be wrong with a call of these dtypes.

        TypeError where the current GPU is another than the communicator's, RuntimeError where a
        graph can't capture the call.
        """

    def room(self, length: int, dtype: np.dtype[Any]) -> DeviceArray:
        """New memory on this rank's GPU, for a rank that has no array there yet. Collective."""

    def bind_all_reduce(self, given: Any) -> Callable[[DeviceArray, Any], Any] | None:
        """What `quick.bind_all_reduce` is for arrays on the host."""

    def run(self, request: Request) -> str:
        """Take part; the name of the way that it went. It divides for MEAN."""
