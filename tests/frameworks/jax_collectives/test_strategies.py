"""JAX's pytrees under strategies: averaged derivatives, and state in checkpoints."""

import numpy as np
import pytest

import collectives
import strategies

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3)]


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def loss(parameters, inputs):
    error = (inputs @ parameters["layers"][0] - 1) ** 2
    return error.mean(), error.sum()


def test_value_and_gradients_are_means(jax, comm):
    strategy = strategies.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).normal(size=(comm.size, 4, 3)).astype("float32")
    parameters = {"layers": [jax.numpy.arange(3.0)]}
    (value, aux), gradients = jax.jit(strategy.value_and_grad(loss, has_aux=True))(
        parameters, rows[comm.rank]
    )
    (wanted, _), wholly = jax.value_and_grad(loss, has_aux=True)(parameters, np.concatenate(rows))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    np.testing.assert_allclose(gradients["layers"][0], wholly["layers"][0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux, loss(parameters, rows[comm.rank])[1], rtol=1e-5)
    own = strategies.LocalSGDStrategy(sync_every=2).value_and_grad(lambda x: (x**2).sum())
    np.testing.assert_array_equal(own(jax.numpy.full(2, 1.0 + comm.rank))[1], 2.0 + 2 * comm.rank)


def test_pytrees_in_checkpoints(jax, comm, tmp_path):
    from strategies.jax import PytreeState

    strategy, jnp = strategies.MultiWorkerMirroredStrategy(), jax.numpy
    path = comm.broadcast_object(str(tmp_path / "state.safetensors"))
    value = {"layers": [jnp.arange(3.0) + comm.rank, jnp.ones(2, "bfloat16")], "step": comm.rank}
    state = PytreeState(strategy, value)
    assert state.value["layers"][0].tolist() == [0, 1, 2]
    assert state.value["step"] == 0
    state.value = jax.tree.map(lambda each: each + 1, state.value)
    strategies.Checkpoint(training=state).save(path)
    restored = PytreeState(strategy, value)
    checkpoint = strategies.Checkpoint(training=restored)
    checkpoint.restore(path)
    assert jax.tree.structure(restored.value) == jax.tree.structure(value)
    for one, other in zip(*map(jax.tree.leaves, (restored.value, state.value)), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="layers/0"):
        strategies.Checkpoint(training=PytreeState(strategy, {"layers": [jnp.ones(2)]})).restore(
            path
        )
    with pytest.raises(collectives.MismatchError):
        PytreeState(strategy, jnp.ones(2 + comm.rank))
