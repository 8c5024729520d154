"""ClusterCoordinator: a chief that schedules functions on workers, without waiting for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

from strategies.base.strategy import Strategy
from strategies.coordinator.closure_queue import Closure, ClosureQueue
from strategies.coordinator.dispatcher import Dispatcher
from strategies.coordinator.link import Link, NewDataset
from strategies.coordinator.packing import Packed, pack_copy, unpack
from strategies.coordinator.values import PerWorkerDataset, RemoteValue
from strategies.core import nest


class ClusterCoordinator:
    """Schedules functions on the workers of a `ParameterServerStrategy`. For the chief alone.

    As `tf.distribute.coordinator.ClusterCoordinator`; the workers and parameter servers meanwhile
    are in `strategy.serve()`. A strategy has one coordinator: making a second gives the same one.
    It ends with `strategy.shutdown()`, or with the program.

    A worker that dies is left aside: what it ran is run anew by another one, so that a function may
    run more than once. Where no worker is left, or a parameter server has died, `schedule`, `join`
    and `done` raise RankFailedError from then on: the program is to be started anew from its last
    checkpoint.

    Raises ValueError for another strategy, for one whose cluster has no chief or no worker, and for
    one with a staleness, which counts the steps of workers that take them on their own;
    RuntimeError on a rank that is not the chief, and after `strategy.shutdown()`.
    """

    def __new__(cls, strategy: Strategy) -> ClusterCoordinator:
        """The strategy's coordinator, which is made where it has none."""
        link = _link_of(strategy)
        if link.ended:
            raise RuntimeError("the chief has called shutdown: make the coordinator before it")
        if link.coordinator is None:
            coordinator = link.coordinator = super().__new__(cls)
            coordinator._begin(strategy, link)
        return cast("ClusterCoordinator", link.coordinator)

    _dispatcher: Dispatcher

    def _begin(self, strategy: Strategy, link: Link) -> None:
        self._strategy = strategy
        self._references = link.make_references(
            strategy, notify_workers=lambda *what: self._dispatcher.notify_all(*what)
        )
        self._queue = ClosureQueue()
        self._dispatcher = Dispatcher(self._queue, link, self._unpacked)
        self._datasets = itertools.count()
        # Reentrant: what is copied may be a program's object, whose copying schedules.
        self._naming = threading.RLock()

    @property
    def strategy(self) -> Strategy:
        """The strategy whose workers it schedules functions on."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule `fn(*args, **kwargs)` on some worker; return at once, unless 262,144 are queued.

        The function and all that it refers to are copied as they are now, by `cloudpickle`: large
        data belong into a dataset. Variables of the strategy, the strategy itself and per-worker
        iterators stand for the worker's own. On the worker the function sees the contexts that
        `strategy.run` gives, and may call `strategy.run` itself. TensorFlow demands a `tf.function`
        here.

        Raises what a function scheduled before has raised, once: what was queued with it is
        cancelled then, and nothing runs. Raises TypeError where the function can't be called or
        something can't be copied, ValueError for a `RemoteValue` among the arguments and for args
        that are neither a tuple nor a list.
        """
        if not callable(fn):
            raise TypeError(f"fn={fn!r}: must be a function, or something else that can be called")
        if args is not None and not isinstance(args, list | tuple):
            raise ValueError(f"args={args!r}: must be a tuple or list of positional arguments")
        closure = Closure(self._packed((fn, tuple(args or ()), dict(kwargs or {}))))
        self._references.apply_uses()
        self._queue.put(closure)
        self._dispatcher.dispatch()
        return closure.result

    def join(self) -> None:
        """Wait until all that is scheduled has run.

        Raises what one of the functions has raised, once; the others are run or cancelled then.
        When it returns or raises, nothing is running.
        """
        try:
            self._queue.join()
        finally:
            self._references.apply_uses()

    def done(self) -> bool:
        """Whether all that is scheduled has run. Raises as `join`, then too when nothing runs."""
        done = self._queue.done()
        self._references.apply_uses()
        return done

    def fetch(self, val: Any) -> Any:
        """A nest with its RemoteValues replaced by what their functions return; waits for them."""
        return nest.map_leaves(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """A dataset for each worker: what `dataset_fn()` gives there, called once, when needed.

        A dataset itself, which is copied to the workers, will do as well. All workers get the same
        InputContext (one pipeline, number 0, one replica), so that none gets a part: a dataset is
        best shuffled, each worker its own way, and repeated without end. Raises TypeError for what
        can't be copied.
        """
        number = next(self._datasets)
        self._dispatcher.notify_all(NewDataset(number), self._packed(dataset_fn))
        return PerWorkerDataset(number)

    def end(self) -> None:
        """End the workers' service; cancel what is queued or still runs: call `join` before."""
        self._dispatcher.end()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ClusterCoordinator belongs to the chief: let no function refer to it")

    def _packed(self, thing: Any) -> Packed:
        try:
            # What is named for the first time gets a number, and is sent to the workers.
            with self._naming:
                return pack_copy(thing, self._references)
        except ValueError:  # a RemoteValue
            raise
        except Exception as error:
            raise TypeError(f"{thing!r} can't be sent to a worker: {error}") from error

    def _unpacked(self, uses: Any, arrays: Packed) -> Any:
        self._references.add_uses(uses)
        return unpack(arrays, self._references)


def _link_of(strategy: Strategy) -> Link:
    """The strategy's connection with its workers, on the chief."""
    link: Link | None = getattr(strategy, "link", None)
    if link is None or not link.workers:
        raise ValueError(
            f"strategy={strategy!r}: must be a ParameterServerStrategy whose cluster has the jobs"
            ' "chief" and "worker"'
        )
    if not link.is_chief:
        raise RuntimeError(
            f"ClusterCoordinator must be made by the chief, rank {link.chief}; this is rank"
            f" {link.box.rank}, which calls strategy.serve()"
        )
    staleness = getattr(strategy, "staleness", None)
    if staleness is not None:
        # Workers would wait for the chief, which takes no steps, and for those without a function.
        raise ValueError(
            f"strategy has staleness={staleness}: must be None where a ClusterCoordinator chooses"
            " which worker takes a step"
        )
    return link
