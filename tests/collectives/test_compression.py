"""Gradients that are compressed between nodes."""

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_digits

from collectives import Communicator, MismatchError
from collectives.compression import CompressedReducer
from collectives.transports.local import run

ALL = ("float16", "bfloat16", "powersgd(2)", "topk(0.25)")
SHAPES = [(24, 10), (10,), (), (4, 3, 5), (0, 7), (40, 6)]


def gradients(rank, dtype="float32", shapes=SHAPES):
    chance = np.random.default_rng([rank, 7])
    return [chance.standard_normal(shape).astype(dtype) for shape in shapes]


def on_nodes(node_of, function):
    """Call the function of a communicator of threads with these nodes; the results by rank."""

    def rank(transport):
        with Communicator(transport, node_of=node_of, deadline=30) as comm:
            return function(comm)

    return run(len(node_of), rank)


def means(size, **options):
    arrays = [gradients(rank, **options) for rank in range(size)]
    return [np.mean(each, 0) for each in zip(*arrays, strict=True)]


def check_same_on_all(results):
    for others in results[1:]:
        for mine, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("node_of", [[0, 1], [0, 1, 1], [0, 1, 0, 2]], ids=str)
@pytest.mark.parametrize(("compression", "digits"), [("float16", 11), ("bfloat16", 8)])
def test_narrow_elements(node_of, compression, digits):
    def reduce(comm):
        reducer = CompressedReducer(comm, compression)
        given = gradients(comm.rank)
        kept = [each.copy() for each in given]
        result = reducer.all_reduce_many(given)
        for each, before in zip(given, kept, strict=True):
            np.testing.assert_array_equal(each, before)
        elements = sum(each.size for each in given)
        assert reducer.bytes_between_nodes == (2 * elements if comm.local_rank == 0 else 0)
        return result

    results = on_nodes(node_of, reduce)
    check_same_on_all(results)
    for mean, result in zip(means(len(node_of)), results[0], strict=True):
        assert (result.dtype, result.shape) == (np.float32, mean.shape)
        np.testing.assert_allclose(result, mean, atol=6 * 2.0**-digits)
        assert result.size < 10 or np.any(result != mean), "nothing was rounded"


def test_a_mean_of_large_gradients_does_not_overflow():
    def reduce(comm):
        own = np.full(3, 5e4 + 4e3 * comm.rank, "f4")
        return CompressedReducer(comm, "float16").all_reduce_many([own])[0]

    for result in on_nodes([0, 0, 1, 1], reduce):
        np.testing.assert_allclose(result, 5.6e4, rtol=1e-3)


def test_power_sgd():
    """Matrices of that rank come whole; the others approach their sum over some steps."""
    exact = {1, 2, 4}
    steps = 60

    def reduce(comm):
        reducer = CompressedReducer(comm, "powersgd(2)")
        left, right = np.ones((30, 1)), np.arange(20.0)[None]
        low = left @ right * (comm.rank + 1)
        (whole,) = CompressedReducer(comm, "powersgd(2)").all_reduce_many([low], "sum")
        np.testing.assert_allclose(whole, left @ right * 6, atol=1e-9)
        given = gradients(comm.rank, "float64")
        first = reducer.all_reduce_many(given)
        sent = sum(sum(each) * 2 for each in [(24, 10), (4, 15), (40, 6)]) + 11
        assert reducer.bytes_between_nodes == (8 * sent if comm.local_rank == 0 else 0)
        totals = [each.copy() for each in first]
        for _ in range(steps - 1):
            for total, each in zip(totals, reducer.all_reduce_many(given), strict=True):
                total += each
        return first, totals

    results = on_nodes([0, 1, 1], reduce)
    check_same_on_all([first for first, _ in results])
    first, totals = results[0]
    for number, mean in enumerate(means(3, dtype="float64")):
        if number in exact:
            np.testing.assert_allclose(first[number], mean)
            continue
        assert np.linalg.matrix_rank(first[number].reshape(len(mean), -1)) == 2
        error = np.linalg.norm(totals[number] / steps - mean) / np.linalg.norm(mean)
        assert error < 0.2 < np.linalg.norm(first[number] - mean) / np.linalg.norm(mean)


