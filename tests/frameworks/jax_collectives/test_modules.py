"""Models of Flax and Equinox: their training states are pytrees like any other."""

import numpy as np
import pytest

import strategies

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

STEPS = 5


@pytest.fixture
def optax(jax):
    return pytest.importorskip("optax", reason="optax isn't installed")


def batches(size):
    """Of all ranks: steps × ranks × rows."""
    return np.random.default_rng(3).normal(size=(STEPS, size, 4, 3)).astype("float32")


def distance(outputs, inputs):
    return ((outputs - inputs.sum(axis=1, keepdims=True)) ** 2).mean()


def check_equal(jax, comm, found, wanted):
    """Bitwise on all ranks, and to what one process finds with the ranks' joined rows."""
    arrays = [np.asarray(each) for each in jax.tree.leaves(found)]
    assert len(set(comm.all_gather_object(b"".join(each.tobytes() for each in arrays)))) == 1
    for one, other in zip(arrays, jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_train_state_of_flax(jax, optax, comm, tmp_path):
    linen = pytest.importorskip("flax.linen", reason="flax isn't installed")
    from flax.training.train_state import TrainState

    from strategies.jax import PytreeState

    model = linen.Sequential([linen.Dense(5), linen.tanh, linen.Dense(1)])

    def state_of(seed):
        weights = model.init(jax.random.key(seed), np.zeros((1, 3), "float32"))
        return TrainState.create(apply_fn=model.apply, params=weights, tx=optax.adam(0.01))

    def loss(weights, inputs):
        return distance(model.apply(weights, inputs), inputs)

    def trained(value_and_grad, state, inputs):
        value, gradients = value_and_grad(state.params, inputs)
        return value, state.apply_gradients(grads=gradients)

    strategy = strategies.MultiWorkerMirroredStrategy()
    state, alone = PytreeState(strategy, state_of(comm.rank)), state_of(0)
    step = jax.jit(lambda *given: trained(strategy.value_and_grad(loss), *given))
    step_alone = jax.jit(lambda *given: trained(jax.value_and_grad(loss), *given))
    for rows in batches(comm.size):
        value, state.value = step(state.value, rows[comm.rank])
        wanted, alone = step_alone(alone, np.concatenate(rows))
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    assert state.value.step == STEPS
    check_equal(jax, comm, state.value, alone)
    checkpoint = strategies.Checkpoint(state=state)
    path = comm.broadcast_object(str(tmp_path / "flax"))
    checkpoint.save(path)
    state.value = state_of(comm.rank + 7)
    checkpoint.restore(path)
    check_equal(jax, comm, state.value, alone)


def test_modules_of_nnx(jax, calls, optax, comm):
    nnx = pytest.importorskip("flax.nnx", reason="flax isn't installed")

    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)])
            self.dropout = nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, inputs):
            first, second = self.layers
            return second(self.dropout(jax.nn.tanh(first(inputs))))

    def trained_by(reduce):
        @nnx.jit
        def step(model, optimizer, inputs):
            value, gradients = nnx.value_and_grad(lambda each: distance(each(inputs), inputs))(
                model
            )
            value, gradients = reduce((value, gradients))
            optimizer.update(model, gradients)
            return value

        return step

    model, alone = Model(comm.rank), Model(0)
    # Keys of random numbers, too.
    nnx.update(model, calls.broadcast(nnx.state(model)))
    pairs = [
        (each, nnx.Optimizer(each, optax.adam(0.01), wrt=nnx.Param)) for each in (model, alone)
    ]
    step = trained_by(lambda tree: calls.all_reduce(tree, "mean"))
    step_alone = trained_by(lambda tree: tree)
    for rows in batches(comm.size):
        value = step(*pairs[0], rows[comm.rank])
        np.testing.assert_allclose(value, step_alone(*pairs[1], np.concatenate(rows)), rtol=1e-4)
    check_equal(jax, comm, nnx.state(model, nnx.Param), nnx.state(alone, nnx.Param))


def test_modules_of_equinox(jax, calls, optax, comm):
    equinox = pytest.importorskip("equinox", reason="equinox isn't installed")
    from strategies.jax import PytreeState

    def model_of(seed):
        return equinox.nn.MLP(3, 1, 5, 1, key=jax.random.key(seed))

    optimizer = optax.adam(0.01)

    def trained_by(reduce):
        @equinox.filter_jit
        def step(model, state, inputs):
            value, gradients = equinox.filter_value_and_grad(
                lambda each: distance(jax.vmap(each)(inputs), inputs)
            )(model)
            value, gradients = reduce((value, gradients))
            updates, state = optimizer.update(gradients, state)
            return value, equinox.apply_updates(model, updates), state

        return step

    strategy = strategies.MultiWorkerMirroredStrategy()
    # Functions, such as those of activations, are no arrays.
    with pytest.raises(
        TypeError, match="PytreeState: activation is a custom_jvp: must be an array or a"
    ):
        PytreeState(strategy, model_of(0))
    arrays, functions = equinox.partition(model_of(comm.rank), equinox.is_array)
    model = equinox.combine(PytreeState(strategy, arrays).value, functions)
    alone = model_of(0)
    state, state_alone = (
        optimizer.init(equinox.filter(each, equinox.is_array)) for each in (model, alone)
    )
    step = trained_by(lambda tree: calls.all_reduce(tree, "mean"))
    step_alone = trained_by(lambda tree: tree)
    for rows in batches(comm.size):
        value, model, state = step(model, state, rows[comm.rank])
        wanted, alone, state_alone = step_alone(alone, state_alone, np.concatenate(rows))
        np.testing.assert_allclose(value, wanted, rtol=1e-4)
    check_equal(
        jax, comm, equinox.filter(model, equinox.is_array), equinox.filter(alone, equinox.is_array)
    )
