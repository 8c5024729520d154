"""Loops over unequal numbers of batches under LocalSGDStrategy: they end at the same step."""

import itertools
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest

from collectives import CollectiveMismatchError, Communicator
from collectives.transports import local
from strategies import DatasetError, LocalSGDStrategy, ReduceOp, Variable, metrics, optimizers
from strategies.data_service.data_worker import DatasetWorker
from tests.slow import slow_but
from tests.strategies.support import limited, refusal
from tests.worlds.programs import errors_of

DEADLINE = 15


class Numbered:
    """A dataset whose batch i contains i; the first number of each data task is k · 1,000."""

    def __init__(self, count, context, fails=False):
        self.count, self.first, self.fails = count, 1000 * context.input_pipeline_id, fails

    def __iter__(self):
        for number in range(self.count):
            yield np.full(2, self.first + number)
        if self.fails:
            raise OSError("the disk is gone")


@contextmanager
def training(comm, count, *arguments, data_tasks=1, fails=False):
    """A LocalSGDStrategy and a dataset of so many batches, which the ranks request."""
    before, comm.deadline = comm.deadline, DEADLINE
    resolver = DatasetWorker.resolver(data_tasks, communicator=comm)
    strategy = LocalSGDStrategy(*arguments, cluster_resolver=resolver, communicator=comm)
    dataset = lambda context: Numbered(count, context, fails)  # noqa: E731
    with DatasetWorker(strategy, dataset, agreed=False) as data:
        yield strategy, data
    strategy.communicator.close()
    comm.deadline = before


