"""Distributed iteration: failures on one rank, infinite data, element_spec, read-ahead."""

import gc
import threading
import time
import traceback
from collections import namedtuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import Communicator, DeadlineExceededError
from collectives.transports import local
from strategies.input import DatasetError, InputOptions, TensorSpec, distribute, make_numpy_dataset
from strategies.input.distribution import THREAD_NAME, ReadAhead
from tests.strategies.support import lone_strategy, on_ranks, readers, refusal, until

Example = namedtuple("Example", "image label")
DEPTHS = [0, 1, 4]
with_and_without_a_thread = pytest.mark.parametrize("depth", DEPTHS)


class Failing:
    """Yields `count` batches and raises, until its error is None."""

    def __init__(self, count, error):
        self.count, self.error = count, error

    def __iter__(self):
        for step in range(3):
            if self.error and step == self.count:
                raise self.error
            yield np.full(4, step)


def wait_for_readers_to_end():
    for thread in readers():
        thread.join(timeout=20)
    assert not readers()


# --- a source that raises on one rank ------------------------------------------------------------


@with_and_without_a_thread
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("bad", [0, 2])
def test_the_other_ranks_get_an_exception_at_its_step(depth, count, bad):
    def body(strategy):
        rank = strategy.communicator.rank
        source = Failing(count, KeyError("lost") if rank == bad else None)
        options = InputOptions(experimental_per_replica_buffer_size=depth)
        dataset = strategy.experimental_distribute_dataset(source, options)
        iterator = iter(dataset)
        assert [next(iterator).tolist() for _ in range(count)] == [
            [[step, step], [step, step], []][rank] for step in range(count)
        ]
        error = KeyError if rank == bad else DatasetError
        text = refusal(error, "lost", next, iterator)
        assert list(iterator) == []
        source.error = None
        return text, len(list(dataset)), strategy.reduce("sum", rank, axis=None)

    results = on_ranks(3, body)
    told = [text for text, _, _ in results]
    assert told.pop(bad) == "'lost'"
    assert set(told) == {f"the dataset of rank {bad} raised KeyError: 'lost'"}
    assert [steps for _, steps, _ in results] == [3] * 3
    assert [total for _, _, total in results] == [3] * 3
    wait_for_readers_to_end()


def test_ranks_whose_iterations_are_at_different_steps():
    def body(strategy):
        batches = [np.full(2, step) for step in range(6)]
        dataset = strategy.experimental_distribute_dataset(batches)
        other = strategy.experimental_distribute_dataset(batches)
        texts = []
        for following in (dataset, other):
            for step, _ in enumerate(iterator := iter(dataset)):
                if step == 2:
                    break
            if strategy.communicator.rank == 0:
                iterator = iter(following)
            texts.append(refusal(DatasetError, "come apart", next, iterator))
            assert list(iterator) == []
            assert len(list(dataset)) == len(list(other)) == 6
        return texts

    results = on_ranks(2, body)
    assert results[0] == results[1]
    for text in results[0]:
        assert "rank 0: step 1 of a new iteration" in text
        assert "rank 1: step 4 of iteration" in text


@with_and_without_a_thread
def test_a_step_that_was_interrupted_is_no_end_of_data(depth):
    def body(strategy):
        rank = strategy.communicator.rank
        source = Failing(1, KeyboardInterrupt("stop") if rank == 1 else None)
        options = InputOptions(experimental_per_replica_buffer_size=depth)
        iterator = iter(strategy.experimental_distribute_dataset(source, options))
        next(iterator)
        if rank == 1:
            refusal(KeyboardInterrupt, "stop", next, iterator)
        error = RuntimeError if rank == 1 else DatasetError
        refusal(error, "reading the dataset was interrupted", next, iterator)
        return list(iterator)

    assert on_ranks(2, body) == [[], []]


def test_exceptions_of_several_ranks():
    def body(strategy):
        rank = strategy.communicator.rank
        errors = [ValueError("no head"), None, OSError("no tail")]
        dataset = strategy.experimental_distribute_dataset(Failing(0, errors[rank]))
        return refusal([ValueError, DatasetError, OSError][rank], None, list, dataset)

    told = on_ranks(3, body)[1]
    assert told == (
        "the dataset of rank 0 raised ValueError: no head; the dataset of rank 2 raised OSError:"
        " no tail"
    )


def test_an_error_received_from_another_rank_is_forwarded_once():
    told = "the dataset of rank 7 raised OSError: no head"

    def body(strategy):
        error = None if strategy.communicator.rank == 1 else DatasetError(told)
        dataset = strategy.experimental_distribute_dataset(Failing(1, error))
        return refusal(DatasetError, None, list, dataset)

    assert on_ranks(3, body) == [told] * 3


