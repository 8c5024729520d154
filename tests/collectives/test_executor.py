"""The executor of schedules, on threads of this process: any size, root, length and buffer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import algorithms
from collectives.communicator import Communicator
from collectives.execution.executor import Plan, PlanKey
from collectives.execution.host_memory import HostMemory
from collectives.reductions.reduction import ReduceOp
from collectives.schedules.schedule import split_lengths
from collectives.schedules.spec import spec_of
from collectives.transports.base import abandoned
from collectives.transports.local import LocalTransport, run
from tests.collectives.oracle import reduced, traffic, value, values
from tests.slow import slow

# Powers of two and others; the verifier sees to larger ones.
SIZES = [1, 2, 5, 8, *slow(3, 4, 6, 7, 9)]


def over(size, function):
    """The results of `function(communicator)` on each of `size` threads."""
    return run(size, lambda transport: function(Communicator(transport)))


def pairs_of(*collectives):
    return [pair for pair in algorithms.pairs() if pair[0] in collectives]


@pytest.mark.parametrize("algorithm", algorithms.names("all_reduce"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 5, 64, 1001])
def test_all_reduce(size, algorithm, length):
    expected = reduced("sum", values(size, length))

    def both(comm):
        array = value(comm.rank, length)
        apart = comm.all_reduce(array, algorithm=algorithm)
        np.testing.assert_array_equal(array, value(comm.rank, length))
        assert comm.all_reduce(array, out=array, algorithm=algorithm) is array
        return apart, array

    for apart, in_place in over(size, both):
        np.testing.assert_array_equal(apart, expected)
        np.testing.assert_array_equal(in_place, expected)


@pytest.mark.parametrize(("collective", "algorithm"), pairs_of("reduce", "broadcast"))
@pytest.mark.parametrize("size", SIZES)
def test_rooted_on_whole_buffers(collective, algorithm, size):
    def every_root(comm):
        for root in range(size):
            array = value(comm.rank, 23)
            if collective == "reduce":
                result = comm.reduce(array, root=root, algorithm=algorithm)
                expected = reduced("sum", values(size, 23)) if comm.rank == root else None
            else:
                result = comm.broadcast(array, root=root, algorithm=algorithm)
                expected = value(root, 23)
            np.testing.assert_array_equal(result, expected)

    over(size, every_root)


@pytest.mark.parametrize(("collective", "algorithm"), pairs_of("gather", "all_gather"))
@pytest.mark.parametrize("size", SIZES)
def test_gathering_ragged_rows(collective, algorithm, size):
    def own(rank):
        return value(rank, ((rank * 3) % 4, 2))

    def every_root(comm):
        for root in range(size if collective == "gather" else 1):
            if collective == "all_gather":
                joined = comm.all_gather(own(comm.rank), algorithm=algorithm)
            else:
                joined = comm.gather(own(comm.rank), root=root, algorithm=algorithm)
            wanted = collective == "all_gather" or comm.rank == root
            expected = np.concatenate([own(rank) for rank in range(size)]) if wanted else None
            np.testing.assert_array_equal(joined, expected)

    over(size, every_root)


@pytest.mark.parametrize(("collective", "algorithm"), pairs_of("scatter", "reduce_scatter"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 3, 20])
def test_scattering_uneven_rows(collective, algorithm, size, rows):
    def every_root(comm):
        for root in range(size if collective == "scatter" else 1):
            if collective == "scatter":
                whole = value(root, (rows, 3))
                given_array = whole if comm.rank == root else None
                block = comm.scatter(given_array, root=root, algorithm=algorithm)
            else:
                whole = reduced("sum", values(size, (rows, 3)))
                block = comm.reduce_scatter(value(comm.rank, (rows, 3)), algorithm=algorithm)
            np.testing.assert_array_equal(block, np.array_split(whole, size)[comm.rank])

    over(size, every_root)


@pytest.mark.parametrize("algorithm", algorithms.names("all_to_all"))
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(size, algorithm):
    def block(source, target):
        return value(source + 10 * target, (source, target % 3 + 1))

    def exchange(comm):
        blocks = [block(comm.rank, peer) for peer in range(size)]
        for peer, received in enumerate(comm.all_to_all(blocks, algorithm=algorithm)):
            np.testing.assert_array_equal(received, block(peer, comm.rank))

    over(size, exchange)


@given(
    size=st.integers(1, 9),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    algorithm=st.sampled_from(algorithms.names("all_reduce")),
    op=st.sampled_from(["sum", "min", "max", "mean"]),
    dtype=st.sampled_from(["int32", "float64", "float16"]),
)
def test_any_length_size_op_and_dtype_one_after_the_other(size, lengths, algorithm, op, dtype):
    def calls(comm):
        return [
            comm.all_reduce(value(comm.rank, length, dtype), op, algorithm=algorithm)
            for length in lengths
        ]

    for results in over(size, calls):
        for length, result in zip(lengths, results, strict=True):
            np.testing.assert_array_equal(result, reduced(op, values(size, length, dtype)))


@given(size=st.integers(2, 9), length=st.integers(0, 50), data=st.data())
def test_all_ranks_get_the_same_bits(size, length, data):
    """Rounding, signs of zeros and NaN payloads must not depend on the reducing rank."""
    numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, float("nan")])
    algorithm = data.draw(st.sampled_from(algorithms.names("all_reduce")))
    op = data.draw(st.sampled_from(["sum", "min", "max", "product"]))
    rows = st.lists(numbers, min_size=length, max_size=length)
    arrays = [np.array(data.draw(rows), np.float32) for _ in range(size)]
    for rank, array in enumerate(arrays):
        array[np.isnan(array)] = _nan_with_payload(rank + 1)
    results = over(
        size, lambda comm: comm.all_reduce(arrays[comm.rank], op, algorithm=algorithm).tobytes()
    )
    assert len(set(results)) == 1


def _nan_with_payload(payload):
    return np.uint32(0x7FC00000 + payload).view(np.float32)


@pytest.mark.parametrize("size", [5, *slow(3)])
@pytest.mark.parametrize("dtype", [np.complex64, *slow(np.complex128)])
def test_single_complex_products_have_the_same_bits_too(size, dtype):
    """NumPy rounds differently where it multiplies a single number in place."""
    generator = np.random.default_rng(size)
    for _ in range(50):
        numbers = generator.standard_normal((size, 2)).view(complex).astype(dtype)

        def product(comm, numbers=numbers):
            return comm.all_reduce(numbers[comm.rank], "product", algorithm="doubling").tobytes()

        assert len(set(over(size, product))) == 1


class CountingTransport(LocalTransport):
    """Counts the messages."""

    sent = 0
    nbytes = 0

    def exchange(self, sends, receives):
        self.sent += len(sends)
        self.nbytes += sum(len(buffer) for _, buffer in sends)
        super().exchange(sends, receives)


@pytest.mark.parametrize("pair", algorithms.pairs())
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_executor_sends_what_the_cost_model_counts(pair, size):
    collective, algorithm = pair
    expected = traffic(collective, algorithm, size, size * 16)

    def one_rank(transport):
        transport.__class__ = CountingTransport
        found = algorithms.find(collective, algorithm)
        chunks = found.chunks(size)
        length = 2 * size * spec_of(collective).buffers
        lengths = split_lengths(length, chunks).tolist()
        call = PlanKey(*pair, tuple(lengths), np.dtype(float), ReduceOp.SUM, 0, False)
        plan = Plan(transport, HostMemory(), call)
        plan.run(None, np.ones(length))
        return transport.sent, transport.nbytes

    counted = run(size, one_rank)
    assert counted == list(zip(*expected, strict=True))


class FailingTransport(LocalTransport):
    def exchange(self, sends, receives):
        raise OSError("the link is down")


def test_buffers_outlive_messages_that_may_go_on():
    """The messages are views that own nothing."""

    def one_rank(transport):
        transport.__class__ = FailingTransport
        call = PlanKey("all_reduce", "doubling", 4, np.dtype(float), ReduceOp.SUM, 0, True)
        source, target = np.ones(4), np.zeros(4)
        with pytest.raises(OSError, match="the link is down"):
            Plan(transport, HostMemory(), call).run(source, target)
        [held] = [each for each in abandoned if isinstance(each, tuple) and each[0] is source]
        abandoned.remove(held)
        return held[1] is target

    assert all(run(2, one_rank))


def test_a_plan_serves_other_buffers_and_the_same_one_again():
    def many_buffers(comm):
        kept = [value(comm.rank + number, 100) for number in range(20)]
        for _ in range(3):
            for number, array in enumerate(kept):
                result = comm.all_reduce(array, algorithm="ring")
                arrays = [value(rank + number, 100) for rank in range(comm.size)]
                np.testing.assert_array_equal(result, reduced("sum", arrays))

    over(3, many_buffers)


def test_results_alias_nothing():
    def twice(comm):
        given = value(comm.rank, 50)
        first = comm.all_reduce(given, algorithm="ring")
        kept = first.copy()
        comm.all_reduce(value(comm.rank + 5, 50), algorithm="ring")
        comm.reduce_scatter(value(comm.rank + 7, 50))
        np.testing.assert_array_equal(first, kept)
        assert not np.shares_memory(first, given)

    for size in (1, 3):
        over(size, twice)


def test_an_exception_in_one_thread_ends_the_others():
    def one_fails(comm):
        if comm.rank == 1:
            raise KeyError("the reason")
        comm.barrier()

    with pytest.raises(KeyError, match="the reason"):
        over(3, one_fails)
