"""Horovod's calls on tensors, eagerly and in a `tf.function`, and their gradients."""

from functools import partial

import numpy as np
import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

WAYS = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])


def ranks_of(comm):
    return np.arange(comm.size)[:, None] + np.array([1.0, -2.0, 4.0])


@WAYS
def test_reductions(tf, hvd, comm, compiled):
    every, size = ranks_of(comm), comm.size

    def program(x, whole, half):
        return {
            "average": hvd.allreduce(x),
            "sum": hvd.allreduce(x, average=False),
            "min": hvd.allreduce(x, op=hvd.Min),
            "max": hvd.allreduce(x, op=hvd.Max),
            "product": hvd.allreduce(x, op=hvd.Product),
            "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
            "compressed": hvd.allreduce(x, compression=hvd.Compression.fp16),
            "large, with integers": hvd.grouped_allreduce(
                [5e4 + 4e3 * comm.rank + x, tf.constant([100 + comm.rank], tf.int8)],
                compression=hvd.Compression.fp16,
            ),
            "large": hvd.allreduce(5e4 + 4e3 * comm.rank + x, compression=hvd.Compression.fp16),
            "compressed, whole": hvd.allreduce(whole, compression=hvd.Compression.fp16),
            "whole": hvd.allreduce(whole),
            "whole, scaled": hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.5),
            "half": hvd.allreduce(half),
            "several": hvd.grouped_allreduce([x, whole, half], op=hvd.Sum),
            "rows": hvd.reducescatter(tf.concat([x, x], 0), op=hvd.Sum),
            "several rows": hvd.grouped_reducescatter([tf.concat([x, x], 0)]),
        }

    own = tf.constant(every[comm.rank])
    given = own, tf.cast(own, tf.int32), tf.cast(own, tf.bfloat16)
    found = (tf.function(program) if compiled else program)(*given)
    sums, mean = every.sum(0), every.mean(0)
    part = np.array_split(np.concatenate([sums, sums]), size)[comm.rank]
    wanted = {
        "average": mean,
        "sum": sums,
        "min": every.min(0),
        "max": every.max(0),
        "product": every.prod(0),
        "scaled": 1.5 * sums,
        "compressed": mean,
        "large, with integers": [
            5e4 + 2e3 * (size - 1) + mean,
            np.array([100 + (size - 1) // 2]),
        ],
        "large": 5e4 + 2e3 * (size - 1) + mean,
        "compressed, whole": np.trunc(mean),
        "whole": np.trunc(mean),
        "whole, scaled": np.trunc(sums / 2),
        "half": mean,
        "several": [sums, sums, sums],
        "rows": part,
        "several rows": [part / size],
    }
    tf.nest.map_structure(
        lambda got, want: np.testing.assert_allclose(np.asarray(got, float), want, rtol=1e-2),
        found,
        wanted,
    )
    dtypes = [found["whole"].dtype, found["half"].dtype, found["compressed"].dtype]
    assert dtypes == [tf.int32, tf.bfloat16, tf.float64]


@WAYS
def test_movements(tf, hvd, comm, compiled):
    rank, size = comm.rank, comm.size
    splits = [0, *range(2, size + 1)]  # rank 0 gets no row

    def program(x, few):
        return (
            hvd.allgather(few),
            hvd.grouped_allgather([x, few]),
            hvd.broadcast(x, 1),
            hvd.alltoall(tf.range(2 * size) + 10 * rank),
            hvd.alltoall(tf.range(sum(splits)) + 10 * rank, splits),
        )

    x, few = tf.constant([rank + 0.5]), tf.fill([rank + 1, 2], rank)
    found = (tf.function(program) if compiled else program)(x, few)
    joined = np.concatenate([np.full((each + 1, 2), each) for each in range(size)])
    begin, count = sum(splits[:rank]), splits[rank]
    cut = [10 * each + begin + np.arange(count) for each in range(size)]
    wanted = (
        joined,
        [np.arange(size) + 0.5, joined],
        [1.5],
        np.concatenate([10 * each + 2 * rank + np.arange(2) for each in range(size)]),
        (np.concatenate(cut), [count] * size),
    )
    for got, want in zip(tf.nest.flatten(found), _flat(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


def _flat(nested):
    if isinstance(nested, tuple) or (isinstance(nested, list) and np.ndim(nested[0])):
        return [each for part in nested for each in _flat(part)]
    return [nested]


@WAYS
def test_gradients_have_horovods_factors(tf, hvd, comm, compiled):
    rank, size = comm.rank, comm.size
    calls = {
        "average": hvd.allreduce,
        "sum": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "gather": lambda x: hvd.allgather(x[: rank + 1]),
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": lambda x: hvd.alltoall(x, [1] * size)[0],
        "rows": lambda x: hvd.reducescatter(x, op=hvd.Sum),
        # Of which the gradients are IndexedSlices.
        "row of average": lambda x: tf.gather(hvd.allreduce(x), [0]),
        "row of gather": lambda x: tf.gather(hvd.allgather(x[:1]), [comm.size - 1]),
        "row of broadcast": lambda x: tf.gather(hvd.broadcast(x, 0), [0]),
    }

    def program(x):
        found = []
        for call in calls.values():
            with tf.GradientTape() as tape:
                tape.watch(x)
                result = call(x)
                factors = tf.range(1.0, 1 + len(result)) * (rank + 1)
                loss = tf.reduce_sum(result * factors)
            found.append(tape.gradient(loss, x))
        return found

    found = (tf.function(program) if compiled else program)(tf.range(1.0, 1 + size))
    places, weights = np.arange(1.0, size + 1), np.arange(1.0, size + 1)
    total = np.arange(1.0, 1 + size * (size + 1) // 2) * weights.mean()
    own = np.zeros(size)
    begin = rank * (rank + 1) // 2
    own[: rank + 1] = total[begin : begin + rank + 1]
    first = places == 1
    wanted = [
        places * weights.mean(),
        places * weights.sum(),
        own,
        places * weights.mean() * (rank == 1),
        (rank + 1) * weights,
        weights * size,
        first * weights.mean(),
        first * weights.mean() * (rank == size - 1),
        first * weights.mean() * (rank == 0),
    ]
    for name, got, want in zip(calls, found, wanted, strict=True):
        np.testing.assert_allclose(got, want, err_msg=name)


@WAYS
def test_second_derivatives(tf, hvd, comm, compiled):
    """As of a penalty for the gradient; those of rows that are joined, too."""
    size = comm.size

    def slices(x):
        joined = hvd.allreduce(tf.IndexedSlices(x, tf.range(size), tf.constant([size])))
        return tf.convert_to_tensor(joined)

    # The average over the ranks of the second derivative of the cubes of the result.
    calls = {
        "average": hvd.allreduce,
        "gather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 1),
        "alltoall": hvd.alltoall,
        "slices": slices,
        "a scalar": lambda x: hvd.allgather(x[0]),
    }

    def program(x):
        found = []
        for call in calls.values():
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(call(x) ** 3)
                slope = inner.gradient(loss, x)
                penalty = tf.reduce_sum(slope)
            found += [slope, outer.gradient(penalty, x)]
        return found

    own = np.arange(1.0, 1 + size) + comm.rank
    mean = np.arange(1.0, 1 + size) + (size - 1) / 2
    root = (np.arange(1.0, 1 + size) + 1) * (comm.rank == 1)
    first = own * (np.arange(size) == 0)
    wanted = [3 * mean**2, 6 * mean, 3 * own**2, 6 * own, 3 * root**2, 6 * root]
    # The gradients of these are averages, which the second derivative averages again.
    wanted[3], wanted[5] = 6 * own / size, 6 * root / size
    wanted += [
        3 * own**2,
        6 * own,
        3 * mean**2 / size,
        6 * mean / size**2,
        3 * first**2,
        6 * first / size,
    ]
    found = (tf.function(program) if compiled else program)(tf.constant(own))
    for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
        name = list(calls)[number // 2]
        np.testing.assert_allclose(got, want, err_msg=f"{name}, {number % 2}")


@WAYS
def test_gradients_that_a_tape_orders_otherwise_on_one_rank_are_refused(tf, hvd, comm, compiled):
    """Of several targets, by the numbers of all operations: here of a log of rank 0."""
    refused = []
    for extra in range(11):
        variables = [tf.Variable([1.0]) for _ in range(8)]

        def program(variables=variables, extra=extra):
            with tf.GradientTape() as tape:
                targets = [factor * hvd.allreduce(x) for factor, x in enumerate(variables[:4], 1)]
                for _ in range(extra if comm.rank == 0 else 0):
                    tf.reduce_mean(variables[0])
                calls = enumerate(variables[4:], 5)
                targets += [factor * hvd.allgather(x[:1])[:1] for factor, x in calls]
            return tape.gradient(targets, variables)

        wanted = [1, 2, 3, 4, *([5, 6, 7, 8] if comm.rank == 0 else [0] * 4)]
        try:
            slopes = (tf.function(program) if compiled else program)()
            np.testing.assert_allclose(tf.concat(slopes, 0), wanted)
        except hvd.HorovodInternalError as error:
            refused.append((extra, "gradient of call" in str(error)))
    numbers = [extra for extra, names_calls in refused if names_calls]
    assert len(numbers) == len(refused)
    assert 0 < len(numbers) < 11
    assert 0 not in numbers


def test_gradients_after_a_call_that_one_rank_repeats(tf, hvd, comm):
    """Calls are numbered once they have returned, and reductions of gradients are not.

    One rank may run eagerly, where the numbers go on after a step.
    """
    x = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.0))
    optimizer.build([x])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(x) ** 2)
        slope = tape.gradient(loss, x)
        optimizer.apply([slope], [x])
        return slope

    with pytest.raises(hvd.HorovodInternalError):
        (hvd.allreduce(x) if comm.rank else hvd.allreduce(tf.ones([2])))
    with pytest.raises(hvd.HorovodInternalError):
        (hvd.allreduce(x) if comm.rank else hvd.broadcast_([x], 0))
    one_way = tf.function(step) if comm.rank else step
    for _ in range(3):
        assert float(one_way()[0]) == 2


def test_calls_that_are_refused_on_every_rank(tf, hvd, comm):
    class Own:
        """A class as Horovod takes it."""

    x = tf.ones([2])
    slices = tf.IndexedSlices(x, [0, 1], [4])
    refused = {
        "average='name': must be a bool": lambda: hvd.allreduce(x, "name"),
        "alltoall: a tensor without axes": lambda: hvd.alltoall(tf.constant(1.0)),
        "were both given": lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        "by Sum or Average": lambda: hvd.allreduce(slices, op=hvd.Max),
        "must have rows": lambda: hvd.reducescatter(tf.constant(1.0)),
        "add up to 2": lambda: hvd.alltoall(x, [1] * (comm.size + 1)),
        "root_rank=9": lambda: hvd.broadcast(x, 9),
        "must be with op=Average": lambda: hvd.DistributedGradientTape(
            tf.GradientTape(), op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "has no gradient": lambda: _gradient_of_max(tf, hvd, x),
        "must be one of hvd.Compression": lambda: hvd.allreduce(x, compression=Own),
    }
    for text, call in refused.items():
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            call()
    with pytest.raises(AttributeError, match="use rank"):
        _ = hvd.rank_op
    with pytest.raises(hvd.HorovodInternalError, match="different shapes"):
        hvd.allreduce(tf.ones([comm.rank + 1]))
    np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), 2 * [comm.size])


def test_mismatches_that_no_tensor_shows(tf, hvd, comm):
    odd, x = comm.rank == 1, tf.ones([2, 1])
    slices = tf.IndexedSlices(x, [0, 1], [4, 1])
    op = hvd.Sum if odd else hvd.Average
    calls = {
        "op of slices": lambda: hvd.allreduce(slices, op=op),
        "shape of slices": lambda: hvd.allreduce(tf.IndexedSlices(x, [0, 1], [4 + odd, 1])),
        "op of compressed tensors": lambda: hvd.allreduce(
            x, op=op, compression=hvd.Compression.fp16
        ),
        "order": lambda: hvd.grouped_allreduce([x, slices] if odd else [slices, x]),
        "order of compressed tensors": lambda: hvd.grouped_allreduce(
            [x, [1]] if odd else [[1], x], compression=hvd.Compression.fp16
        ),
        "factor": lambda: hvd.allreduce(x, op=hvd.Sum, postscale_factor=2.0 + odd),
        "compiled": tf.function(lambda: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0 + odd)),
        "factor of rows": lambda: hvd.reducescatter(x, prescale_factor=2.0 + odd),
        **{
            f"name of {call.__name__}": partial(call, x, name=f"of {comm.rank}")
            for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter)
        },
        **{
            f"name of {call.__name__}": partial(call, [tf.Variable(x)], name=f"of {comm.rank}")
            for call in (hvd.grouped_allreduce, hvd.grouped_allgather)
        },
        "name of broadcast": lambda: hvd.broadcast(x, 0, name=f"of {comm.rank}"),
        "name of broadcast_": lambda: hvd.broadcast_([tf.Variable(x)], 0, name=f"of {comm.rank}"),
        "reduced": lambda: hvd.grouped_allreduce([x] * (comm.rank > 0)),
        "gathered": lambda: hvd.grouped_allgather([x] * (2 + odd)),
        "scattered": lambda: hvd.grouped_reducescatter([x] * (2 + odd)),
    }
    for name, call in calls.items():
        with pytest.raises(hvd.HorovodInternalError, match="the ranks called different"):
            call()
        np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), [[comm.size]] * 2, name)