class Model:
    """A variable that counts batches, and a metric over their numbers."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.total, self.optimizer = Variable(np.zeros(3)), optimizers.SGD(1.0, momentum=0.5)
            self.mean = metrics.Mean()
        self.taken = []

    def step(self, batch):
        self.taken.append(int(batch[0]))
        gradient = -np.full(3, 1.0 + self.strategy.communicator.rank)
        self.optimizer.apply_gradients([(gradient, self.total)])
        self.mean.update_state(batch)

    def run(self, batch):
        self.strategy.run(self.step, (batch,))

    def check(self, numbers):
        """All training ranks have the same bits, and together took each number once."""
        comm = self.strategy.communicator
        assert len(set(comm.all_gather_object(self.total.numpy().tobytes()))) == 1
        assert sorted(itertools.chain(*comm.all_gather_object(self.taken))) == sorted(numbers)


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("arguments", [(4,), (None, 0.02), (3, None, optimizers.SGD(0.7, 0.9))])
def test_every_batch_once_and_equal_parameters_after_each_loop(comm, arguments):
    """Whether ranks are equally fast or one is slow, calls after the loop match."""
    for count, slow in ((23, 0), (24, 0.003), (1, 0), (0, 0)):
        with training(comm, count, *arguments) as (strategy, data):
            if data.serves:
                assert data.serve() in (3, 2)
                continue
            model, rank = Model(strategy), strategy.communicator.rank
            for _ in range(2):
                model.taken.clear()
                for batch in data:
                    model.run(batch)
                    time.sleep(slow * (rank == 0))
                number = strategy.reduce(ReduceOp.SUM, len(model.taken), axis=None)
                assert number == count
                model.check(range(count))
            strategy.synchronize()
            assert float(model.mean.result()) == (pytest.approx((count - 1) / 2) if count else 0)
            model.check(range(count))


def reduce_after(model):
    return float(model.strategy.reduce(ReduceOp.SUM, 1, axis=None))


def metric_after(model):
    return model.mean.result()


def synchronize_after(model):
    model.strategy.synchronize()


def raw_after(model):
    model.strategy.communicator.barrier()


def variable_after(model):
    with model.strategy.scope():
        return Variable(1.0)


def nothing_after(model):
    return None


AFTER = [
    reduce_after,
    metric_after,
    synchronize_after,
    raw_after,
    variable_after,
    nothing_after,
]


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 5)
@pytest.mark.parametrize("where", ["the same step", "a step of its own", "its end"])
def test_breaking_out_of_the_loop(comm, where):
    """Some ranks may have reached the end before; the next call after the loop is the same."""
    workers = comm.size - 1
    for after in AFTER:
        with training(comm, 10 * workers, 3) as (strategy, data):
            if data.serves:
                data.serve()
                continue
            model, rank = Model(strategy), strategy.communicator.rank
            last = {"the same step": 10, "a step of its own": 4 + 3 * rank}.get(
                where, 10 + 90 * rank
            )
            for _ in range(2):
                for step, batch in enumerate(data, 1):
                    model.run(batch)
                    time.sleep(0.002 * (rank == 1))
                    if step == last:
                        break
                after(model)
            data.close()
            values = strategy.communicator.all_gather_object(model.total.numpy().tobytes())
            assert len(set(values)) == 1, after.__name__


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 5)
def test_an_infinite_dataset_that_ranks_stop_at_different_steps(comm):
    with training(comm, 1 << 60, 5) as (strategy, data):
        if data.serves:
            assert data.serve(2) == 2
        else:
            model, rank = Model(strategy), strategy.communicator.rank
            for _ in range(2):
                for step, batch in enumerate(data):
                    model.run(batch)
                    if step == 3 + 4 * rank:
                        break
            strategy.synchronize()
            assert len(model.taken) == 2 * (4 + 4 * rank)


@pytest.mark.mpi
@pytest.mark.ranks(5, 4)
def test_several_data_tasks(comm):
    with training(comm, 11, 4, data_tasks=2) as (strategy, data):
        if data.serves:
            data.serve()
        else:
            model = Model(strategy)
            for batch in data:
                model.run(batch)
            model.check([1000 * task + number for task in range(2) for number in range(11)])


@pytest.mark.mpi
@pytest.mark.ranks(3, 4, 5)
def test_an_error_of_the_dataset_is_raised_on_all_ranks_which_continue(comm):
    with training(comm, 7, 2, fails=True) as (strategy, data):
        if data.serves:
            refusal(OSError, "the disk is gone", data.serve)
        else:
            model = Model(strategy)
            told = f"the dataset of rank {comm.size - 1} raised OSError: the disk is gone"

            def train():
                for batch in data:
                    model.run(batch)
                    time.sleep(0.005 * strategy.communicator.rank)

            for _ in range(2):
                assert refusal(DatasetError, None, train) == told
                assert reduce_after(model) == strategy.communicator.size
            strategy.synchronize()
            assert len(set(strategy.communicator.all_gather_object(model.total[0]))) == 1
        comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_a_call_that_only_a_training_rank_makes_is_refused_on_both(comm):
    """Within the loop, where the other rank has no batch; calls after the loop work."""
    with training(comm, 1, 9) as (strategy, data):
        if data.serves:
            data.serve()
        else:
            model, training_ranks = Model(strategy), strategy.communicator

            def train():
                if training_ranks.rank == 1:
                    training_ranks.recv(np.empty(1), 0)
                for batch in data:
                    model.run(batch)
                    training_ranks.send(np.zeros(1), 1)
                    reduce_after(model)

            match = (
                r"(?s)rank 0: .*agreeing on reduce.*rank 1: the other ranks' averagings,"
                r" after the end of this rank's batches: barrier\(averaging\)"
            )
            refusal(CollectiveMismatchError, match, train)
            assert reduce_after(model) == 2
            model.check([0])


# --- each rank with batches of its own -----------------------------------------------------------


def on_threads(size, body):
    """Call `body(comm)` on threads; the results in rank order."""

    def one_rank(transport):
        with limited(transport):
            return body(Communicator(transport, deadline=25))

    return local.run(size, one_rank)


def simulated(counts, every, outer):
    """The value after a loop over so many batches on each rank, whose steps add rank + 1."""
    velocity = agreed = 0.0
    left = list(counts)
    while any(left):
        steps = [min(each, every) for each in left]
        left = [each - taken for each, taken in zip(left, steps, strict=True)]
        mean = np.mean([taken * (rank + 1) for rank, taken in enumerate(steps) if taken])
        velocity = 0.5 * velocity + 0.7 * mean
        agreed += velocity if outer else mean
    return agreed


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("counts", [(5, 9), (0, 7), (4, 0, 13), (0, 0), (3, 3, 3)])
def test_a_rank_without_batches_neither_counts_nor_holds_up_the_others(counts, outer):
    """The average is the mean over the ranks that did steps."""
    every = 4

    def body(comm):
        rate = optimizers.SGD(0.7, momentum=0.5) if outer else None
        strategy = LocalSGDStrategy(every, None, rate, communicator=comm)
        with strategy.scope():
            value, optimizer = Variable(np.float16(0)), optimizers.SGD(1.0)
            wide = Variable(0.0)
        gradient = -(comm.rank + 1.0)
        for _ in strategy.loop_over(None for _ in range(counts[comm.rank])):
            strategy.run(optimizer.apply_gradients, ([(gradient, value), (gradient, wide)],))
        return float(value), float(wide)

    wanted = simulated(counts, every, outer)
    for narrow, wide in on_threads(len(counts), body):
        assert wide == pytest.approx(wanted)
        assert narrow == pytest.approx(wanted, rel=3e-3)


def test_an_error_on_one_rank_is_raised_in_the_others_loops():
    def body(comm):
        strategy = LocalSGDStrategy(2, communicator=comm)
        model = Model(strategy)

        class Failing:
            def __iter__(self):
                yield np.zeros(1)
                if comm.rank == 1:
                    raise OSError("rank 1 can't read")
                yield from [np.zeros(1)] * 9

        # Without a data task each rank takes every third batch of its own dataset.
        data = DatasetWorker(strategy, lambda context: Failing(), agreed=False)

        def train():
            for batch in data:
                model.run(batch)

        error, match = DatasetError, "the dataset of rank 1 raised OSError: rank 1 can't read"
        refusal(*((OSError, "rank 1 can't read") if comm.rank == 1 else (error, match)), train)
        return float(strategy.reduce("sum", comm.rank, axis=None)), model.total.numpy().tolist()

    results = on_threads(3, body)
    assert [number for number, _ in results] == [3.0] * 3
    assert len({tuple(values) for _, values in results}) == 1


def test_loops_at_different_steps_raise_on_all_ranks():
    """Rank 0 has ended an inner loop of a loop that rank 1 has ended."""

    def body(comm):
        strategy = LocalSGDStrategy(2, communicator=comm)

        def train():
            for _ in strategy.loop_over(None for _ in range(1 - comm.rank)):
                list(strategy.loop_over(None for _ in range(3)))

        text = refusal(DatasetError, r"the ranks' loops have come apart", train)
        assert text.endswith("rank 0: loop 2\n  rank 1: loop 1")
        return float(strategy.reduce("sum", comm.rank + 1, axis=None))

    assert on_threads(2, body) == [3.0] * 2


def test_equal_nested_loops():
    def body(comm):
        strategy = LocalSGDStrategy(3, communicator=comm)
        model, seen = Model(strategy), []
        for _ in strategy.loop_over(None for _ in range(2)):
            for _ in strategy.loop_over(None for _ in range(2 + comm.rank)):
                model.run(np.zeros(1))
            seen.append(model.total[0])
        return [float(each) for each in seen]

    first, *others = on_threads(3, body)
    assert others == [first] * 2


# --- loops that ranks end early ------------------------------------------------------------------


def none_taken(data, model):
    """No batch was taken at all."""
    for _ in itertools.islice(data, 0):
        pass


def kept(data, model):
    """A variable refers to the iterator."""
    batches = model.kept = iter(data)
    for step, batch in enumerate(batches):
        model.run(batch)
        if step == 1:
            break


def left(data, model):
    for step, batch in enumerate(data):
        model.run(batch)
        if step == 1:
            break


def to_its_end(data, model):
    for batch in data:
        model.run(batch)


def save_after(model):
    model.strategy.settle()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("leave", [none_taken, kept, left])
def test_one_rank_ends_its_loop_and_all_continue(comm, leave):
    """The strategy's calls, another loop, and a call of the original communicator."""

    def parent_after(model):
        comm.barrier()

    def loop_after(model):
        to_its_end(data, model)

    before, comm.deadline = comm.deadline, DEADLINE
    for after in (synchronize_after, save_after, loop_after, parent_after):
        if leave is kept and after is parent_after:
            continue  # nothing signals the end of the loop
        strategy = LocalSGDStrategy(2, communicator=comm)
        model = Model(strategy)
        make = lambda context: [np.full(2, i) for i in range(6 * comm.size)]  # noqa: E731
        data = DatasetWorker(strategy, make, agreed=False)
        for _ in range(2):
            (to_its_end if comm.rank else leave)(data, model)
            after(model)
        values = strategy.communicator.all_gather_object(model.total.numpy().tobytes())
        assert len(set(values)) == 1, after.__name__
        if leave is kept and comm.rank == 0:
            if after is loop_after:
                assert list(model.kept) == []
            else:
                refusal(RuntimeError, "the loop is over on this rank", next, model.kept)
        strategy.communicator.close()
    comm.deadline = before


