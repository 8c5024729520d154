"""Errors of collectives reach the caller as themselves, from a `tf.function` too."""

import numpy as np
import pytest

import collectives

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2), pytest.mark.timeout_seconds(300)]


def test_a_mismatch(tf, strategy, comm):
    own = tf.ones([comm.rank + 1])

    def reduced():
        return strategy.reduce("SUM", own, axis=None)

    def replica():
        return tf.distribute.get_replica_context().all_reduce("SUM", own)

    in_run = tf.function(lambda: strategy.run(replica))

    @tf.function
    def looped():
        for _ in tf.range(2):
            strategy.run(replica)

    for call in (reduced, tf.function(reduced), lambda: strategy.run(replica), in_run):
        # The line is the program's, not one of TensorFlow's.
        with pytest.raises(collectives.ShapeMismatchError, match=r"float32\[1\].*test_errors\.py:"):
            call()
        total = tf.function(lambda: strategy.reduce("SUM", tf.ones([2]), axis=None))()
        np.testing.assert_array_equal(total, [comm.size] * 2)
    with pytest.raises(collectives.ShapeMismatchError):
        looped()


def test_a_mistake_of_one_rank(tf, strategy, comm):
    """It is raised on all ranks: a nest of other keys would add up what doesn't belong together."""
    odd, ones, square = comm.rank == 1, tf.ones([3]), tf.ones([3, 3])
    with strategy.scope():
        total = tf.VariableAggregation.SUM
        first, second = (tf.Variable(ones, aggregation=total) for _ in range(2))
        mean = tf.Variable(ones, aggregation=tf.VariableAggregation.MEAN)

    def reduced(op="SUM", value=ones, options=None):
        replica = tf.distribute.get_replica_context
        return strategy.run(lambda: replica().all_reduce(op, value, options))

    def gathered(value):
        replica = tf.distribute.get_replica_context
        return strategy.run(lambda: replica().all_gather(value, 0))

    def shift():
        (first.assign_sub if odd else first.assign_add)(ones)

    def in_order():
        for each in (second, first) if odd else (first, second):
            each.assign_add(ones)

    def stepped(decay, excluded=()):
        with strategy.scope():
            weights = tf.keras.Variable(ones)
            optimizer = tf.keras.optimizers.SGD(weight_decay=decay)
            optimizer.exclude_from_weight_decay(var_names=list(excluded))
        step = tf.function(lambda: optimizer.apply([ones], [weights]))
        strategy.run(step)

    with strategy.scope():
        weights = [tf.keras.Variable(ones) for _ in range(2)]
        sgd, older = tf.keras.optimizers.SGD(), tf.compat.v1.train.GradientDescentOptimizer(1.0)

    def reversed_on_one(optimizer, variables):
        given = list(zip((ones, 2 * ones), variables, strict=True))
        strategy.run(lambda: optimizer.apply_gradients(given[::-1] if odd else given))

    calls = {
        r"a step of SGD{weight_decay.*of variables \d, \d": lambda: reversed_on_one(sgd, weights),
        r"a reduction, of variables \d, \d": lambda: reversed_on_one(older, [first, second]),
        "all_reduce refused by ValueError": lambda: reduced("FOO" if odd else "SUM"),
        "all_reduce refused by TypeError": lambda: reduced(options=3 if odd else None),
        r"assign_sub of variable \d": tf.function(lambda: strategy.run(shift)),
        r"assign_add of variable \d.*\n.*assign_add of variable \d": lambda: strategy.run(in_order),
        "a step of SGD{.*weight_decay: 0.2": lambda: stepped(0.1 + 0.1 * odd),
        "a step of SGD{.*without weight decay: .*bias": lambda: stepped(0.1, ["bias"] * odd),
        r"scatter_sub of variable \d": lambda: strategy.run(
            lambda: (mean.scatter_sub if odd else mean.scatter_add)(
                tf.IndexedSlices(tf.ones([1]), [0])
            )
        ),
        "assign_add refused by": lambda: strategy.run(
            lambda: first.assign_add("abc" if odd else ones)
        ),
        "experimental_distribute_dataset refused": lambda: strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(4) if odd else tf.data.Dataset.range(4).batch(2)
        ),
        "reduce refused by TypeError": lambda: strategy.reduce(
            "SUM", None if odd else ones, axis=None
        ),
        "dtype string": lambda: strategy.reduce(
            "SUM", tf.constant("a") if odd else ones, axis=None
        ),
        "gather: no axis 3": lambda: strategy.gather(ones, axis=3 * odd),
        r"reduce of \{'b': \*\}": lambda: strategy.reduce(
            "SUM", {"b" if odd else "a": ones}, axis=None
        ),
        r"mean|MEAN": lambda: strategy.reduce("MEAN" if odd else "SUM", ones, axis=None),
        r"MEAN of integers": lambda: strategy.reduce(
            "MEAN" if odd else "SUM", tf.ones([3], tf.int32), axis=None
        ),
        r"reduce of \{'a': \*\}": lambda: strategy.reduce(
            "SUM", {} if odd else {"a": tf.IndexedSlices(ones, tf.range(3))}, axis=None
        ),
        r"all_reduce of \{'c': \*\}": lambda: reduced(value={"c" if odd else "a": ones}),
        r"all_gather of \{'c': \*\}": lambda: gathered({"c" if odd else "a": ones}),
        "reduce over the axis 1": lambda: strategy.reduce("SUM", square, axis=int(odd)),
        "over the axis 0": tf.function(lambda: strategy.reduce("MEAN", square, axis=int(odd))),
        "axis=<tf.Tensor.*must be of int": lambda: strategy.reduce(
            "SUM", square, axis=tf.constant(0) if odd else 0
        ),
        "options is a str": lambda: strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(4).batch(2), "abc" if odd else None
        ),
        "axis=5: the value has 2 axes": lambda: strategy.reduce(
            "SUM", square, axis=5 if odd else 0
        ),
        "one of the 2 axes is there twice": lambda: strategy.reduce(
            "SUM", square, axis=(0, -2) if odd else 0
        ),
        "refused by ValueError": lambda: strategy.reduce("FOO" if odd else "SUM", ones, axis=None),
        r"reduce of \[\{'b': \*\}\]": tf.function(
            lambda: strategy.reduce("SUM", [{"b" if odd else "a": ones}], axis=None)
        ),
    }
    for text, call in calls.items():
        with pytest.raises(collectives.MismatchError, match=text):
            call()
        total = strategy.reduce("SUM", {"a": ones, "b": [ones]}, axis=None)
        np.testing.assert_array_equal(total["b"][0], [comm.size] * 3)
    rule = tf.VariableSynchronization.ON_READ if odd else tf.VariableSynchronization.AUTO
    with strategy.scope():
        with pytest.raises(collectives.MismatchError, match="ON_READ"):
            tf.Variable(1.0, synchronization=rule, aggregation=tf.VariableAggregation.SUM)
        with pytest.raises(collectives.MismatchError, match=r"shape=\[None\]"):
            tf.Variable(ones, shape=[None] if odd else None)
        with pytest.raises(collectives.MismatchError, match=r"aggregation=sum.*refused by"):
            tf.Variable(1.0, aggregation="sum" if odd else tf.VariableAggregation.SUM)
        with pytest.raises(TypeError, match="dtype string"):
            tf.Variable("a")
        with pytest.raises(collectives.MismatchError, match="refused by ZeroDivisionError"):
            tf.Variable(lambda: 1 / (1 - odd))


