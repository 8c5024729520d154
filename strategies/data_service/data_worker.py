"""A rank that makes the batches for those that train: job `data` in the cluster.

TensorFlow has no such strategy (its tf.data service is a separate program); requested in TensorFlow
issue 27728.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from collectives import Communicator
from strategies.base.membership import Membership
from strategies.base.strategy import Strategy
from strategies.cluster.spec import ClusterSpec
from strategies.cluster_resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
)
from strategies.core.same_error import PropagatedErrors, refuse_differences
from strategies.core.values import whole_number
from strategies.core.world import world_of
from strategies.data_service.client import DatasetClient
from strategies.data_service.server import DatasetServer
from strategies.input import DistributedDataset, InputContext
from strategies.input.batches import digest_of
from strategies.input.distributed import GlobalDigest
from strategies.input.sources import InOneOrder, check_iterable, draw_seed, iterate

MakeDataset = Callable[[InputContext], Iterable[Any]]

_DIFFERENT_BATCHES = (
    "DatasetWorker without a data task: each rank takes its share of the batches, but the ranks'"
    " first batches differ. If their order differs, examples are lost or repeated: shuffle with the"
    " same seed on every rank, or start a data task"
)


class DatasetWorker:
    """A dataset that the tasks of job `data` iterate, and the training ranks get batches of.

    One script serves all ranks: those where `serves` is true call `serve`, the others iterate. Each
    data task iterates its own dataset once per epoch and sends whole batches to the training ranks
    (chief and workers) in the order of their requests: a slow rank gets fewer. Every batch is
    delivered exactly once, unless a rank leaves its loop or dies. Each `for` loop of a training
    rank is an epoch.

    A batch is a nest; its NumPy arrays arrive as such, in C order, its torch tensors on the CPU as
    tensors, and everything else by pickle.

    If a rank breaks out of its loop, the batches that were sent to it, and that it has not taken,
    go to the other ranks, unless the data task has read its dataset to the end. Batches that were
    sent to a rank before it died are lost.

    Without a data task no rank serves: each of the W training ranks iterates the dataset by itself
    and takes every W-th batch of it, so that a program on one rank simply iterates it. Shuffles
    of strategies.input and of a DataLoader without a generator have one seed on all ranks then,
    drawn by torch where it is imported; other shuffles must have an equal one. Where `agreed`, a
    warning is logged if the ranks' first batches differ.
    """

    def __init__(
        self,
        strategy: Any,
        make_dataset: MakeDataset,
        *,
        credits: int = 2,
        agreed: bool = True,
    ) -> None:
        """Collective: every rank of the program makes it, evaluators too.

        `strategy` is one of `strategies` or of `strategies.tensorflow`, with the cluster's tasks.
        `make_dataset` is called where batches are made, with an `InputContext` of the data tasks:
        `input_pipeline_id` is this one's number. It returns an iterable that can be iterated anew
        for each epoch. A training rank holds at most `credits` batches of each data task, fetched
        ahead. `agreed` is for synchronous training: the training ranks agree on the end at every
        step, and a rank without data gets empty batches until all have ended, so that batches are
        nests of arrays with an axis 0, alike but for lengths; without it every rank ends by itself
        (evaluation, asynchronous training), or, under LocalSGDStrategy, takes part in the others'
        averagings until all have ended. Raises TypeError or ValueError for wrong arguments.
        """
        strategy = getattr(strategy, "array_strategy", strategy)
        if not isinstance(strategy, Strategy):
            kind = type(strategy).__name__
            raise TypeError(
                f"strategy is a {kind}: must be one of strategies or strategies.tensorflow"
            )
        membership: Membership | None = getattr(strategy, "membership", None)
        if membership is not None and not membership.ranks_of("data"):
            membership = None
        ranks = membership.world if membership else strategy.communicator
        divided = membership is None and ranks.size > 1
        with PropagatedErrors(ranks, "DatasetWorker"):
            if not callable(make_dataset):
                kind = type(make_dataset).__name__
                raise TypeError(f"make_dataset is a {kind}: must be a function of an InputContext")
            credits = whole_number("credits", credits, 1)
            seed = _drawn_seed() if divided else 0
        # As a waiting call, too: of ranks that never come.
        what = "DatasetWorker, whose arguments must be alike"
        refuse_differences(ranks, what, f"agreed={agreed}")
        self._seed = ranks.all_gather_object(seed)[0] if divided else None
        if membership is None and _is_one_of_several_workers(strategy):
            # Drawn on every worker, of which torch's generators stay equal.
            own = _drawn_seed()
            self._seed = strategy.chief_first(lambda: own, "DatasetWorker")
        self._digest = ""
        self._make, self._agreed = make_dataset, agreed
        self._made: Iterable[Any] | None = None
        self._servers: list[int] = []
        self._ranks, self._in_sync = strategy.communicator, strategy.num_replicas_in_sync
        self._strategy = strategy
        self._loop: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._joint = False
        if membership is not None:
            # First, as all ranks of the program make it: errors above are raised on all of them.
            self._join(membership, credits)
        digest = GlobalDigest(lambda: self._digest, _DIFFERENT_BATCHES)
        self._together = DistributedDataset(strategy.communicator, self._next_epoch, digest)

    def _join(self, membership: Membership, credits: int) -> None:
        self._training = training = membership.ranks_of("chief", "worker")
        self._servers = membership.ranks_of("data")
        if not training:
            raise ValueError("the cluster has tasks of job 'data', but neither chief nor worker")
        self._ranks = membership.world
        # A data task's own strategy counts the data tasks.
        self._in_sync = len(training) if self._strategy.steps_together else 1
        self._box = membership.world.mailbox()
        self._server = DatasetServer(self._box, training, self._dataset)
        self._client = DatasetClient(self._box, self._servers, credits)

    @staticmethod
    def resolver(data_tasks: int = 1, communicator: Communicator | None = None) -> ClusterResolver:
        """The cluster of `TF_CONFIG`, or one whose last ranks are data tasks. Collective.

        Without TF_CONFIG the first ranks of the communicator (default: the world) are workers. A
        world of one rank has a worker alone. Raises ValueError where no rank is left to train.
        """
        if os.environ.get("TF_CONFIG"):
            return TFConfigClusterResolver()
        world = world_of(communicator)
        with PropagatedErrors(world, "DatasetWorker.resolver"):
            if data_tasks < 1 or data_tasks >= max(world.size, 2):
                allowed = (
                    f"from 1 to {max(world.size - 1, 1)}, so that one of {world.size} ranks trains"
                )
                raise ValueError(f"data_tasks={data_tasks!r}: must be {allowed}")
        hosts = world.all_gather_object(socket.gethostname())
        addresses = [f"{host}:{rank}" for rank, host in enumerate(hosts)]
        workers = max(world.size - data_tasks, 1)
        jobs = {"worker": addresses[:workers], "data": addresses[workers:]}
        cluster = ClusterSpec({job: tasks for job, tasks in jobs.items() if tasks})
        job, first = ("worker", 0) if world.rank < workers else ("data", workers)
        return SimpleClusterResolver(cluster, task_type=job, task_id=world.rank - first)

    @property
    def serves(self) -> bool:
        """Whether this rank is a data task: it calls `serve`, and doesn't iterate."""
        return self._ranks.rank in self._servers

    def serve(self, epochs: int | None = None) -> int:
        """Send batches for so many epochs, or until all training ranks have closed or ended.

        Returns the number of epochs that were sent. The dataset is iterated once per epoch, from
        the first request for a batch of it on. What it raises is raised here, and as a DatasetError
        that names this rank on every training rank. Raises RuntimeError on a rank that isn't a data
        task.
        """
        if not self.serves:
            raise RuntimeError(f"rank {self._ranks.rank} isn't a data task: it iterates")
        if epochs is not None:
            epochs = whole_number("epochs", epochs, 0)
        return self._server.deal(epochs, self._ranks.deadline)

    def _dataset(self) -> Iterable[Any]:
        if self._made is None:
            pipeline = self._servers.index(self._ranks.rank) if self._servers else 0
            context = InputContext(max(1, len(self._servers)), pipeline, self._in_sync)
            made = self._make(context)
            check_iterable(made)
            self._made = made if self._seed is None else InOneOrder(made, self._seed)
        return self._made

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch. Collective between the training ranks if agreed.

        Raises DatasetError where a data task's dataset raised or has dealt all its epochs,
        RankFailedError where a data task has ended, DeadlineExceededError where no batch arrives
        within the communicator's deadline; if agreed, and this rank alone saw that, the others
        raise DatasetError at the same step. Under LocalSGDStrategy, if not agreed, the others raise
        DatasetError after their next averaging where this rank's dataset raised.
        """
        if self.serves:
            raise RuntimeError(f"rank {self._ranks.rank} is a data task: it calls serve()")
        if self._servers and self._ranks.rank not in self._training:
            raise RuntimeError(f"rank {self._ranks.rank} doesn't train: it gets no batches")
        if self._agreed:
            return iter(self._together)
        if self._joint:
            self._end_loop()
        epoch = self._next_epoch()
        batches = self._strategy.loop_over(epoch)
        # What no other rank waits for raises by itself where a later iteration has begun.
        self._joint = batches is not epoch
        # No more than a weak reference: a loop that is left by `break` lets its batches go.
        self._loop = weakref.ref(batches)
        return batches

    def _next_epoch(self) -> Generator[Any, None, None]:
        return self._client.next_epoch() if self._servers else self._own_batches()

    def _own_batches(self) -> Generator[Any, None, None]:
        context = getattr(self._strategy, "input_context", None)  # of parameter servers
        place = self._ranks.rank, self._ranks.size
        if context is not None:
            place = context.input_pipeline_id, context.num_input_pipelines
        for number, batch in enumerate(iterate(self._dataset())):
            if number == 0 and self._agreed and place[1] > 1:
                self._digest = digest_of(batch)
            if number % place[1] == place[0]:
                yield batch

    def close(self) -> None:
        """Take no more batches; the data task goes on without this rank. Again, it does nothing.

        It waits for no other rank, so that ranks may close in any order, or serve meanwhile as a
        parameter server does; only under LocalSGDStrategy, after a loop that this rank has left by
        `break`, until the other training ranks have left theirs. A rank that ends without it has
        closed thereby.
        """
        self._end_loop()
        self._strategy.leave_loops()
        self._take_no_more()

    def _end_loop(self) -> None:
        loop = self._loop()
        if loop is not None:
            loop.close()

    def _take_no_more(self) -> None:
        if self._servers:
            # What is on its way is thrown away when the communicator closes.
            self._box.tell_end()

    def __enter__(self) -> DatasetWorker:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # What has failed here may keep this rank from doing what others wait for.
        (self.close if error is None else self._take_no_more)()


def _drawn_seed() -> int:
    return draw_seed(by_torch=sys.modules.get("torch") is not None)


def _is_one_of_several_workers(strategy: Any) -> bool:
    """Whether this rank is one of the workers of parameter servers that divide the data."""
    roles = getattr(strategy, "roles", None)
    if roles is None or strategy.membership.world.rank not in roles.workers:
        return False
    return bool(strategy.input_context.num_input_pipelines > 1)
