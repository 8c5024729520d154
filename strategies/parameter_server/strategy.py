"""ParameterServerStrategy: asynchronous training, variables on ranks of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from collectives import Communicator, RankFailedError
from collectives.lifecycle.shutdown import leave_at_exit, survive_deaths
from collectives.transports.local import alone
from strategies.base.membership import join_cluster
from strategies.base.strategy import Strategy
from strategies.cluster_resolver import ClusterResolver
from strategies.coordinator.worker import across_replicas, serve_chief
from strategies.core.indexed_slices import Gradient, copied
from strategies.core.options import ReduceOp, RunOptions
from strategies.core.same_error import PropagatedErrors, refuse_differences
from strategies.core.storage import Storage
from strategies.core.values import Array
from strategies.core.world import world_of
from strategies.input import InputContext, InputOptions
from strategies.parameter_server.placement import PartitionFunction
from strategies.parameter_server.references import open_link
from strategies.parameter_server.requests import Roles, checked_staleness, validate_roles
from strategies.parameter_server.server import Server
from strategies.parameter_server.storage import ServedStorage, ShardedVariable, SplitStorage
from strategies.parameter_server.worker import Worker
from strategies.replication.contexts import require_cross_replica
from strategies.variables.variable import Variable

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer


class ParameterServerStrategy(Strategy):
    """Variables lie on parameter servers; each worker trains on its own, at its own pace.

    As `tf.distribute.experimental.ParameterServerStrategy` of TensorFlow 1, started by mpirun. The
    cluster (`cluster_resolver`, else `TF_CONFIG`) has the jobs `ps`, `worker` and perhaps `chief`.
    Ranks of the job ps call `serve`. All others run one script, which creates its variables in one
    order: the chief's initial values count, the others wait until the chief has made theirs. What
    is read is pulled, what is assigned is pushed, and gradients are applied by the servers in the
    order of arrival; optimizers' slots lie there, too. `experimental_distribute_dataset` gives each
    worker all batches, whole; datasets that differ are made in `distribute_datasets_from_function`.
    A read never gives half of an update of a part, and sees all that its worker has pushed. Each
    worker is a sync group of one: `reduce`, `all_reduce` and the like are its own alone.

    variable_partitioner splits variables by rows (`MinSizePartitioner`, …). staleness: how many
    steps, that is calls of `apply_gradients`, a worker may be ahead of the slowest one (stale
    synchronous parallel, Ho et al., NIPS 2013); None: any number.

    Making one is collective. Raises the same ValueError on every rank where the clusters don't fit
    together, or have no ps or no worker; ValueError or TypeError for a wrong argument. Calls raise
    RankFailedError where a server has died, DeadlineExceededError where an answer takes too long.
    """

    aggregates = steps_together = variables_on_gpus = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: PartitionFunction | None = None,
        *,
        staleness: int | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        with PropagatedErrors(world_of(communicator), "ParameterServerStrategy"):
            self.staleness = checked_staleness(staleness, variable_partitioner)
        self.membership = join_cluster(communicator, cluster_resolver, validate_roles)
        self.roles = Roles.of(self.membership)
        world = self.membership.world
        what = "ParameterServerStrategy: the ranks' arguments differ"
        refuse_differences(world, what, f"staleness={self.staleness}")
        self._mailbox = world.mailbox()
        nodes = world.all_gather_object(world.node)
        self._server: Server | None = None
        self._worker: Worker | None = None
        self._serves_chief = self._evaluates = False
        self.link = open_link(self.membership, self.roles)
        """Between the chief, where the cluster has that job, and the workers that serve it."""
        survive_deaths(self._mailbox.all_alive)
        if world.rank in self.roles.servers:
            self._server = Server(self._mailbox, self.roles, self.staleness)
        elif world.rank in self.roles.workers:
            self._worker = Worker(self._mailbox, self.roles, world, nodes, variable_partitioner)
            leave_at_exit(self._worker.leave)
        super().__init__(
            Communicator(alone()),
            cluster_resolver=self.membership.resolver,
            is_chief=self.membership.place.is_chief,
        )
        self.trains_alone = self.membership.place.task.type == "evaluator"

    @property
    def _name(self) -> str:
        return self.roles.name(self.membership.world.rank)

    @property
    def worker(self) -> Worker:
        """This worker's end of the traffic with the servers; RuntimeError on other ranks."""
        if self._worker is None:
            raise RuntimeError(
                f"{self._name} is not a worker: it has no variables and runs no steps;"
                " a ps task calls `strategy.serve()` instead"
            )
        return self._worker

    @property
    def _keeps_its_own(self) -> bool:
        """Whether variables are this process's own: on an evaluator, and while it evaluates."""
        return self._evaluates or (self._server is None and self._worker is None)

    def serve(self) -> None:
        """As a parameter server: answer until every worker has called `shutdown`, left or died.

        As a worker, where the cluster has a chief: run what the chief's `ClusterCoordinator`
        schedules, until the chief calls `shutdown` or ends. Raises RuntimeError on a chief and on
        an evaluator, where there is no chief and where the worker has served it; on a worker
        RankFailedError where the chief died.
        """
        if self._server is None:
            self._serve_chief()
            return
        self._server.serve()
        # A dead worker needs no answer.
        with contextlib.suppress(RankFailedError):
            self._mailbox.flush()

    def _serve_chief(self) -> None:
        if self.link is None or self.link.is_chief or self._worker is None:
            raise RuntimeError(
                f"{self._name} can't serve: only tasks of the job ps do, and workers of a cluster"
                " that has a chief; others run the program"
            )
        if self._serves_chief:
            raise RuntimeError(f"{self._name} serves the chief already: `serve` is called once")
        self._serves_chief = True
        self.worker.stop_listening()
        serve_chief(self, self.link, self.worker.client.fence)
        self.shutdown()

    def shutdown(self) -> None:
        """As a worker: wait until all that was pushed is applied, and leave. The others go on.

        A chief first ends the service of its workers. Raises errors of the last pushes, and
        RuntimeError inside `run` and scheduled functions. On a server, and a second time, it does
        nothing. A worker that ends without it leaves, too.
        """
        require_cross_replica("ParameterServerStrategy.shutdown")
        if self.link is not None and self.link.is_chief:
            self.link.end()
        if self._worker is not None:
            self._worker.shutdown()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn(*args, **kwargs)` as this worker's only replica, and return its result.

        Raises as `Strategy.run`; RuntimeError on a server.
        """
        if self._server is not None:
            _ = self.worker
        with across_replicas(self):
            return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """As `Strategy.reduce`; scheduled functions may call it as well."""
        with across_replicas(self):
            return super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """As `Strategy.gather`; scheduled functions may call it as well."""
        with across_replicas(self):
            return super().gather(value, axis)

    def store(self, value: Array, what: str) -> Storage:
        """Where a variable is kept: on the servers. Not collective; the chief's value counts.

        Raises MismatchError where the chief's variable has another shape, dtype, name or rule.
        """
        if self._keeps_its_own:
            return super().store(value, what)
        return self.worker.store(value, what)

    def complete(self, variable: Variable) -> None:
        """A variable in parts is a `ShardedVariable`."""
        if isinstance(variable.storage, SplitStorage):
            variable.__class__ = ShardedVariable

    def colocate_with(self, variable: Variable) -> AbstractContextManager[None]:
        """Within it variables are put onto the server of this one (of its first part), unsplit."""
        if self._keeps_its_own:
            return super().colocate_with(variable)
        return self.worker.colocate_with(variable.storage)

    def apply_gradients(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """Push the gradients; the servers apply them. With `staleness` it waits for the slowest."""
        # All of a step's gradients, before servers and this worker part them.
        clipped = optimizer.clipped(gradients)
        pairs = list(zip(clipped, (each.storage for each in variables), strict=True))
        served = [(grad, value) for grad, value in pairs if isinstance(value, ServedStorage)]
        own = [(grad, value) for grad, value in pairs if not isinstance(value, ServedStorage)]
        if served:
            self.worker.push_gradients(optimizer, served)
        if own:
            # ON_READ variables: each worker has its own.
            gradients = copied(grad for grad, _ in own)
            optimizer.update_clipped(gradients, [value for _, value in own])
        else:
            optimizer.iterations += 1
        if self.staleness is not None and not self._keeps_its_own:
            self.worker.client.end_step()

    def distribute(self, model: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
        """Train a torch module on this worker, with its parameters on the servers.

        All workers call it for the same models in one order; the chief's values count. Each
        `optimizer.step()` pushes what it has added to the parameters, and pulls the sums of all
        workers' steps. Raises as `Strategy.distribute`; TypeError for its options, and where the
        cluster has a job chief; RuntimeError on a server.
        """
        require_cross_replica("ParameterServerStrategy.distribute", self)
        worker, counts = self.worker, self.staleness is not None
        if options or self.link is not None:
            what = f"takes no {', '.join(options)}" if options else "needs a cluster without chief"
            raise TypeError(f"ParameterServerStrategy.distribute {what}")
        from strategies.parameter_server import torch_models

        torch_models.distribute(self, worker, model, optimizer, counts=counts)
        return model, optimizer

    def settle(self) -> None:
        """As the chief: take the servers' values of torch parameters."""
        if not (self._keeps_its_own or self.worker.has_left):
            self.worker.settle()

    def restored(self, parameters: Iterable[Any]) -> None:
        """Make the chief's values count; the other workers take the servers'."""
        if not (self._keeps_its_own or self.worker.has_left):
            self.worker.restored(parameters)

    def chief_first(self, action: Callable[[], Any], what: str = "") -> Any:
        """What the chief gets from the action, on every worker that calls this; small, picklable.

        The chief alone acts, without waiting for the others; they wait for it. Workers call it in
        the same order. What the action raises is raised on all of them. A worker whose `what` is
        another than the chief's raises MismatchError. An evaluator acts alone.
        """
        if self._keeps_its_own:
            return action()
        return self.worker.chief_first(action, what)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within it a worker acts as an evaluator does: its variables are its own.

        The other workers train on, or evaluate another checkpoint: what lies on the servers can be
        neither read nor changed (RuntimeError).
        """
        before, self._evaluates = self._evaluates, True
        try:
            with contextlib.nullcontext() if self._worker is None else self._worker.apart():
                yield
        finally:
            self._evaluates = before

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """The dataset that `dataset_fn` makes of an InputContext with this worker's number.

        As in TensorFlow 1 each worker has a pipeline; workers of a chief and evaluations have one.
        """
        own = self.input_context
        return super().distribute_datasets_from_function(lambda _: dataset_fn(own), options)

    @property
    def input_context(self) -> InputContext:
        """That of this rank's dataset."""
        if self._serves_chief or self._keeps_its_own:
            return InputContext()
        workers = self.roles.workers
        return InputContext(len(workers), workers.index(self.membership.world.rank), 1)

    def __repr__(self) -> str:
        workers, servers = len(self.roles.workers), len(self.roles.servers)
        return f"<{type(self).__name__} {self._name} of {workers} workers and {servers} ps>"
