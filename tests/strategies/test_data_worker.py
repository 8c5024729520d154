"""A rank that serves batches to training ranks: tf_semantics.md §1, "Dedicated dataset worker"."""

import contextlib
import pickle
import sys
import threading
import time
from collections import namedtuple
from functools import partial
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

import strategies
from collectives import CollectiveMismatchError, Communicator, MismatchError
from collectives.transports import local
from strategies import DatasetError, MultiWorkerMirroredStrategy
from strategies.cluster.spec import ClusterSpec
from strategies.cluster_resolver import SimpleClusterResolver
from strategies.data_service.client import DatasetClient
from strategies.data_service.data_worker import DatasetWorker
from strategies.input import make_numpy_dataset
from strategies.input.batches import pack, unpack
from tests.slow import slow
from tests.strategies.support import limited, lone_strategy, refusal
from tests.worlds.dying import run_dying
from tests.worlds.programs import errors_of

Example = namedtuple("Example", "image label")


def numbered(count, length=4):
    """A dataset whose batch i contains only i; it counts its iterations."""

    class Numbered:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            # One array for all batches, as some datasets do.
            batch = np.empty(length, np.int64)
            for number in range(count):
                batch[:] = number
                yield batch

    return Numbered()


def number_of(batch):
    assert (batch == batch[0]).all()
    return int(batch[0])


@contextlib.contextmanager
def worker_of(comm, make, data_tasks=1, kind=MultiWorkerMirroredStrategy, **options):
    resolver = DatasetWorker.resolver(data_tasks, communicator=comm)
    strategy = kind(cluster_resolver=resolver, communicator=comm)
    data = DatasetWorker(strategy, make, **options)
    yield data
    data.close()
    strategy.communicator.close()


def on_threads(size, body):
    """Call `body(comm)` on threads; the results in rank order."""

    def one_rank(transport):
        with limited(transport):
            return body(Communicator(transport, deadline=25))

    return local.run(size, one_rank)


def numbers_dealt(comm, count, *, epochs=1, slow=0.0, length=4, **options):
    """The batches that each rank got in each epoch, in rank order, and the data rank's dataset."""
    dataset = numbered(count, length)
    taken = []
    with worker_of(comm, lambda context: dataset, agreed=False, **options) as data:
        if data.serves:
            assert data.serve(epochs) == epochs
            assert dataset.epochs == epochs
        else:
            for _ in range(epochs):
                numbers = []
                for batch in data:
                    numbers.append(number_of(batch))
                    time.sleep(slow if comm.rank == 0 else 0)
                taken.append(numbers)
            assert dataset.epochs == 0
    return comm.all_gather_object(taken)


@pytest.mark.parametrize("count", [0, 1, 17])
@pytest.mark.parametrize("length", [4, 20_000])
@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_every_batch_is_delivered_once(comm, count, length):
    *training, data = numbers_dealt(comm, count, epochs=2, length=length)
    assert data == []
    for epoch in range(2):
        numbers = [each[epoch] for each in training]
        assert sorted(chain(*numbers)) == list(range(count))
        # Each rank gets its batches in the order of the dataset.
        assert all(each == sorted(each) for each in numbers)


@pytest.mark.mpi
@pytest.mark.ranks(3, 5)
def test_a_slow_rank_gets_fewer(comm):
    *training, _ = numbers_dealt(comm, 60, slow=0.05)
    counts = [len(numbers) for (numbers,) in training]
    assert sum(counts) == 60
    assert counts[0] < 60 / len(counts) / 2
    assert counts[0] == min(counts)