def test_a_batch_that_cant_be_cut_on_one_rank_is_an_exception_of_its_dataset():
    def body(strategy):
        rank = strategy.communicator.rank
        batches = [np.zeros(2), (np.zeros(2), np.zeros(3)) if rank else np.zeros(2)]
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        next(iterator)
        return refusal(ValueError if rank else DatasetError, r"lengths \[2, 3\]", next, iterator)

    assert on_ranks(2, body)[0].startswith("the dataset of rank 1 raised ValueError: a batch has")


def test_an_iteration_that_cant_begin_on_one_rank():
    class Unreadable:
        def __iter__(self):
            raise OSError("no such disk")

    def body(strategy):
        rank = strategy.communicator.rank
        dataset = strategy.distribute_datasets_from_function(
            lambda context: Unreadable() if rank else [np.zeros(1)]
        )
        return refusal(OSError if rank else DatasetError, "no such disk", list, dataset)

    assert on_ranks(2, body)[0] == "the dataset of rank 1 raised OSError: no such disk"


def test_a_function_that_raises_on_one_rank():
    def body(strategy):
        rank = strategy.communicator.rank

        def dataset_of(context):
            return [np.zeros(context.get_per_replica_batch_size([6, 7, 6][rank]))]

        distribute = strategy.distribute_datasets_from_function
        return refusal(ValueError if rank == 1 else DatasetError, None, distribute, dataset_of)

    first, second, third = on_ranks(3, body)
    assert second == "global_batch_size=7: must be a multiple of the 3 replicas"
    assert first == third == f"the dataset of rank 1 raised ValueError: {second}"


def test_a_step_that_exceeded_a_deadline_is_repeated():
    def one_rank(transport):
        communicator = Communicator(transport, deadline=20)
        iterator = iter(distribute(communicator, [np.arange(2), np.arange(2, 4)]))
        communicator.deadline = 0.2
        if transport.rank == 0:
            refusal(DeadlineExceededError, None, next, iterator)
            late.set()
        assert late.wait(20)
        # On both: a rank that stands still for half of the shortest deadline asks the other one.
        communicator.deadline = 20
        return [batch.tolist() for batch in iterator]

    late = threading.Event()
    assert local.run(2, one_rank) == [[[0], [2]], [[1], [3]]]


# --- the end -------------------------------------------------------------------------------------


@with_and_without_a_thread
def test_endless_data_end_when_the_user_stops(depth):
    def body(strategy):
        endless = make_numpy_dataset(np.arange(6)).repeat().batch(4)
        options = InputOptions(experimental_per_replica_buffer_size=depth)
        dataset = strategy.experimental_distribute_dataset(endless, options)
        iterator = iter(dataset)
        steps = [next(iterator).tolist() for _ in range(4)]
        again = [batch.tolist() for batch, _ in zip(dataset, range(2), strict=False)]
        return steps, again

    first, second = on_ranks(2, body)
    assert first == ([[0, 1], [4, 5], [2, 3], [0, 1]], [[0, 1], [4, 5]])
    assert second == ([[2, 3], [0, 1], [4, 5], [2, 3]], [[2, 3], [0, 1]])
    gc.collect()
    wait_for_readers_to_end()


def test_an_iterator_that_ended_stays_ended():
    def body(strategy):
        rank = strategy.communicator.rank
        iterator = iter(strategy.experimental_distribute_dataset([np.arange(2)] * rank))
        taken = [iterator.get_next().tolist() for _ in range(2)]
        refusal(StopIteration, None, next, iterator)
        if rank == 0:  # calls again, alone
            refusal(StopIteration, None, iterator.get_next)
        return taken

    assert on_ranks(3, body) == [[[], []], [[1], []], [[], []]]


# --- element_spec --------------------------------------------------------------------------------


def spec(*shape, dtype="float64"):
    return TensorSpec(shape, np.dtype(dtype))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("early", [True, False])
