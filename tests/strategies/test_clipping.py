"""`clipnorm` and `global_clipnorm`: Keras' clipping in one process, on sums over replicas."""

import numpy as np
import pytest

from collectives import MismatchError
from strategies import (
    CentralStorageStrategy,
    IndexedSlices,
    LocalSGDStrategy,
    MirroredStrategy,
    Variable,
    VariableSynchronization,
    optimizers,
)
from strategies.optimizers.gradients import clip
from tests.strategies.parameter_servers import run_workers
from tests.strategies.support import refusal

LIMITS = [{"clipnorm": 1.5}, {"global_clipnorm": 1.5}]


def norm(*arrays):
    return np.sqrt(sum(np.sum(np.square(np.asarray(each, np.float64))) for each in arrays))


def keras_clipped(gradients, clipnorm=None, global_clipnorm=None):
    """`BaseOptimizer._clip_gradients` of Keras 3.15."""
    if clipnorm is not None:
        return [each * clipnorm / max(norm(each), clipnorm) for each in gradients]
    whole = norm(*gradients)
    return [each * global_clipnorm * min(1 / whole, 1 / global_clipnorm) for each in gradients]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: next(iter(limits)))
def test_the_numbers_are_keras(dtype, limits):
    chance = np.random.default_rng(3)
    for scale in (0.01, 0.5, 3.0):
        given = [np.asarray(scale * chance.normal(size=shape), dtype) for shape in [(3, 2), (), 4]]
        kept = [each.copy() for each in given]
        expected = keras_clipped([each.astype(np.float64) for each in given], **limits)
        clipped = clip(given, limits.get("clipnorm"), limits.get("global_clipnorm"))
        for own, wanted in zip(clipped, expected, strict=True):
            assert own.dtype == dtype
            np.testing.assert_allclose(own, wanted, rtol=8 * np.finfo(dtype).eps)
        for each, before in zip(given, kept, strict=True):
            np.testing.assert_array_equal(each, before)


def test_numbers_that_are_none_are_not_hidden():
    """As in Keras."""
    nothing, ones = np.zeros(2), np.ones(2)
    endless, unknown = np.array([np.inf, 1.0]), np.array([np.nan, 1.0])
    for limits in ((1.0, None), (None, 1.0)):
        np.testing.assert_array_equal(clip([nothing], *limits)[0], nothing)
        np.testing.assert_array_equal(clip([unknown], *limits)[0], [np.nan] * 2)
    np.testing.assert_array_equal(clip([endless], 1.0, None)[0], [np.nan, 0.0])
    for each in clip([endless, ones], None, 1.0):
        np.testing.assert_array_equal(each, [np.nan] * 2)
    # The squares overflow 16-bit floats.
    (large,) = clip([np.full(4, 60000, np.float16)], 2.0, None)
    np.testing.assert_allclose(large, [1.0] * 4)
    (small,) = clip([np.array([3j, 4.0], np.complex64)], 1.0, None)
    np.testing.assert_allclose(small, [0.6j, 0.8], rtol=1e-6)


def test_slices_are_clipped_as_the_array_that_they_stand_for():
    rows = IndexedSlices(np.array([[3.0], [4.0], [24.0]]), [2, 2, 0], (4, 1))
    dense = rows.to_dense()
    for limits in ((5.0, None), (None, 5.0)):
        own, whole = clip([rows, np.ones(2)], *limits)[0], clip([dense, np.ones(2)], *limits)[0]
        np.testing.assert_allclose(own.to_dense(), whole)
        assert own.indices.tolist() == [0, 2]
    np.testing.assert_array_equal(clip([rows], None, None)[0].values, rows.values)


@pytest.mark.parametrize("kind", [optimizers.SGD, optimizers.Adam])
def test_limits_are_checked(kind):
    for wrong in (0, -1.0, "1", True, float("nan"), [1.0]):
        refusal(ValueError, "clipnorm=.*: must be a number above 0", kind, 0.1, clipnorm=wrong)
        refusal(ValueError, "global_clipnorm=.*above 0", kind, 0.1, global_clipnorm=wrong)
    text = r"clipnorm=1.0, global_clipnorm=2: only one of them can be given"
    refusal(ValueError, text, kind, 0.1, clipnorm=1.0, global_clipnorm=2)
    made = kind(0.1, clipnorm=np.float32(2))
    assert (made.clipnorm, made.global_clipnorm) == (2, None)