@pytest.mark.mpi
@pytest.mark.ranks(3, 5)
def test_a_rank_holds_no_more_than_its_credits(comm):
    """A rank that takes no batches keeps at most `credits` batches from the others."""
    for credits in (1, 3):
        taken = []
        with worker_of(comm, lambda context: numbered(30), agreed=False, credits=credits) as data:
            training = data._together.communicator
            if data.serves:
                data.serve(1)
            else:
                batches = iter(data)
                if comm.rank == 0:
                    taken = [number_of(next(batches))]
                    training.barrier()
                else:
                    training.barrier()
                    taken = [number_of(batch) for batch in batches]
                training.barrier()
                taken += [number_of(batch) for batch in batches]
        ranks = comm.all_gather_object(taken)
        assert sorted(chain(*ranks)) == list(range(30))
        assert len(ranks[0]) == 1 + credits


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_synchronous_ranks_end_together(comm):
    """Each step every rank has a batch, or an empty one of its structure."""
    training = comm.size - 1

    def dataset(context):
        assert context == strategies.InputContext(1, 0, training)
        return [{"x": np.full((3, 2), i, np.float32), "y": [np.full(3, i)]} for i in range(7)]

    with worker_of(comm, dataset) as data:
        if data.serves:
            assert data.serve() == 2
            return
        together = data._together.communicator
        for _ in range(2):
            steps, rows = 0, 0
            for batch in data:
                steps += 1
                total = together.all_reduce(np.float64(batch["x"].sum()))
                rows += int(together.all_reduce(len(batch["y"][0])))
                assert batch["x"].dtype == np.float32
                assert batch["x"].shape == (len(batch["y"][0]), 2)
                assert len(batch["x"]) in (0, 3)
                assert total >= 0
            assert rows == 21
            assert together.all_gather(np.array([steps])).tolist() == [steps] * training
            assert steps >= -(-7 // training)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_independent_ranks_get_batches_for_one_replica_each(comm):
    def dataset(context):
        assert context == strategies.InputContext(1, 0, 1)
        return [np.zeros(context.get_per_replica_batch_size(4))] * 6

    kind = partial(strategies.LocalSGDStrategy, 2)
    with worker_of(comm, dataset, kind=kind, agreed=False) as data:
        lengths = []
        if data.serves:
            data.serve()
        else:
            lengths = [len(batch) for batch in data]
    assert sum(comm.all_gather_object(sum(lengths))) == 24
    assert set(lengths) <= {4}


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("agreed", [True, False])
def test_an_error_of_the_dataset_is_raised_on_every_rank(comm, agreed):
    class Failing:
        def __iter__(self):
            for number in range(4):
                yield np.full(2, number)
            raise KeyError("no such file")

    with worker_of(comm, lambda context: Failing(), agreed=agreed) as data:
        last = comm.size - 1
        if data.serves:
            assert refusal(KeyError, "no such file", data.serve) == "'no such file'"
        else:
            told = f"the dataset of rank {last} raised KeyError: 'no such file'"
            for _ in range(2):
                assert refusal(DatasetError, None, list, data) == told
        # The data rank continues before the others close.
        comm.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_dataset_that_cannot_be_made(comm):
    def make(context):
        raise OSError(2, "no such folder")

    with worker_of(comm, make) as data:
        if data.serves:
            refusal(FileNotFoundError, "no such folder", data.serve)
        else:
            told = (
                f"the dataset of rank {comm.size - 1} raised FileNotFoundError: .* no such folder"
            )
            refusal(DatasetError, told, list, data)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_dataset_that_can_be_iterated_only_once(comm):
    with worker_of(comm, lambda context: iter([np.ones(2)])) as data:
        call, error = (data.serve, TypeError) if data.serves else (lambda: list(data), DatasetError)
        refusal(error, "dataset is a list_iterator, which can be iterated only once", call)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
def test_what_a_rank_that_stops_gives_back_goes_to_the_others(comm):
    taken = []
    with worker_of(comm, lambda context: numbered(40), agreed=False) as data:
        if data.serves:
            assert data.serve(2) == 2
        else:
            for batch in data:
                taken.append(number_of(batch))
                if comm.rank == 0 and len(taken) == 2:
                    break
                # The others can't end before rank 0 has stopped.
                time.sleep(0.1 if comm.rank else 0)
            taken.append([number_of(batch) for batch in data])
    *training, _ = comm.all_gather_object(taken)
    first = chain(*(each[:-1] for each in training))
    second = chain(*(each[-1] for each in training))
    assert sorted(second) == list(range(40))
    assert len(training[0]) == 3
    assert sorted(first) == (list(range(40)) if comm.size > 2 else [0, 1])


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_an_endless_dataset_that_all_stop_taking(comm):
    class Endless:
        def __iter__(self):
            number = 0
            while True:
                yield np.full(50_000, number)
                number += 1

    with worker_of(comm, lambda context: Endless()) as data:
        if data.serves:
            assert data.serve(3) == 3
        else:
            for _ in range(3):
                for step, _batch in enumerate(data):
                    if step == 4:
                        break


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_a_loop_too_many(comm):
    with worker_of(comm, lambda context: numbered(3)) as data:
        if data.serves:
            assert data.serve(1) == 1
        else:
            list(data)
            match = f"the dataset rank {comm.size - 1} has dealt its 1 epochs: there are no more"
            refusal(DatasetError, match, list, data)


@pytest.mark.mpi
@pytest.mark.ranks(3, 5)
def test_several_data_tasks_serve_their_own_datasets(comm):
    def dataset(context):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, comm.size - 2)
        return [np.full(2, 100 * context.input_pipeline_id + i) for i in range(10)]

    taken = []
    with worker_of(comm, dataset, data_tasks=2, agreed=False) as data:
        if data.serves:
            data.serve(1)
        else:
            taken = [number_of(batch) for batch in data]
    numbers = sorted(chain(*comm.all_gather_object(taken)))
    assert numbers == [*range(10), *range(100, 110)]


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_a_batch_arrives_as_it_was(comm):
    batch = {
        "pair": Example(np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.array(3, np.int8)),
        "names": ["a", None, np.array(["ab", "c"])],
        "objects": np.array([{1}, "x"], dtype=object),
        "time": np.array(["2020-01-01"], "datetime64[D]"),
    }
    with worker_of(comm, lambda context: [batch], agreed=False) as data:
        if data.serves:
            data.serve(1)
            return
        (came,) = list(data)
    assert list(came) == list(batch)
    assert type(came["pair"]) is Example
    assert came["pair"].label.shape == ()
    for one, other in zip(came["pair"], batch["pair"], strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert came["names"][:2] == ["a", None]
    assert came["names"][2].tolist() == ["ab", "c"]
    assert came["objects"].tolist() == [{1}, "x"]
    assert came["time"] == batch["time"]


def test_a_dataset_may_reuse_its_arrays():
    """Also those of objects, in batches that another rank has not taken."""
    left = threading.Event()

    class Reusing:
        def __iter__(self):
            numbers, names = np.zeros(1, int), np.array([""], object)
            for number in range(8):
                numbers[:], names[:] = number, f"name {number}"
                yield numbers, names

    def body(comm):
        with worker_of(comm, lambda context: Reusing(), agreed=False) as data:
            if data.serves:
                data.serve(1)
                return []
            if comm.rank == 0:
                batches = iter(data)
                taken = [next(batches)]
                batches.close()
                left.set()
            else:
                batches = iter(data)
                taken = [next(batches)]
                assert left.wait(20)
                taken += batches
            return [(int(numbers[0]), names[0]) for numbers, names in taken]

    first, second, _ = on_threads(3, body)
    assert sorted(first + second) == [(number, f"name {number}") for number in range(8)]


def test_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    batch = {"x": torch.arange(6.0).reshape(2, 3).T, "y": torch.ones(2, dtype=torch.bfloat16)}
    came = unpack(*pack(batch))
    for key, tensor in batch.items():
        assert came[key].dtype == tensor.dtype
        assert torch.equal(came[key], tensor)


# --- without a data task -------------------------------------------------------------------------


def test_a_program_on_one_rank_iterates_its_dataset():
    strategy = lone_strategy()
    for made in (strategy, strategies.get_strategy()):
        data = DatasetWorker(made, lambda context: numbered(3))
        assert not data.serves
        assert [number_of(batch) for batch in data] == [0, 1, 2]
        assert [number_of(batch) for batch in data] == [0, 1, 2]
        refusal(RuntimeError, "rank 0 isn't a data task", data.serve)
        data.close()


@pytest.mark.parametrize("agreed", [True, False])
def test_ranks_without_a_data_task_share_the_batches(agreed):
    def body(comm):
        strategy = MultiWorkerMirroredStrategy(communicator=comm)
        data = DatasetWorker(strategy, lambda context: numbered(5), agreed=agreed)
        return [batch.tolist()[:1] for batch in data]

    empty = [[]] if agreed else []
    assert on_threads(2, body) == [[[0], [2], [4]], [[1], [3], *empty]]


@pytest.mark.parametrize("agreed", [True, False])
def test_a_shuffled_dataset_without_a_data_task_is_every_row_once(agreed):
    def body(comm):
        strategy = MultiWorkerMirroredStrategy(communicator=comm)
        rows = make_numpy_dataset(np.arange(12)).shuffle(12).batch(2)
        data = DatasetWorker(strategy, lambda context: rows, agreed=agreed)
        return [[int(row) for batch in data for row in batch] for _ in range(2)]

    first, second = on_threads(2, body)
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(12))
    assert first[0] != first[1]