def test_top_k():
    steps = 40

    def reduce(comm):
        reducer = CompressedReducer(comm, "topk(0.25)")
        given = gradients(comm.rank)
        first = reducer.all_reduce_many(given)
        kept = sum(-(-each.size // 4) for each in given)
        assert reducer.bytes_between_nodes == (8 * kept if comm.local_rank == 0 else 0)
        totals = [each.copy() for each in first]
        for _ in range(steps - 1):
            for total, each in zip(totals, reducer.all_reduce_many(given), strict=True):
                total += each
        whole = CompressedReducer(comm, "topk(1)").all_reduce_many(given, "sum")
        return first, totals, whole

    results = on_nodes([0, 1, 1], reduce)
    check_same_on_all([first for first, *_ in results])
    first, totals, whole = results[0]
    for number, mean in enumerate(means(3)):
        np.testing.assert_allclose(whole[number], mean * 3, rtol=1e-4, atol=1e-5)
        chosen = np.count_nonzero(first[number])
        assert chosen <= 2 * -(-mean.size // 4)
        np.testing.assert_allclose(totals[number] / steps, mean, atol=0.2)


@pytest.mark.parametrize("compression", ALL)
def test_what_is_exact(compression):
    """Other dtypes, and everything on one node."""

    def reduce(comm, arrays):
        reducer = CompressedReducer(comm, compression)
        for result, exact in zip(
            reducer.all_reduce_many(arrays, "sum"), comm.all_reduce_many(arrays), strict=True
        ):
            assert result.dtype == exact.dtype
            np.testing.assert_array_equal(result, exact)
        assert reducer.bytes_between_nodes == 0

    def others(comm):
        shapes = [(9, 9), (3,)]
        reduce(comm, [*gradients(comm.rank, "float16", shapes), np.arange(5) * comm.rank])

    on_nodes([0, 1], others)
    on_nodes([0, 0], lambda comm: reduce(comm, gradients(comm.rank)))


@pytest.mark.parametrize("compression", ALL)
def test_empty_and_diverged_gradients(compression):
    """No rank raises where gradients are infinite, nor where all are empty."""

    def reduce(comm):
        empty = np.empty((0, 3), np.float32)
        assert [each.shape for each in reducer_of(comm, [empty])] == [(0, 3)]
        assert reducer_of(comm, []) == []
        infinite = np.full((8, 8), np.inf, np.float32)
        infinite[0] = -np.inf
        (result,) = reducer_of(comm, [infinite])
        assert not np.isfinite(result).all()
        # As the program may set it, where one rank's gradient is subnormal.
        with np.errstate(all="raise"):
            reducer_of(comm, [np.full(2, 1e-45 if comm.rank == 1 else 1, np.float32)])

    def reducer_of(comm, arrays):
        return CompressedReducer(comm, compression).all_reduce_many(arrays)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_nodes([0, 1, 1], reduce)


def test_arrays_of_several_dtypes():
    def reduce(comm):
        low, high = gradients(comm.rank), gradients(comm.rank, "float64")
        mixed = [low[0], high[1], np.full(3, comm.rank), low[3], high[0]]
        return CompressedReducer(comm, "topk(1.0)").all_reduce_many(mixed)

    expected = means(2)
    for result in on_nodes([0, 1], reduce):
        kinds = [(0, "float32"), (1, "float64"), (None, "float64"), (3, "float32"), (0, "float64")]
        for each, (number, dtype) in zip(result, kinds, strict=True):
            exact = np.full(3, 0.5) if number is None else expected[number]
            assert each.dtype == dtype
            np.testing.assert_allclose(each, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("compressions", "error", "text"),
    [
        (("gzip", "gzip"), ValueError, "compression='gzip': must be 'float16'"),
        (("float16", "powersgd(0)"), ValueError, r"powersgd\(0\).*integer of at least 1"),
        (("topk(2)", "topk(2)"), ValueError, "above 0 and at most 1"),
        (("topk(nan)", "topk(nan)"), ValueError, "above 0 and at most 1"),
        ((16, 16), ValueError, "compression='16'"),
        (("float16", "bfloat16"), ValueError, "'bfloat16' on rank 1: must be the same"),
    ],
)
def test_wrong_compressions(compressions, error, text):
    def make(comm):
        with pytest.raises(error, match=text):
            CompressedReducer(comm, compressions[comm.rank])

    on_nodes([0, 1], make)


def test_wrong_calls():
    """Every rank raises, and the next call works."""

    def calls(comm):
        reducer = CompressedReducer(comm, "powersgd(1)")
        given = gradients(comm.rank)

        def raises(error, text, *arguments):
            with pytest.raises(error, match=text):
                reducer.all_reduce_many(*arguments)

        raises(ValueError, "must be 'sum' or 'mean'", given, "max")
        raises(ValueError, "op='some'", given, "some")
        raises(TypeError, "masked array", [np.ma.masked_array(given[0])])
        raises(MismatchError, "mean", given, ("mean", "sum")[comm.rank])
        raises(MismatchError, "op='some'", given, ("mean", "some")[comm.rank])
        reducer.all_reduce_many(given)
        raises(MismatchError, "all_reduce_many", given[comm.rank :])
        raises(ValueError, "other arrays need another name", given[1:])
        raises(ValueError, "other arrays need", given, "sum")
        reducer.all_reduce_many(given[1:], "sum", of="others")
        with pytest.raises(MismatchError, match="of 'others'"):
            reducer.all_reduce_many(given[1:], "sum", of=("others", "own")[comm.rank])
        again = reducer.all_reduce_many(given)
        np.testing.assert_allclose(again[1], means(2)[1], rtol=1e-6)

    on_nodes([0, 1], calls)


@pytest.mark.parametrize("compression", ["powersgd(2)", "topk(0.25)"])
def test_steps_that_leave_no_trace(compression):
    """Failed ones and infinite ones; those after them are as without them, to the bit."""

    def failing(*arguments):
        raise ArithmeticError("of the last dtype")

    def reduce(comm):
        reducer, undisturbed = (CompressedReducer(comm, compression) for _ in range(2))
        exact = np.full(3, comm.rank + 1, np.float16)
        given = [*gradients(comm.rank), exact, *gradients(comm.rank, "float64")]
        with pytest.raises(TypeError):
            reducer.all_reduce_many([*given, np.ones(2, np.longdouble)])
        for _ in range(2):
            reducer.all_reduce_many(given)
            undisturbed.all_reduce_many(given)
        compressor = reducer._lists[None].parts[1].compressor
        compressor.sum = failing
        with pytest.raises(ArithmeticError, match="of the last dtype"):
            reducer.all_reduce_many(given)
        del compressor.sum
        check_same_on_all([each.all_reduce_many(given) for each in (reducer, undisturbed)])
        infinite = [each.copy() for each in given]
        if comm.rank == 1:
            infinite[-1][3:] = np.nan
            infinite[0][1, 2] = np.inf
        found = reducer.all_reduce_many(infinite)
        assert not np.isfinite(found[0]).all()
        assert not np.isfinite(found[-1]).all()
        # Of one that is never compressed.
        overflowing = [each * np.float16(np.inf) if each is exact else each for each in given]
        assert np.isinf(reducer.all_reduce_many(overflowing)[len(SHAPES)]).all()
        for _ in range(2):
            check_same_on_all([each.all_reduce_many(given) for each in (reducer, undisturbed)])

    on_nodes([0, 1], reduce)


def test_a_step_that_is_completed_on_one_node_alone():
    """Its repetition would be added to the next step of the other node."""

    def reduce(comm):
        reducer = CompressedReducer(comm, "powersgd(1)")
        reducer.all_reduce_many([np.ones((2, 2))])
        if comm.rank == 2:
            reducer._lists[None].steps += 1  # as if its node alone had completed a second one
        with pytest.raises(MismatchError, match=r"odd step.*\n.*\n.*even step"):
            reducer.all_reduce_many([np.ones((2, 2))])
        reducer.forget(None)
        return reducer.all_reduce_many([np.full((2, 2), comm.rank)], "sum")[0][0, 0]

    assert on_nodes([0, 0, 1], reduce) == [pytest.approx(3)] * 3


def test_power_sgd_after_zeros():
    """A matrix of that rank still comes whole: its factors don't start from zeros."""

    def reduce(comm):
        reducer = CompressedReducer(comm, "powersgd(2)")
        low = np.outer(np.arange(30.0), np.ones(20)) + np.outer(np.arange(30) % 7, np.arange(20))
        low *= comm.rank + 1
        for given in (low * 0, low * 0, low):
            (result,) = reducer.all_reduce_many([given], "sum")
            np.testing.assert_allclose(result, given / (comm.rank + 1) * 3, atol=1e-9)

    on_nodes([0, 1], reduce)


def test_forgotten_names_deadlines_and_the_end():
    """The list of a forgotten name begins anew, on all ranks."""

    def calls(comm):
        reducer = CompressedReducer(comm, "topk(0.25)")
        given = np.arange(1.0, 9) * (1 + comm.rank)
        exact = np.arange(1.0, 9) * 3
        comm.deadline = 20
        first = reducer.all_reduce_many([given], "sum", of="it")[0]
        assert {reducer._node.deadline, reducer._leaders.deadline} == {20}
        assert np.count_nonzero(first) == 2
        reducer.forget("it")
        reducer.forget("unknown")
        for result in (first, reducer.all_reduce_many([given], "sum", of="it")[0]):
            np.testing.assert_array_equal(result, np.where(exact > 18, exact, 0))
        if comm.rank == 1:
            reducer.forget("it")
        with pytest.raises(MismatchError, match=r"odd step.*\n.*even step"):
            reducer.all_reduce_many([given], "sum", of="it")
        reducer.forget("it")
        reducer.all_reduce_many([given], "sum", of="it")
        assert len(reducer._lists) == 1
        reducer.close()
        with pytest.raises(RuntimeError, match="closed"):
            reducer.all_reduce_many([given], "sum", of="it")

    on_nodes([0, 1], calls)


def train(reduce, rank, size, steps=150, batch=96):
    """A network with a hidden layer on digits; the share of test images that it recognizes."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    tested, trained = slice(None, 400), np.arange(400, len(images))
    chance = np.random.default_rng(0)
    first = (chance.standard_normal((64, 48)) / 8).astype(np.float32)
    second = (chance.standard_normal((48, 10)) / 7).astype(np.float32)
    bias = np.zeros(10, np.float32)
    for _ in range(steps):
        own = chance.choice(trained, batch, replace=False)[rank::size]
        hidden = np.maximum(images[own] @ first, 0)
        scores = hidden @ second + bias
        scores = np.exp(scores - scores.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        scores[np.arange(len(own)), labels[own]] -= 1
        scores /= len(own)
        back = (scores @ second.T) * (hidden > 0)
        steps_of = reduce([images[own].T @ back, hidden.T @ scores, scores.sum(0)])
        for weights, gradient in zip((first, second, bias), steps_of, strict=True):
            weights -= 0.5 * gradient
    guessed = (np.maximum(images[tested] @ first, 0) @ second + bias).argmax(1)
    return np.mean(guessed == labels[tested])


def test_convergence():
    def accuracies(comm):
        def exact(arrays):
            return comm.all_reduce_many(arrays, "mean")

        compressed = [CompressedReducer(comm, each).all_reduce_many for each in ALL]
        return [train(each, comm.rank, comm.size) for each in (exact, *compressed)]

    for exact, *others in on_nodes([0, 1, 1], accuracies):
        assert exact > 0.9
        assert min(others) > exact - 0.03, dict(zip(ALL, others, strict=True))


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_between_processes(comm):
    from mpi4py import MPI

    with Communicator(MPI.COMM_WORLD, deadline=60, node_of=[0, 1, 1]) as group:
        for compression in ALL:
            reducer = CompressedReducer(group, compression)
            for _ in range(3):
                result = reducer.all_reduce_many(gradients(comm.rank))
            for each, due in zip(result, means(3), strict=True):
                # The others approximate arrays, and return the errors in later calls.
                if compression in ("float16", "bfloat16") or each.ndim == 0:
                    np.testing.assert_allclose(each, due, atol=0.02)
            check_same_on_all(comm.all_gather_object(result))


@pytest.mark.parametrize("scale", [1e-24, 1e24])
def test_powersgd_of_large_and_small_gradients(scale):
    def steps(comm):
        reducer = CompressedReducer(comm, "powersgd(2)")
        chance = np.random.default_rng(comm.rank)
        # The sum of two matrices of rank 1 is a matrix of rank 2.
        left, right = chance.standard_normal((2, 30)), chance.standard_normal((2, 20))
        given = (scale * np.outer(left[0], right[0])).astype("float32")
        for _ in range(4):
            (result,) = reducer.all_reduce_many([given], "sum")
        return given, result

    (first, result), (second, _) = on_nodes([0, 1], steps)
    np.testing.assert_allclose(result, first + second, rtol=0, atol=1e-4 * scale)
