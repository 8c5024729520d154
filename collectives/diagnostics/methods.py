"""What a communicator reports of its calls, and how it measures the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from collectives.calls import allocation
from collectives.consistency.signature import check_index
from collectives.diagnostics import tuning
from collectives.diagnostics.explain import explain
from collectives.diagnostics.trace import trace
from collectives.execution.engine import Engine
from collectives.schedules.spec import spec_of


class Diagnostics:
    """The part of a communicator that does so."""

    _engine: Engine
    _duplicate: Any
    _run: Callable[..., Any]
    _check_open: Callable[[], None]
    _forget: Callable[..., Any]

    def explain(self, collective: str, nbytes: int, dtype: Any = "float32") -> str:
        """Describe which path a call would take, and why. Not collective.

        The call is a SUM, or a movement, of ordinary arrays of `dtype`; `nbytes` is the size of the
        whole buffer in bytes, as in `estimate`. Returns a text: the path, and the measured time of
        each path, or the expected time of each candidate and the source of the cost parameters
        (built in, `tune`, or a file), in µs. Raises ValueError for an unknown collective or a
        negative `nbytes`, TypeError for a dtype without a sum.
        """
        self._check_open()
        nbytes = check_index("nbytes", nbytes, 1 << 62)
        return explain(self._engine, spec_of(collective).name, nbytes, allocation.dtype_of(dtype))

    def tune(self, *, save: bool = True) -> str:
        """Measure the parameters of the cost model, and use them from now on. Collective.

        It times the ring, recursive doubling, MPI's own all_reduce and the node's memory for one to
        a few seconds, during which the machine should be idle. With one rank, or more than 512, it
        measures nothing. All ranks end with the same parameters. `save` writes them to a file of
        the user's cache folder (COLLECTIVES_CACHE, or mpi-collectives in XDG_CACHE_HOME or
        ~/.cache) for communicators on the same host, MPI and layout; a failure is logged. Returns a
        readable report.
        """
        report: str = self._run(tuning.tune(save=save).then(self._forget))
        return report

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 256 calls of every rank, on one clock, to a file on rank 0. Collective.

        It is JSON for chrome://tracing or ui.perfetto.dev: a process for each rank, a thread each
        for blocking and asynchronous calls. OSError on every rank if it can't be written.
        """
        self._run(trace(path, self._duplicate.entries()))