def test_ranks_whose_datasets_differ_are_logged(caplog):
    def body(comm):
        strategy = MultiWorkerMirroredStrategy(communicator=comm)
        data = DatasetWorker(strategy, lambda context: [np.arange(2) + comm.rank] * 4)
        return len(list(data))

    assert on_threads(2, body) == [2, 2]
    assert "DatasetWorker without a data task" in caplog.text
    assert "first batches differ" in caplog.text


@pytest.mark.parametrize("agreed", [True, False])
def test_an_error_on_one_rank_alone(agreed):
    def body(comm):
        class Failing:
            def __iter__(self):
                yield np.zeros(1)
                if comm.rank == 1:
                    raise OSError("rank 1 can't read")
                yield from [np.zeros(1)] * 5

        data = DatasetWorker(
            MultiWorkerMirroredStrategy(communicator=comm), lambda context: Failing(), agreed=agreed
        )
        if comm.rank == 1:
            refusal(OSError, "rank 1 can't read", list, data)
        elif agreed:
            refusal(DatasetError, "the dataset of rank 1 raised OSError", list, data)
        else:
            assert len(list(data)) == 3

    on_threads(2, body)


def test_the_resolver_of_a_world_of_one_rank():
    resolver = DatasetWorker.resolver(communicator=Communicator(local.alone()))
    assert (resolver.task_type, resolver.cluster_spec().jobs) == ("worker", ["worker"])


