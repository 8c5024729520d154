"""LocalSGDStrategy: ranks train independently, and average their parameters periodically.

Local SGD (Stich 2019, arXiv:1805.09767); with an outer optimizer DiLoCo (Douillard et al. 2023,
arXiv:2311.08105). `tf.distribute` has no such strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

from collectives import Communicator
from collectives.scope import named_scope
from strategies.base.membership import join_cluster
from strategies.base.strategy import Strategy
from strategies.cluster.tf_config import validate_for_collective_training
from strategies.cluster_resolver import ClusterResolver
from strategies.core.indexed_slices import Gradient, copied
from strategies.core.same_error import PropagatedErrors
from strategies.core.storage import Storage
from strategies.core.values import Array
from strategies.input import InputContext, InputOptions
from strategies.input.rebatching import join_batches
from strategies.optimizers import Optimizer
from strategies.replication.contexts import require_cross_replica
from strategies.synchronous.local_sgd.averaging import Averaging, RankStates, ReplicaStorage
from strategies.synchronous.local_sgd.loops import Loops, Part, Reason, without_left
from strategies.synchronous.local_sgd.modules import AveragedModules
from strategies.synchronous.local_sgd.replaced import AveragedArrays
from strategies.synchronous.local_sgd.rounds import agreed_rounds
from strategies.variables.variable import Variable

_TEXTS = {
    Reason.ROUND_ENDS: "the end of a round",
    Reason.SYNCHRONIZE: "synchronize",
    Reason.SAVE: "Checkpoint.save",
}
_SCALER = (
    "; the ranks took unequal numbers of steps, as after an exception on one of them. A GradScaler"
    " skips optimizer.step() on a rank alone whose gradients overflow, unless the optimizer has"
    " fused=True"
)


class LocalSGDStrategy(Strategy):
    """Independent training, in which parameters are averaged every N steps or T seconds.

    A step is one `apply_gradients`, one step of a torch optimizer (`distribute`), or one value that
    is assigned to a `strategies.jax.PytreeState`: it applies the replica's own gradients, which are
    not summed, with slots of its own. After `sync_every` steps
    all variables that an optimizer changed since are averaged over the ranks, in few messages. With
    `sync_seconds` the ranks agree at each averaging on the number of steps until the next: as many
    as the slowest one takes in that time, but at most twice as many as before; the first comes
    after one step. With `outer_optimizer` (DiLoCo's is `SGD(0.7, momentum=0.9, nesterov=True)`) the
    last agreed value minus the mean is a gradient, by which it moves the last agreed value, with
    the same bits on all ranks.

    Each replica is in sync with itself alone: `num_replicas_in_sync` is 1, so that a loss that is
    divided by `batch size × num_replicas_in_sync` is the mean over the replica's own batch, and
    `replica_id_in_sync_group` is 0: use `communicator.rank` or `InputContext` to number the ranks.
    A distributed dataset's batches are for one replica each: W of them are joined and distributed
    over the W ranks in each step, the last ones of an epoch in equal parts. All ranks reach its end
    at the same step, as under every strategy. A loop over a `DatasetWorker` with `agreed=False` is
    independent: a rank may receive any number of batches. A rank whose batches have ended takes
    part in the other ranks' averagings until all have ended; it counts in an averaging only if it
    has taken steps since the last one. After the last rank's end the ranks average once more, and
    leave the loop with equal values. A rank that left the loop by `break` takes part at its next
    call on `communicator`, or on the communicator that this one was made from, or at the end of its
    program. If the program keeps the loop's iterator, and synchronizes or saves while other ranks
    end a round, the iterator's next batch raises RuntimeError. Within the loop all ranks must make
    the same collective calls; a rank whose batches have ended can't make them
    (CollectiveMismatchError on every rank). Any other difference in the number of steps makes the
    averaging fail with a MismatchError or DeadlineExceededError.

    Read outside of `run`, a variable has this rank's own value: call `synchronize` at the end of
    training. `reduce` and `gather` are over all ranks. Assignments by or for all replicas change
    every replica's value and the last agreed value alike. `Checkpoint.save` averages first, as
    `synchronize` does, where any replica has taken steps since the last averaging; an optimizer's
    slots are the chief's. Name `outer_optimizer` in the checkpoint as well. A restored value is an
    agreed value, and the round continues.

    Raises ValueError unless one of `sync_every` (an integer from 1) and `sync_seconds` (above 0)
    is given, and on every rank where ranks give different ones; TypeError for an outer optimizer
    that is none. The cluster is found as by MultiWorkerMirroredStrategy. Making one is collective.
    """

    steps_together = False
    """A replica whose step fails raises by itself, and the others go on."""

    variables_on_gpus = False

    def __init__(
        self,
        sync_every: int | None = None,
        sync_seconds: float | None = None,
        outer_optimizer: Optimizer | None = None,
        *,
        cluster_resolver: ClusterResolver | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self.membership = join_cluster(
            communicator, cluster_resolver, validate_for_collective_training
        )
        super().__init__(
            self.membership.group,
            cluster_resolver=self.membership.resolver,
            is_chief=self.membership.place.is_chief,
        )
        self._rounds = agreed_rounds(self.communicator, sync_every, sync_seconds, outer_optimizer)
        self._averaging = Averaging(self.communicator, outer_optimizer)
        self._modules = AveragedModules(self._averaging, self._end_step)
        self._loops = Loops(self.communicator, self.membership.world, self._average)

    @property
    def num_replicas_in_sync(self) -> int:
        """1: between two averagings gradients are not aggregated."""
        return 1

    def store(self, value: Array, what: str) -> Storage:
        """A value of this replica's own, beginning with the chief's. Collective."""
        stored = ReplicaStorage(self.mirror(value, what))
        self._averaging.add(stored)
        return stored

    def apply_gradients(
        self, optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
    ) -> None:
        """One step of this replica alone; at the end of a round all of them average."""
        stored = [variable.storage for variable in variables]
        self._averaging.begin_step(each for each in stored if isinstance(each, ReplicaStorage))
        optimizer.update(copied(gradients), variables)
        self._end_step()

    def distribute(
        self,
        model: Any,
        optimizer: Any,
        *,
        unused: Literal["error", "zeros"] = "error",
        weighted: bool = False,
        wire_dtype: Any = None,
    ) -> tuple[Any, Any]:
        """As under every strategy; each replica applies its own gradients, and counts its steps.

        Parameters that require gradients are averaged, buffers are not. The options, which concern
        reductions of gradients, change nothing.
        """
        super().distribute(
            model, optimizer, unused=unused, weighted=weighted, wire_dtype=wire_dtype
        )
        optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        self._modules.add(model, optimizers)
        return model, optimizer

    def averaged(self, arrays: Callable[[], Sequence[Array]]) -> AveragedArrays:
        """What averages arrays that the program replaces in each step. All replicas call it."""
        return AveragedArrays(self._averaging, arrays(), self._end_step)

    def restored(self, parameters: Iterable[Any]) -> None:
        """A restored value is an agreed value."""
        self._modules.settle(parameters)

    def _end_step(self) -> None:
        if self._rounds.step():
            self._average(Part(Reason.ROUND_ENDS))

    def synchronize(self) -> None:
        """Average now, and begin a new round. Collective; RuntimeError inside `run`."""
        require_cross_replica("LocalSGDStrategy.synchronize")
        self._average(Part(Reason.SYNCHRONIZE, self._loops.current))

    def settle(self) -> None:
        """Average and begin a new round, where any replica has taken steps since the last one."""
        self._average(Part(Reason.SAVE, self._loops.current))

    def _average(self, part: Part) -> None:
        """Take part in an averaging, for a reason that all ranks give alike. Collective.

        A rank whose loop is over may take part in any, and counts where it has taken steps.
        """
        with PropagatedErrors(self.communicator, "averaging"):
            self._modules.begin_averaging()
            # What fails here must do so before the others wait, and a round's time includes it.
            self._averaging.finish_steps()
        state, parts = self._exchange(part)
        counts = [
            each.reason.in_loop or touched
            for each, touched in zip(parts, state.touched, strict=True)
        ]
        # A save changes nothing where all values are equal already.
        if any(state.touched) or all(each.reason is not Reason.SAVE for each in parts):
            self._averaging.average(state, counts)
            self._rounds.begin([proposal for _, _, proposal in state.numbers])
        self._modules.end_averaging()
        self._loops.note(parts)
        if parts[self.communicator.rank].reason is not part.reason:
            self._loops.leave_all()
            self._average(Part(part.reason))

    def _exchange(self, part: Part) -> tuple[RankStates, list[Part]]:
        waits = not part.reason.in_loop
        text = "the other ranks' averagings, after the end of this rank's batches"
        with named_scope(self.communicator, text) if waits else nullcontext():
            self.barrier("averaging")
            state = self._averaging.exchange(*part, self._rounds.proposal())
            given = [Part(Reason(reason), loop) for reason, loop, _ in state.numbers]
            parts = without_left(given)
            if len({each.reason for each in parts if each.reason.in_loop}) > 1:
                self.barrier(self._text(part.reason))
        return state, parts

    def _text(self, reason: Reason) -> str:
        """The text of a call that other ranks don't make."""
        text = _TEXTS.get(reason, "the end of a loop")
        return text + _SCALER if reason is Reason.ROUND_ENDS and self._modules else text

    def loop_over(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The batches; a rank without batches averages with the others until all have ended."""
        return self._loops.over(batches)

    def leave_loops(self) -> None:
        """Average with the others until the loops that this rank has left end on all ranks."""
        self._loops.finish()

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Iterable[Any]:
        """As under every strategy, of a dataset whose batches are meant for one replica each.

        W of them at a time are joined, then distributed over the W ranks.
        """
        joined = join_batches(dataset, self.communicator.size)
        return super().experimental_distribute_dataset(joined, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """As under every strategy, with an InputContext of one replica in sync."""

        def made(context: InputContext) -> Iterable[Any]:
            return dataset_fn(dataclasses.replace(context, num_replicas_in_sync=1))

        return super().distribute_datasets_from_function(made, options)