STRATEGIES = [MirroredStrategy, CentralStorageStrategy]


def gradients_of(rank):
    return [np.array([3.0, -4.0]) * (rank + 1), np.array([0.1 * (rank + 1)])]


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("limits", LIMITS, ids=lambda limits: next(iter(limits)))
@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_the_sums_are_clipped_and_not_their_parts(comm, kind, limits):
    strategy = kind(communicator=comm)
    with strategy.scope():
        variables = [Variable(np.zeros(2)), Variable(np.zeros(1))]
    optimizer = optimizers.SGD(1.0, **limits)
    pairs = list(zip(gradients_of(comm.rank), variables, strict=True))
    strategy.run(optimizer.apply_gradients, [pairs])
    sums = [sum(parts) for parts in zip(*map(gradients_of, range(comm.size)), strict=True)]
    for variable, wanted in zip(variables, keras_clipped(sums, **limits), strict=True):
        np.testing.assert_allclose(variable, -wanted, rtol=1e-14)
        assert len(set(comm.all_gather_object(variable.numpy().tobytes()))) == 1
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_limits_that_differ_are_refused_on_all(comm, strategy):
    with strategy.scope():
        variable = Variable(np.zeros(2))
    optimizer = optimizers.SGD(1.0, clipnorm=1.0 + min(comm.rank, 1))
    pairs = [(np.ones(2), variable)]
    text = refusal(MismatchError, "clipnorm=2.0", strategy.run, optimizer.apply_gradients, [pairs])
    assert set(comm.all_gather_object(text)) == {text}
    optimizer.clipnorm = -1.0 if comm.rank == 1 else 1.0
    text = refusal(MismatchError, "clipnorm=-1.0", strategy.run, optimizer.apply_gradients, [pairs])
    assert set(comm.all_gather_object(text)) == {text}
    optimizer.clipnorm = None
    strategy.run(optimizer.apply_gradients, [pairs])
    np.testing.assert_array_equal(variable, [-comm.size] * 2)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
def test_replicas_that_train_alone_clip_their_own(comm):
    """The outer optimizer clips the difference, which is the same on all replicas."""
    outer = optimizers.SGD(1.0, global_clipnorm=0.25)
    strategy = LocalSGDStrategy(sync_every=2, outer_optimizer=outer, communicator=comm)
    with strategy.scope():
        variable = Variable(np.zeros(2))
    optimizer = optimizers.SGD(1.0, clipnorm=1.0)
    step = [[(np.array([3.0, -4.0]) * (comm.rank + 1), variable)]]
    strategy.run(optimizer.apply_gradients, step)
    np.testing.assert_allclose(variable.local, [-0.6, 0.8], rtol=1e-14)
    strategy.run(optimizer.apply_gradients, step)
    # Two steps of length 1 in the same direction; then one of a quarter, from the initial value.
    np.testing.assert_allclose(variable, [-0.15, 0.2], rtol=1e-14)
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_workers_of_parameter_servers_clip_what_they_push(comm):
    """The norm includes all gradients of a step, on any server; none is overwritten."""

    def work(strategy):
        served = Variable(np.zeros(2))
        own = Variable(np.zeros(1), synchronization=VariableSynchronization.ON_READ)
        optimizer = optimizers.SGD(1.0, global_clipnorm=1.0)
        gradients = [np.array([6.0, 0.0]), np.array([8.0])]
        if strategy.is_chief:
            pairs = list(zip(gradients, [served, own], strict=True))
            strategy.run(optimizer.apply_gradients, [pairs])
            np.testing.assert_allclose(served, [-0.6, 0.0], rtol=1e-14)
            np.testing.assert_allclose(own.local, [-0.8], rtol=1e-14)
            assert gradients[0].tolist() == [6.0, 0.0]

    run_workers(comm, 1, work)