def test_the_resolver_takes_the_cluster_of_tf_config(monkeypatch):
    text = '{"cluster": {"worker": ["a"], "data": ["b"]}, "task": {"type": "data", "index": 0}}'
    monkeypatch.setenv("TF_CONFIG", text)
    assert DatasetWorker.resolver().task_type == "data"


@pytest.mark.parametrize("data_tasks", [0, 2, 5])
def test_at_least_one_rank_must_train(data_tasks):
    def body(comm):
        match = f"data_tasks={data_tasks}: must be from 1 to 1, so that one of 2 ranks trains"
        refusal(ValueError, match, DatasetWorker.resolver, data_tasks, comm)

    on_threads(2, body)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "credits=0: must be an integer of at least 1", {"credits": 0}),
        (TypeError, r"credits=1\.5: must be an integer", {"credits": 1.5}),
        (TypeError, "credits=True: must be an integer", {"credits": True}),
    ],
)
def test_wrong_arguments(error, match, options):
    refusal(error, match, DatasetWorker, lone_strategy(), lambda context: [], **options)
    refusal(TypeError, "make_dataset is a list: must be", DatasetWorker, lone_strategy(), [])


@pytest.mark.parametrize("size", [2, 3])
def test_what_one_rank_alone_gives(size):
    """Every rank raises, and the next call works."""

    def body(comm):
        last = comm.rank == size - 1
        with pytest.raises((CollectiveMismatchError, ValueError), match=f"data_tasks={size}"):
            DatasetWorker.resolver(size if last else 1, communicator=comm)
        resolver = DatasetWorker.resolver(communicator=comm)
        strategy = MultiWorkerMirroredStrategy(resolver, communicator=comm)
        credits = 0 if last else 1
        for agreed in (True, False):
            with pytest.raises((MismatchError, ValueError), match="credits=0"):
                DatasetWorker(strategy, lambda context: [], credits=credits, agreed=agreed)
        with pytest.raises(ValueError, match="agreed=True"):
            DatasetWorker(strategy, lambda context: [], agreed=last)
        DatasetWorker(strategy, lambda context: []).close()
        strategy.communicator.close()

    on_threads(size, body)


def test_a_serving_rank_can_not_iterate():
    def body(comm):
        with worker_of(comm, lambda context: numbered(1), agreed=False) as data:
            if data.serves:
                refusal(RuntimeError, "rank 1 is a data task: it calls serve()", iter, data)
                assert data.serve() == 1
            else:
                refusal(RuntimeError, "rank 0 isn't a data task", data.serve)
                assert len(list(data)) == 1

    on_threads(2, body)


def test_an_evaluator_can_not_iterate():
    def body(comm):
        job = ("worker", "data", "evaluator")[comm.rank]
        cluster = ClusterSpec({"worker": ["a"], "data": ["b"], "evaluator": ["c"]})
        resolver = SimpleClusterResolver(cluster, task_type=job, task_id=0)
        strategy = MultiWorkerMirroredStrategy(resolver, communicator=comm)
        data = DatasetWorker(strategy, lambda context: numbered(1), agreed=False)
        if job == "evaluator":
            refusal(RuntimeError, "rank 2 doesn't train: it gets no batches", iter, data)
        elif job == "data":
            assert data.serve() == 1
        else:
            assert len(list(data)) == 1
        data.close()

    on_threads(3, body)