def test_ranks_that_synchronize_in_their_loops_stay_in_them():
    """After the same number of steps; a rank whose batches have ended takes part."""
    counts = (2, 4, 6)

    def body(comm):
        strategy = LocalSGDStrategy(2, communicator=comm)
        model = Model(strategy)
        for batch in strategy.loop_over(np.zeros(1) for _ in range(counts[comm.rank])):
            model.run(batch)
            strategy.synchronize()
        return len(model.taken), model.total.numpy().tolist()

    results = on_threads(3, body)
    assert tuple(count for count, _ in results) == counts
    assert len({tuple(values) for _, values in results}) == 1


ENDING = """
import sys
import numpy as np
import collectives, strategies
from collectives.consistency.uncaught import end_alone
from strategies.data_service.data_worker import DatasetWorker
world = collectives.world(deadline=20)
strategy = strategies.LocalSGDStrategy(2)
with strategy.scope():
    value, optimizer = strategies.Variable(np.zeros(2)), strategies.optimizers.SGD(1.0)
data = DatasetWorker(strategy, lambda context: [np.ones(2)] * 18, agreed=False)
if world.rank == 0 and sys.argv[1] == "raises":
    end_alone()
batches, taken = iter(data) if sys.argv[1] == "kept" else data, 0
for batch in batches:
    strategy.run(optimizer.apply_gradients, ([(-batch, value)],))
    taken += 1
    if world.rank == 0 and taken == 3:
        break
# In one piece, since what ranks print may be mixed.
sys.stdout.write(f"took {taken};")
sys.stdout.flush()
if world.rank == 0 and sys.argv[1] == "raises":
    raise OSError("rank 0 fails after its loop")
"""


@pytest.mark.parametrize("how", slow_but(["left", "kept", "raises"], "left"))
def test_a_program_that_ends_after_a_loop_that_one_rank_ended_early(how, launch):
    """The others train to the end, unless an uncaught exception ended the loop."""
    ended = launch(3, [sys.executable, "-c", ENDING, how], timeout=60)
    if how == "raises":
        assert ended.returncode != 0
        assert "OSError: rank 0 fails after its loop" in ended.stderr
        assert "CollectiveMismatchError" in ended.stderr
        return
    assert (ended.returncode, errors_of(ended)) == (0, "")
    assert (ended.stdout.count("took 3;"), ended.stdout.count("took 6;")) == (1, 2)
