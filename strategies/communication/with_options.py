"""Collectives as `CommunicationOptions` ask for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from numpy.typing import NDArray

from collectives import Communicator
from collectives.calls.reductions import ReduceInput
from collectives.consistency.uncaught import raised_on_all
from collectives.cuda.runtime import on_gpu
from strategies.communication.over_nccl import OverNccl, find_nccl
from strategies.communication.packing import by_bytes, reduce_apart, reduce_packed
from strategies.core.communication_options import CommunicationImplementation, CommunicationOptions
from strategies.core.device_names import nccl_problem
from strategies.core.reduce_op import ReduceOp
from strategies.core.reports import Report, agree

log = logging.getLogger("strategies")


class CollectivesWithOptions:
    """A strategy's collectives on its communicator, with its options and those of single calls."""

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self._communicator, self.options = communicator, options
        self._nccl: OverNccl | None = None
        self._looked = False

    def all_reduce(
        self, arrays: Sequence[Any], op: ReduceOp, options: CommunicationOptions | None
    ) -> list[Any]:
        """The arrays, folded over the ranks. Raises a MismatchError where the ranks differ.

        Those on GPUs stay there, and are reduced as the communicator does it.
        """
        by_options = partial(self._all_reduce_hosts, op, self.options.merge(options))
        with self.deadline(options):
            return reduce_apart(self._communicator, arrays, op.value, by_options)

    def _all_reduce_hosts(
        self, op: ReduceOp, options: CommunicationOptions, arrays: Sequence[Any]
    ) -> list[Any]:
        way = self._way(options)
        if way == self._automatically and not options.bytes_per_pack:
            return self._communicator.all_reduce_many(arrays, op.value)
        inputs = [ReduceInput(each, op.value) for each in arrays]
        call = f"all_reduce({op.value}, {options})"
        report = Report(call).of([each.array for each in inputs])
        agree(self._communicator, report, "all_reduce")
        return reduce_packed(inputs, by_bytes(inputs, options.bytes_per_pack), partial(way, op))

    def _automatically(self, op: ReduceOp, pack: NDArray[Any]) -> None:
        self._communicator.all_reduce(pack, op.value, out=pack)

    def _ring(self, op: ReduceOp, pack: NDArray[Any]) -> None:
        self._communicator.all_reduce(pack, op.value, out=pack, algorithm="ring")

    def _over_nccl(self, op: ReduceOp, pack: NDArray[Any]) -> None:
        assert self._nccl is not None
        self._nccl.all_reduce(self._communicator, pack, op.value)

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None) -> Any:
        """The ranks' arrays joined along the axis."""
        with self.deadline(options):
            chosen = self.options.merge(options).implementation
            rings = chosen is CommunicationImplementation.RING and not on_gpu(array)
            algorithm = "ring" if rings else None
            return self._communicator.all_gather(array, axis=axis, algorithm=algorithm)

    @contextmanager
    def deadline(self, options: CommunicationOptions | None) -> Iterator[None]:
        """The call's own deadline, if it has one."""
        if options is None or options.timeout_seconds is None:
            yield
            return
        before = self._communicator.deadline
        self._communicator.deadline = options.timeout_seconds or None
        try:
            yield
        finally:
            self._communicator.deadline = before

    def _way(self, options: CommunicationOptions) -> Callable[[ReduceOp, NDArray[Any]], None]:
        """How a pack is reduced in place. Collective the first time that NCCL is asked for."""
        if options.implementation is CommunicationImplementation.RING:
            return self._ring
        if options.implementation is CommunicationImplementation.AUTO:
            return self._automatically
        if not self._looked:
            found = find_nccl(self._communicator)
            self._looked = True
            if isinstance(found, OverNccl):
                self._nccl = found
            elif self._communicator.rank == 0:
                tell_fallback(found)
        return self._automatically if self._nccl is None else self._over_nccl


def agreed_options(
    communicator: Communicator, options: CommunicationOptions | None
) -> CommunicationOptions:
    """The options that all ranks give, NCCL being AUTO where any rank lacks it. Collective.

    Raises the same ValueError on every rank, with what each gave, where they differ or aren't
    `CommunicationOptions`.
    """
    given = CommunicationOptions() if options is None else options
    reports = communicator.all_gather_object((repr(given), _lacks(given)))
    texts = [text for text, _ in reports]
    if len(set(texts)) > 1 or not isinstance(given, CommunicationOptions):
        lines = [f"  rank {rank}: {text}" for rank, text in enumerate(texts)]
        text = "\n".join(["communication_options must be equal CommunicationOptions", *lines])
        raise raised_on_all(ValueError(text), communicator.rank)
    lacking = [(rank, problem) for rank, (_, problem) in enumerate(reports) if problem]
    if lacking:
        if communicator.rank == 0:
            tell_fallback("rank {}: {}".format(*lacking[0]))
        return CommunicationOptions(given.bytes_per_pack, given.timeout_seconds)
    if communicator.rank == 0:
        log.debug("communication: %r; AUTO goes the way that Communicator.explain tells", given)
    return given


def _lacks(options: Any) -> str | None:
    """Why this rank can't do what the options ask for."""
    implementation = getattr(options, "implementation", None)
    return nccl_problem() if implementation is CommunicationImplementation.NCCL else None


def tell_fallback(problem: str) -> None:
    """Say that NCCL is not used."""
    log.warning("CommunicationImplementation.NCCL: all ranks take AUTO instead. %s", problem)