class Answering:
    """Answers requests at once, calls a function within them, and takes no message meanwhile."""

    def __init__(self):
        self.within, self.sent, self.in_request = lambda: None, [], False

    def request(self, server, body):
        assert not self.in_request
        self.in_request = True
        self.within()
        self.in_request = False
        return SimpleNamespace(
            done=lambda: True, result=lambda: ((0, pickle.dumps(body.epoch)), [])
        )

    def notify(self, server, body):
        assert not self.in_request
        self.sent.append((server, body.epoch))

    def wait(self, *_):
        pass

    withdraw = wait


def test_an_iteration_that_the_garbage_collector_ends_within_a_call(monkeypatch):
    """Its message follows the call: a mailbox is not entered twice by one thread."""
    client = DatasetClient(SimpleNamespace(closed=False), [1, 2], 1)
    client._endpoint = Answering()
    monkeypatch.setattr("strategies.input.batches.unpack", lambda header, arrays: header)
    first = client.next_epoch()
    assert next(first) == 0
    second = client.next_epoch()
    client._endpoint.within = first.close
    assert next(second) == 1
    assert sorted(client._endpoint.sent) == [(1, 0), (2, 0)]
    client._endpoint.within = lambda: None
    second.close()
    assert sorted(client._endpoint.sent[2:]) == [(1, 1), (2, 1)]


def test_an_iteration_ends_the_one_before():
    def body(comm):
        with worker_of(comm, lambda context: numbered(9), agreed=False) as data:
            if data.serves:
                return data.serve()
            first = iter(data)
            assert number_of(next(first)) == 0
            unstarted = iter(data)
            assert [number_of(batch) for batch in data] == list(range(9))
            for ended in (first, unstarted):
                refusal(RuntimeError, "another iteration of the dataset has begun", next, ended)
        return None

    assert on_threads(2, body) == [None, 3]


PROGRAM = """
import os, signal, sys, time
import numpy as np
import strategies
from strategies.data_service.data_worker import DatasetWorker
strategy = strategies.MultiWorkerMirroredStrategy(DatasetWorker.resolver())
data = DatasetWorker(strategy, lambda context: [np.full(3, i) for i in range(30)])
rank = strategy.membership.world.rank
if data.serves:
    print("dealt", data.serve(), flush=True)
else:
    total = sum(strategy.reduce("sum", float(batch.sum()), axis=None) for batch in data)
    print(total, flush=True)
"""


@pytest.mark.parametrize("size", [3, *slow(1, 2)])
def test_one_script_for_all_ranks_without_close(size, launch):
    ended = launch(size, [sys.executable, "-c", PROGRAM], timeout=60)
    assert (ended.returncode, errors_of(ended)) == (0, "")
    # The output of ranks may be interleaved.
    assert ended.stdout.count("1305.0") == max(1, size - 1)
    assert ended.stdout.count("dealt 1") == min(1, size - 1)


DYING = """
import os, signal, time
import numpy as np
import collectives, strategies
from strategies.data_service.data_worker import DatasetWorker
world = collectives.world(deadline=20)
strategy = strategies.MultiWorkerMirroredStrategy(DatasetWorker.resolver())
numbers = [np.full(30_000, i) for i in range(40)]
data = DatasetWorker(strategy, lambda context: numbers, agreed=False)
rank = world.rank
def mark(text):
    open(os.path.join(os.environ["MARKS"], f"{rank} {text}"), "w").close()
    os._exit(0)
"""

TRAINING_RANK_DIES = """
if data.serves:
    mark(f"dealt {data.serve(1)}")
taken = []
for batch in data:
    taken.append(int(batch[0]))
    if rank == 0 and len(taken) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
assert taken == sorted(taken)
mark(f"took {len(taken)}")
"""

DATA_RANK_DIES = """
class Fatal:
    def __iter__(self):
        yield from numbers[:3]
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
data._make = lambda context: Fatal()
if data.serves:
    data.serve()
try:
    list(data)
except collectives.RankFailedError as error:
    mark(str(error).split(":")[0])
"""


@pytest.mark.slow
def test_batches_of_a_training_rank_that_dies_are_lost(tmp_path):
    ended = run_dying(3, DYING + TRAINING_RANK_DIES, tmp_path)
    marks = sorted(path.name for path in tmp_path.iterdir())
    # Rank 0 took three, and received at most two more; a third may have been sent.
    assert marks[1:] == ["2 dealt 1"], ended.stderr
    assert int(marks[0].removeprefix("1 took ")) in (34, 35, 36, 37)


def test_a_data_rank_that_dies(tmp_path):
    ended = run_dying(3, DYING + DATA_RANK_DIES, tmp_path)
    marks = sorted(path.name for path in tmp_path.iterdir())
    text = "the data task of rank 2 has died"
    assert marks == [f"0 {text}", f"1 {text}"], ended.stderr