def test_the_spec_of_the_batches(size, early):
    read = []

    class Source:
        def __iter__(self):
            for step in range(2):
                read.append(step)
                yield {"x": Example(np.zeros((3, 5, 2), np.float32), np.full(3, step))}

    def body(strategy):
        dataset = strategy.experimental_distribute_dataset(Source())
        specs = [dataset.element_spec] if early else []
        batches = [batch["x"].label.tolist() for batch in dataset]
        specs.append(dataset.element_spec)
        iterator = iter(dataset)
        specs.append(iterator.element_spec)
        rows = {1: [3], 2: [2, 1], 3: [1, 1, 1]}[size][strategy.communicator.rank]
        assert batches == [[step] * rows for step in range(2)]
        return specs

    expected = {
        "x": Example(TensorSpec((None, 5, 2), np.dtype("float32")), spec(None, dtype="int64"))
    }
    for specs in on_ranks(size, body):
        assert specs == [expected] * (2 + early)
    assert sorted(read) == [0] * size + [1] * size  # reading the spec consumed no batch


def test_an_iterator_has_the_spec_before_its_first_batch():
    class Counting(list):
        begun = 0

        def __iter__(self):
            self.begun += 1
            return super().__iter__()

    def body(strategy):
        source = Counting([np.zeros((4, 3))] * 2)
        iterator = iter(strategy.experimental_distribute_dataset(source))
        return iterator.element_spec, len(list(iterator)), source.begun

    assert on_ranks(2, body) == [(spec(None, 3), 2, 1)] * 2


def test_lengths_that_differ_by_rank_are_unknown():
    def body(strategy):
        rank = strategy.communicator.rank
        dataset = strategy.distribute_datasets_from_function(
            lambda context: [np.zeros((2, 4 + rank, 3), np.int8)] * (2 - rank)
        )
        return dataset.element_spec, [batch.shape for batch in dataset]

    expected = TensorSpec((None, None, 3), np.dtype("int8"))
    shapes = [[(2, 4, 3), (2, 4, 3)], [(2, 5, 3), (0, 5, 3)], [(0, 4, 3), (0, 4, 3)]]
    assert on_ranks(3, body) == [(expected, of_rank) for of_rank in shapes]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (np.zeros(2, np.float32), "rank 2: * of float32 of shape (None,)"),
        (np.zeros((2, 1)), "rank 2: * of float64 of shape (None, 1)"),
        ((np.zeros(2),), "rank 2: (*) of float64 of shape (None,)"),
    ],
)
def test_ranks_whose_batches_differ_in_kind(other, text):
    def body(strategy):
        rank = strategy.communicator.rank
        own = [[np.zeros(2)], [], [other]][rank]
        dataset = strategy.distribute_datasets_from_function(lambda context: own)
        told = refusal(ValueError, "the ranks' first batches differ", list, dataset)
        assert strategy.reduce("sum", 1, axis=None) == 3
        return told

    (told,) = set(on_ranks(3, body))
    assert text in told
    assert "rank 0: * of float64 of shape (None,)" in told
    assert "rank 1" not in told


def test_without_any_batch_there_is_no_spec():
    def body(strategy):
        source = []
        dataset = strategy.experimental_distribute_dataset(source)
        for _ in range(2):
            refusal(ValueError, "element_spec is not known", getattr, dataset, "element_spec")
        source.append(np.zeros(2))
        return len(list(dataset)), dataset.element_spec

    assert on_ranks(2, body) == [(1, spec(None))] * 2


def test_a_source_that_raises_when_its_spec_is_read():
    def body(strategy):
        source = Failing(0, OSError("not yet"))
        dataset = strategy.experimental_distribute_dataset(source)
        refusal(OSError, "not yet", getattr, dataset, "element_spec")
        source.error = None
        return len(list(dataset))

    assert on_ranks(2, body) == [3, 3]


# --- reading ahead -------------------------------------------------------------------------------


def counting(read, count=None):
    """A generator of numbers that records which were read, and when it is closed."""
    try:
        number = 0
        while count is None or number < count:
            read.append(number)
            yield number
            number += 1
    finally:
        read.append("closed")


@given(st.integers(0, 20), st.integers(0, 5))
def test_what_is_read_ahead_is_the_same(count, depth):
    read = []
    assert list(ReadAhead(depth).read(counting(read, count))) == list(range(count))
    assert read == [*range(count), "closed"]


@pytest.mark.parametrize("depth", [1, 3])
def test_reading_ahead_is_limited_to_the_depth(depth):
    read = []
    ahead = ReadAhead(depth).read(counting(read))
    assert not readers()
    for taken in range(1, 4):
        next(ahead)
        until(lambda: len(read) >= taken + depth)  # noqa: B023
        time.sleep(0.02)  # time to read too much
        assert read == list(range(taken + depth))
    ahead.close()
    wait_for_readers_to_end()
    assert read[-1] == "closed"