def _gradient_of_max(tf, hvd, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        greatest = hvd.allreduce(x, op=hvd.Max)
    tape.gradient(greatest, x)


def test_variables_and_objects(tf, hvd, comm):
    first, second = tf.Variable([comm.rank, 2]), tf.Variable(comm.rank + 0.5)
    hvd.broadcast_variables([first, second], root_rank=1)
    assert ([*first.numpy()], second.numpy()) == ([1, 2], 1.5)
    assert hvd.allgather_object({"rank": comm.rank}, None, "name")[1] == {"rank": 1}
    assert hvd.broadcast_object(comm.rank, 1, None, "name") == 1
    hvd.broadcast_variables([], 0)
    with pytest.raises(hvd.HorovodInternalError, match="broadcast of"):
        hvd.broadcast_([first, second][: 1 + (comm.rank > 0)], 0)


def test_process_sets(tf, hvd, comm):
    last = hvd.add_process_set(range(1, comm.size))
    try:
        if last.included():
            x = tf.constant([comm.rank + 1.0])
            assert float(hvd.allreduce(x, process_set=last)[0]) == 1 + comm.size / 2
            assert float(hvd.broadcast(x, comm.size - 1, process_set=last)[0]) == comm.size
            assert [*hvd.allgather(x, process_set=last)] == [*range(2, comm.size + 1)]
    finally:
        hvd.remove_process_set(last)