def test_a_deadline(tf, strategy, comm):
    before = comm.deadline
    function = tf.function(lambda: strategy.reduce("SUM", tf.ones([2]), axis=None))
    function()
    strategy.communicator.deadline = 1.0
    try:
        if comm.rank == 0:
            with pytest.raises(collectives.DeadlineExceededError):
                function()
    finally:
        strategy.communicator.deadline = before
    comm.barrier()


@pytest.mark.parametrize("kind", ["MultiWorkerMirroredStrategy", "LocalSGDStrategy"])
def test_a_step_without_run_is_logged(tf, ds, comm, kind, caplog):
    """It is right where the gradients are equal on all ranks."""
    arguments = (2,) if kind == "LocalSGDStrategy" else ()
    strategy = getattr(ds, kind)(*arguments, communicator=comm)
    with strategy.scope():
        weights = tf.keras.Variable([1.0, 2.0])
        optimizer = tf.keras.optimizers.Adam(0.1)
        optimizer.build([weights])

    def step():
        optimizer.apply_gradients([(tf.ones([2]), weights)])

    strategy.run(step)
    weights.assign([3.0, 4.0])
    optimizer.finalize_variable_values([weights])
    assert not caplog.messages
    for call in (step, tf.function(step)):
        call()
    (text,) = caplog.messages
    assert (
        "outside of run, where gradients are not summed over the ranks: where they differ, the"
        in text
    )
    assert text.endswith(f"Call the step by {kind}.run")
    np.testing.assert_allclose(weights.numpy(), [2.8, 3.8], rtol=1e-2)


def test_tensorflows_own_errors_are_unchanged(tf, strategy):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Incompatible shapes|must be equal"):
        tf.ones([2]) + tf.ones([3])
    failing = tf.function(lambda: tf.numpy_function(lambda: 1 / 0, [], tf.int64))
    with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError"):
        failing()


def test_what_cannot_be_communicated(tf, strategy):
    @tf.function(jit_compile=True)
    def compiled():
        return strategy.reduce("SUM", tf.ones([2]), axis=None)

    with pytest.raises(ValueError, match="jit_compile=True contains a collective"):
        compiled()
    for call in (strategy.gather, lambda each, axis: strategy.reduce("SUM", each, axis=None)):
        with pytest.raises(TypeError, match="dtype string: must be of numbers or bool"):
            call(tf.constant(["a"]), axis=0)
    for call in (strategy.gather, lambda each, axis: strategy.reduce("SUM", each, axis=None)):
        with pytest.raises(TypeError, match=r"a value of the replicas is None.*`run` return"):
            call(strategy.run(lambda: None), axis=0)


def test_what_is_no_dataset_of_batches(tf, strategy):
    rows = tf.data.Dataset.from_tensor_slices(np.ones((4, 2)))
    numbers = tf.data.Dataset.range(4)
    strategy.experimental_distribute_dataset(rows.batch(2))
    with pytest.raises(ValueError, match=r"elements are TensorSpec\(shape=\(\).*batch\(\) first"):
        strategy.experimental_distribute_dataset(numbers)
    with pytest.raises(TypeError, match=r"is given list: must be a tf\.data\.Dataset"):
        strategy.experimental_distribute_dataset([1.0, 2.0])
    with pytest.raises(TypeError, match=r"dataset_fn returned NoneType: must be a tf\.data"):
        strategy.distribute_datasets_from_function(lambda context: None)