class Numbers:
    """Random numbers that note each restored state, and what `seen` gives then."""

    def __init__(self, seen):
        self.drawn, self.restored, self._seen = 0, [], seen

    def state(self):
        return self.drawn

    def restore(self, state):
        self.restored.append((state, self._seen()))


def test_random_numbers_go_on_from_the_last_batch_that_was_given_out():
    """The thread has ended by then, whatever it was reading."""

    def source():
        for _ in range(3):
            numbers.drawn += 1
            yield numbers.drawn
        reading.set()
        left.wait(20)
        numbers.drawn += 1
        yield numbers.drawn

    numbers = Numbers(lambda: len(readers()))
    reading, left = threading.Event(), threading.Event()
    ahead = ReadAhead(5, numbers).read(source())
    assert [next(ahead), next(ahead)] == [1, 2]
    assert reading.wait(20)
    timer = threading.Timer(0.1, left.set)
    timer.start()
    ahead.close()
    timer.join()
    assert numbers.restored == [(2, 0)]


def test_the_next_iteration_begins_when_the_thread_of_one_that_was_left_has_ended():
    """A DataLoader whose workers persist has one iterator."""
    order, left = [], threading.Event()

    def slow():
        yield 0
        order.append("reading")
        left.wait(20)
        yield 1
        order.append("not reached")

    def following():
        order.append("following")
        yield 2

    ahead = ReadAhead(1)
    first = ahead.read(slow())
    assert next(first) == 0
    until(lambda: order)
    first.close()
    timer = threading.Timer(0.1, lambda: (order.append("left"), left.set()))
    timer.start()
    assert list(ahead.read(following())) == [2]
    timer.join()
    assert order == ["reading", "left", "following"]
    # Nor is one that was left beside another, which has ended.
    left.clear()
    order.clear()
    older, newer = ahead.read(slow()), ahead.read(following())
    assert next(older) == 0
    until(lambda: order)
    assert list(newer) == [2]
    older.close()
    timer = threading.Timer(0.1, lambda: (order.append("left"), left.set()))
    timer.start()
    assert list(ahead.read(following())) == [2]
    timer.join()
    assert order == ["reading", "following", "left", "following"]
    # One that is suspended is not waited for.
    suspended = ahead.read(each for each in [3, 4, 5])
    assert next(suspended) == 3
    assert list(ahead.read(following())) == [2]
    assert list(suspended) == [4, 5]


def test_an_iterator_that_the_reader_itself_frees():
    """The garbage collector may run there: numbers are restored at the thread's end."""

    def source():
        numbers.drawn += 1
        yield 1
        taken.wait(20)
        numbers.drawn += 1
        holder.pop().close()
        yield 2

    numbers, taken = Numbers(lambda: threading.current_thread().name), threading.Event()
    holder = [ReadAhead(1, numbers).read(source())]
    assert next(holder[0]) == 1
    taken.set()
    wait_for_readers_to_end()
    assert numbers.restored == [(1, THREAD_NAME)]


def test_the_reader_ends_when_the_iterator_is_deleted():
    read = []
    source = counting(read)  # referenced here, so that only the reader can close it
    ahead = ReadAhead(2).read(source)
    next(ahead)
    assert len(readers()) == 1
    del ahead
    wait_for_readers_to_end()
    assert read[-1] == "closed"


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_exception_of_the_source_is_raised_in_its_place_with_its_traceback(error):
    def source():
        yield 1
        raise error("broken")

    ahead = ReadAhead(3).read(source())
    assert next(ahead) == 1
    with pytest.raises(error, match="broken") as caught:
        next(ahead)
    assert "source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    wait_for_readers_to_end()


def test_a_distributed_iteration_that_ends_early_ends_its_reader():
    options = InputOptions(experimental_per_replica_buffer_size=2)
    endless = make_numpy_dataset(np.arange(3)).batch(2).repeat()
    dataset = lone_strategy().experimental_distribute_dataset(endless, options)
    for _ in dataset:
        break
    wait_for_readers_to_end()
    assert dataset.element_spec == spec(None, dtype="int64")


def test_reading_ahead_runs_during_the_step():
    reading, go_on = threading.Event(), threading.Event()

    class Source:
        def __iter__(self):
            yield np.zeros(1)
            reading.set()
            assert go_on.wait(20)
            yield np.ones(1)

    options = InputOptions(experimental_per_replica_buffer_size=1)
    iterator = iter(lone_strategy().experimental_distribute_dataset(Source(), options))
    next(iterator)
    assert reading.wait(20)  # without a request
    go_on.set()
    assert next(iterator) == 1
    refusal(StopIteration, None, next, iterator)
    wait_for_readers_to_end()
