"""A worker's side: it runs what the chief sends, one function after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import cloudpickle

from collectives.errors import RankFailedError
from collectives.messaging.remote_error import Failure, describe
from collectives.messaging.rpc import POLL_SECONDS, Call, Endpoint
from strategies.base.strategy import Strategy
from strategies.coordinator.link import End, Keep, Link, NewDataset, Run
from strategies.coordinator.packing import References, pack, unpack
from strategies.coordinator.values import WorkerDatasets
from strategies.errors import OutOfRangeError
from strategies.replication import contexts

CallFunction = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class ScheduledContext(contexts.ReplicaContext):
    """The replica context of a scheduled function.

    As in TensorFlow, such a function may call `strategy.run` and `strategy.reduce` itself, as in
    cross-replica context: its own replica is the only one.
    """


def across_replicas(strategy: Strategy) -> AbstractContextManager[None]:
    """Cross-replica context directly inside a scheduled function; no change elsewhere."""
    if isinstance(contexts.get_replica_context(), ScheduledContext):
        return contexts.entered(strategy, None)
    return nullcontext()


def serve_chief(strategy: Strategy, link: Link, settle: Callable[[], None]) -> None:
    """Run what the chief schedules, until it ends. For a worker's `strategy.serve()`.

    `settle` returns once all that a function has pushed is applied: only then has it run. Raises
    RankFailedError where the chief has died.
    """

    def call(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return references.call(ScheduledContext(strategy), fn, args, kwargs)
        finally:
            settle()

    datasets = WorkerDatasets(lambda arrays: unpack(arrays, references))
    references = link.make_references(strategy, datasets=datasets)
    Worker(link, call, references, datasets).serve()


class Worker:
    """Serves the chief until that sends `End`. `call` calls a function in its contexts."""

    def __init__(
        self,
        link: Link,
        call: CallFunction,
        references: References,
        datasets: WorkerDatasets,
    ) -> None:
        self._chief, self._name = link.chief, link.workers[link.box.rank]
        self._endpoint = Endpoint(link.box, self._handle, lambda rank: f"the chief, rank {rank},")
        self._call, self._references, self._datasets = call, references, datasets
        self._ended = False

    def serve(self) -> None:
        """Return after `End`. Raises RankFailedError where the chief has died."""
        while not self._ended:
            if not self._endpoint.step(POLL_SECONDS) and not self._endpoint.alive(self._chief):
                raise RankFailedError(self._endpoint.absence(self._chief))

    def _handle(self, call: Call) -> None:
        body = call.body
        if isinstance(body, Run):
            self._run(call)
        elif isinstance(body, NewDataset):
            self._datasets.add(body.number, call.arrays)
        elif isinstance(body, Keep):
            self._keep(body.name, call)
        elif isinstance(body, End):
            self._ended = True

    def _keep(self, name: Any, call: Call) -> None:
        try:
            thing = unpack(call.arrays, self._references)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as of `_run`
            self._references.keep_error(name, error)
        else:
            self._references.keep(name, thing)

    def _run(self, call: Call) -> None:
        try:
            fn, args, kwargs = unpack(call.arrays, self._references)
            result = pack(self._call(fn, args, kwargs), self._references)
            uses = self._references.uses()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit too: the next worker would end as well
            self._endpoint.fail(call, describe_failure(error, self._name))
            return
        sent = self._endpoint.answer(call, uses, result)
        if sent is not None:
            # The next function may change arrays that this one has returned. A chief that has
            # ended in good order has sent `End`.
            with suppress(RankFailedError):
                sent.wait()


def describe_failure(error: BaseException, place: str) -> Failure:
    """A function's exception, with classes of `__main__`; the end of an iterator has its own class.

    Python itself handles a StopIteration that passes a generator.
    """
    if isinstance(error, StopIteration):
        ended = OutOfRangeError("an iterator ended inside a scheduled function")
        error = ended.with_traceback(error.__traceback__)
    return describe(error, place, cloudpickle.dumps)
