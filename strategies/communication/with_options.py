"""Collectives with `CommunicationOptions`."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import finalize

from collectives import Communicator
from collectives.calls.reductions import ReduceInput
from collectives.compression import CompressedReducer
from collectives.consistency.uncaught import raised_on_all
from collectives.cuda.runtime import on_gpu
from strategies.communication.over_nccl import OverNccl, find_nccl
from strategies.communication.packing import by_bytes, reduce_apart, reduce_packed
from strategies.core.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from strategies.core.reports import Report, agree
from strategies.core.same_error import by_rank, refuse_differences
from strategies.core.values import Array
from strategies.core.world import nccl_problem

log = logging.getLogger("strategies")


class CollectivesWithOptions:
    """A strategy's collectives on its communicator, with its options and those of single calls."""

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self._communicator, self.options = communicator, options
        self._compression = options.compression
        self._compressed: CompressedReducer | None = None
        self._named: set[Hashable] = set()
        self._nccl: OverNccl | str | None = None
        """None before it is looked for; a text where the ranks have none."""

    def all_reduce(
        self, arrays: Sequence[Any], op: ReduceOp, options: CommunicationOptions | None
    ) -> list[Any]:
        """The arrays, folded over the ranks. Raises a MismatchError where the ranks differ.

        Those on GPUs stay there, and are reduced as the communicator does it.
        """
        by_options = partial(self._all_reduce_hosts, op, self.options.merge(options))
        with self.deadline(options):
            return reduce_apart(self._communicator, arrays, op.value, by_options)

    @property
    def compressed(self) -> CompressedReducer:
        """What compresses by the options. Its first use is collective."""
        assert self._compression is not None
        if self._compressed is None:
            self._compressed = CompressedReducer(self._communicator, self._compression)
        return self._compressed

    def compressed_sums(
        self, gradients: Sequence[Array], of: Hashable, owners: Sequence[Any]
    ) -> list[Array]:
        """The sums; `of` names the gradients, as long as all owners live. Collective."""
        compressed = self.compressed
        if of not in self._named:
            self._named.add(of)
            for each in owners:
                finalize(each, self._forget, compressed, of).atexit = False
        return compressed.all_reduce_many(gradients, "sum", of=of)

    def _forget(self, compressed: CompressedReducer, of: Hashable) -> None:
        self._named.discard(of)
        compressed.forget(of)

    def _all_reduce_hosts(
        self, op: ReduceOp, options: CommunicationOptions, arrays: Sequence[Any]
    ) -> list[Any]:
        chosen = self._available(options.implementation)
        if chosen is CommunicationImplementation.AUTO and not options.bytes_per_pack:
            return self._communicator.all_reduce_many(arrays, op.value)
        inputs = [ReduceInput(each, op.value) for each in arrays]
        call = f"all_reduce({op.value}, {options})"
        report = Report(call).of([each.array for each in inputs])
        agree(self._communicator, report, "all_reduce")
        algorithm = "ring" if chosen is CommunicationImplementation.RING else None

        def all_reduce(pack: Array) -> None:
            if chosen is CommunicationImplementation.NCCL:
                assert isinstance(self._nccl, OverNccl)
                self._nccl.all_reduce(self._communicator, pack, op.value)
            else:
                self._communicator.all_reduce(pack, op.value, out=pack, algorithm=algorithm)

        return reduce_packed(inputs, by_bytes(inputs, options.bytes_per_pack), all_reduce)

    def all_gather(self, array: Any, axis: int, options: CommunicationOptions | None) -> Any:
        """The ranks' arrays joined along the axis."""
        with self.deadline(options):
            chosen = self.options.merge(options).implementation
            rings = chosen is CommunicationImplementation.RING and not on_gpu(array)
            algorithm = "ring" if rings else None
            return self._communicator.all_gather(array, axis=axis, algorithm=algorithm)

    def deadline(self, options: CommunicationOptions | None) -> AbstractContextManager[None]:
        """A context with the call's own deadline, if it has one."""
        if options is None or options.timeout_seconds is None:
            return nullcontext()
        return self._waiting(options.timeout_seconds or None)

    @contextmanager
    def _waiting(self, seconds: float | None) -> Iterator[None]:
        before = self._communicator.deadline
        self._communicator.deadline = seconds
        try:
            yield
        finally:
            self._communicator.deadline = before

    def _available(self, chosen: CommunicationImplementation) -> CommunicationImplementation:
        """The implementation, AUTO for NCCL without it. Collective at the first use of NCCL."""
        if chosen is not CommunicationImplementation.NCCL:
            return chosen
        if self._nccl is None:
            self._nccl = find_nccl(self._communicator)
            if isinstance(self._nccl, str) and self._communicator.rank == 0:
                warn_fallback(self._nccl)
        return chosen if isinstance(self._nccl, OverNccl) else CommunicationImplementation.AUTO


def agreed_options(
    communicator: Communicator, options: CommunicationOptions | None
) -> CommunicationOptions:
    """The options that all ranks give, with AUTO for NCCL where any rank lacks it. Collective.

    Raises the same ValueError on every rank where they differ or aren't `CommunicationOptions`.
    """
    given = CommunicationOptions() if options is None else options
    what = "communication_options must be CommunicationOptions, equal on all ranks"
    refuse_differences(communicator, what, repr(given))
    if not isinstance(given, CommunicationOptions):
        text = by_rank(what, [repr(given)] * communicator.size)
        raise raised_on_all(ValueError(text), communicator.rank)
    first = communicator.rank == 0
    if given.implementation is CommunicationImplementation.NCCL:
        for rank, problem in enumerate(communicator.all_gather_object(nccl_problem())):
            if problem:
                if first:
                    warn_fallback(f"rank {rank}: {problem}")
                return replace(given, implementation=CommunicationImplementation.AUTO)
    if first:
        log.debug("communication: %r; for AUTO see Communicator.explain", given)
    return given


def warn_fallback(problem: str) -> None:
    """Log that NCCL is not used."""
    log.warning("CommunicationImplementation.NCCL: all ranks take AUTO instead. %s", problem)
