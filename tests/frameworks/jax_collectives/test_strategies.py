"""JAX's pytrees under strategies: averaged derivatives, and state in checkpoints."""

import time

import numpy as np
import pytest

import collectives
import strategies
from tests.strategies.parameter_servers import strategy_on

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def loss(parameters, inputs):
    error = (inputs @ parameters["layers"][0] - 1) ** 2
    return error.mean(), error.sum()


def test_value_and_gradients_are_means(jax, comm):
    from collectives.jax import original_errors

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
    other = strategy.value_and_grad(lambda x, y: (x * y).sum(), int(comm.rank > 0))
    if comm.size > 1:
        with pytest.raises(collectives.MismatchError, match="argnums 1"), original_errors():
            jax.block_until_ready(other(rows[0], rows[0]))
    own = strategies.LocalSGDStrategy(sync_every=2).value_and_grad(lambda x: (x**2).sum())
    np.testing.assert_array_equal(own(jax.numpy.full(2, 1.0 + comm.rank))[1], 2.0 + 2 * comm.rank)


def test_derivatives_within_a_loss(jax, comm):
    """Such as a penalty for the gradient, or a step in parameters whose result counts."""
    strategy = strategies.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(1).normal(size=(comm.size, 4, 3)).astype("float32")
    parameters = jax.numpy.arange(3.0) / 4

    def loss(weights, inputs):
        return jax.numpy.mean(jax.numpy.sin(inputs @ weights) + (inputs @ weights) ** 2)

    def outer(derivatives):
        def penalized(weights, inputs):
            value, gradients = derivatives(weights, inputs)
            return loss(weights - 0.1 * gradients, inputs) + value * (gradients**2).sum()

        return penalized

    once = strategy.value_and_grad(loss)
    found = jax.jit(strategy.value_and_grad(outer(once)))(parameters, rows[comm.rank])
    wanted = jax.value_and_grad(outer(jax.value_and_grad(loss)))(parameters, np.concatenate(rows))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    # In forward mode, too, and of three levels.
    _, tangent = jax.jvp(lambda each: once(each, rows[comm.rank]), (parameters,), (parameters,))
    _, exact = jax.jvp(
        lambda each: jax.value_and_grad(loss)(each, np.concatenate(rows)),
        (parameters,),
        (parameters,),
    )
    for one, other in zip(tangent, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4)
    thrice = strategy.value_and_grad(outer(strategy.value_and_grad(outer(once))))
    alone = jax.value_and_grad(outer(jax.value_and_grad(outer(jax.value_and_grad(loss)))))
    found = thrice(parameters, rows[comm.rank])
    for one, other in zip(found, alone(parameters, np.concatenate(rows)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)


@pytest.mark.ranks(3)
def test_compressed_gradients(jax, comm):
    """What is left out of a step is added to a later one, of another program, too."""
    from mpi4py import MPI

    def loss(parameters, inputs):
        return ((inputs @ parameters["kernel"]).sum(0) * weights + parameters["bias"]).sum()

    chance = np.random.default_rng(0)
    weights = chance.normal(size=5).astype("float32")
    rows = chance.normal(size=(comm.size, 12, 8)).astype("float32")
    parameters = {"kernel": jax.numpy.ones((8, 5)), "bias": jax.numpy.ones(5)}
    with collectives.Communicator(MPI.COMM_WORLD, deadline=30, node_of=[0, 1, 1]) as nodes:
        options = strategies.CommunicationOptions(compression="topk(0.25)")
        strategy = strategies.MultiWorkerMirroredStrategy(None, options, communicator=nodes)
        derivatives = jax.jit(strategy.value_and_grad(loss))
        exact, total = np.zeros((8, 5)), np.zeros((8, 5))
        for step in range(16):
            batches = rows[:, : 4 + step % 3]
            value, gradients = derivatives(parameters, batches[comm.rank])
            own = [jax.value_and_grad(loss)(parameters, each) for each in batches]
            np.testing.assert_allclose(value, np.mean([each for each, _ in own]), rtol=1e-4)
            exact += np.mean([each["kernel"] for _, each in own], axis=0)
            total += gradients["kernel"]
            assert np.count_nonzero(gradients["kernel"]) <= 2 * 10
        assert np.linalg.norm(total - exact) < 0.3 * np.linalg.norm(exact)
        (known,) = strategy.compressed._lists.values()
        assert "function 0: mean of float32[5], float32[8, 5]" in known.text
        # A batch has a list of its own.
        many = jax.vmap(derivatives, (None, 0))
        for length in (2, 3, 2):
            batch = np.stack([rows[comm.rank]] * length)
            _, apart = jax.block_until_ready(many(parameters, batch))
            assert apart["kernel"].shape == (length, 8, 5)
        assert len(strategy.compressed._lists) == 3
        with pytest.raises(NotImplementedError, match="has no derivative"):
            jax.jvp(derivatives, (parameters, rows[0]), (parameters, rows[0]))


def test_pytrees_in_checkpoints(jax, comm, tmp_path):
    from strategies.jax import PytreeState

    strategy, jnp = strategies.MultiWorkerMirroredStrategy(), jax.numpy
    path = comm.broadcast_object(str(tmp_path / "state.safetensors"))
    value = {"layers": [jnp.arange(3.0) + comm.rank, jnp.ones(2, "bfloat16")], "step": comm.rank}
    keys = PytreeState(strategy, {"one": jax.random.key(comm.rank), "many": [jax.random.key(7)]})
    assert jax.random.uniform(keys.value["one"]) == jax.random.uniform(jax.random.key(0))
    keys.value = jax.tree.map(lambda key: jax.random.fold_in(key, 1), keys.value)
    drawn = jax.random.uniform(keys.value["many"][0])
    strategies.Checkpoint(keys=keys).save(path)
    keys.value = jax.tree.map(lambda key: jax.random.fold_in(key, 2), keys.value)
    strategies.Checkpoint(keys=keys).restore(path)
    assert jax.random.uniform(keys.value["many"][0]) == drawn
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
    # Python's numbers, and NumPy's of 64 bits, are saved as JAX has them.
    counted = PytreeState(strategy, {"epoch": 0, "rate": 0.5, "seen": np.int64(1)})
    counted.value = {"epoch": 3, "rate": 0.25, "seen": np.int64(5)}
    strategies.Checkpoint(training=counted).save(f"{path}.counted")
    again = PytreeState(strategy, {"epoch": 0, "rate": 0.0, "seen": np.int64(0)})
    strategies.Checkpoint(training=again).restore(f"{path}.counted")
    assert (again.value["epoch"], again.value["rate"], again.value["seen"]) == (3, 0.25, 5)
    counted.value = {"epoch": 3_000_000_000, "rate": 0.0, "seen": 0}
    with pytest.raises(ValueError, match="that int32 lacks"):
        counted.saved_tensors()
    nested = PytreeState(strategy, {"a/b": jnp.zeros(2), "a": {"b": jnp.ones(2)}})
    assert sorted(nested.saved_tensors()) == ["a/b", "a~1b"]
    assert [nested.value["a/b"].tolist(), nested.value["a"]["b"].tolist()] == [[0, 0], [1, 1]]
    with pytest.raises(ValueError, match="step has numbers of int64 that int32 lacks"):
        PytreeState(strategy, {"step": np.int64(3_000_000_000)})
    with pytest.raises(ValueError, match="layers/0"):
        strategies.Checkpoint(training=PytreeState(strategy, {"layers": [jnp.ones(2)]})).restore(
            path
        )
    with pytest.raises(collectives.MismatchError):
        PytreeState(strategy, jnp.ones(2 + comm.rank))
    if comm.size > 1:
        with pytest.raises(collectives.MismatchError, match="PytreeState of 1 arrays"):
            PytreeState(strategy, [jnp.ones(2)] * (comm.rank + 1))


@pytest.mark.ranks(2)
def test_outer_momentum_stays_with_the_state_that_was_trained(jax, comm, tmp_path):
    """Where a program trains another one first after it has restored both."""
    from strategies.jax import PytreeState

    def begun():
        outer = strategies.optimizers.SGD(0.5, momentum=0.5)
        strategy = strategies.LocalSGDStrategy(1, outer_optimizer=outer)
        states = [PytreeState(strategy, jax.numpy.ones(2), lambda value: value) for _ in range(2)]
        return states, strategies.Checkpoint(first=states[0], second=states[1], outer=outer)

    def step(state):
        state.value = state.value + (comm.rank + 1)
        return np.asarray(state.value).tolist()

    states, checkpoint = begun()
    step(states[1])
    path = checkpoint.save(comm.broadcast_object(str(tmp_path / "state.safetensors")))
    going_on = [step(each) for each in states]
    states, checkpoint = begun()
    checkpoint.restore(path)
    assert [step(each) for each in states] == going_on
    assert going_on[0] != going_on[1]


def gradient(parameters, target):
    return {"kernel": parameters["kernel"] - target, "bias": 2 * parameters["bias"] + target[0]}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("outer", [False, True], ids=["mean", "DiLoCo"])
def test_local_sgd_averages_parameters(jax, comm, tmp_path, outer):
    """As NumPy does for all ranks; momenta stay each rank's own, also where arrays are donated."""
    from strategies.jax import PytreeState

    settings = {"momentum": 0.9, "nesterov": True}
    outer_optimizer = strategies.optimizers.SGD(0.7, **settings) if outer else None
    strategy = strategies.LocalSGDStrategy(2, outer_optimizer=outer_optimizer)
    targets = np.random.default_rng(0).normal(size=(5, comm.size, 3)).astype("float32")
    begin = {"kernel": np.arange(3, dtype="float32"), "bias": np.float32(1)}

    def step(state, target, tree=jax.tree):
        """One step with momentum, of JAX or NumPy."""
        parameters, momenta, count = state
        momenta = tree.map(lambda m, g: m / 2 + g, momenta, gradient(parameters, target))
        return tree.map(lambda p, m: p - m / 4, parameters, momenta), momenta, count + 1

    own = jax.tree.map(lambda each: jax.numpy.asarray(each) + comm.rank, begin)
    value = (own, jax.tree.map(jax.numpy.zeros_like, own), 0)
    state = PytreeState(strategy, value, lambda value: value[0])
    compiled = jax.jit(step, donate_argnums=0)
    for target in targets:
        state.value = compiled(state.value, target[comm.rank])
    kernel = np.array(state.value[0]["kernel"])
    path = comm.broadcast_object(str(tmp_path / "state.safetensors"))
    strategies.Checkpoint(training=state).save(path)

    replicas = [(begin, jax.tree.map(np.zeros_like, begin), 0) for _ in range(comm.size)]
    agreed, velocity = begin, jax.tree.map(np.zeros_like, begin)
    for number, target in enumerate(targets, 1):
        replicas = [step(*each) for each in zip(replicas, target, strict=True)]
        if number == 5:
            np.testing.assert_allclose(kernel, replicas[comm.rank][0]["kernel"], rtol=1e-4)
        elif number % 2:
            continue
        means = jax.tree.map(lambda *each: np.mean(each, 0), *(each[0] for each in replicas))
        if outer:
            moved = jax.tree.map(lambda a, m: 0.7 * (a - m), agreed, means)
            velocity = jax.tree.map(lambda v, g: 0.9 * v - g, velocity, moved)
            agreed = jax.tree.map(lambda a, v, g: a + 0.9 * v - g, agreed, velocity, moved)
        else:
            agreed = means
        replicas = [(agreed, *each[1:]) for each in replicas]
    for wanted, given in zip(
        *map(jax.tree.leaves, (replicas[comm.rank], state.value)), strict=True
    ):
        np.testing.assert_allclose(given, wanted, rtol=1e-4, atol=1e-6)
    assert len(set(comm.all_gather_object(np.asarray(state.value[0]["kernel"]).tobytes()))) == 1

    restored = PytreeState(strategy, value, lambda value: value[0])
    strategies.Checkpoint(training=restored).restore(path)
    restored.value = compiled(restored.value, targets[0][comm.rank])
    strategy.synchronize()
    first = [step(replicas[0], each)[0]["kernel"] for each in targets[0]]
    if not outer:
        np.testing.assert_allclose(restored.value[0]["kernel"], np.mean(first, 0), rtol=1e-4)
    assert restored.value[2] == 6


@pytest.mark.ranks(2)
def test_pytrees_that_cannot_be_averaged(jax, comm):
    from strategies.jax import PytreeState

    strategy, value = strategies.LocalSGDStrategy(1), (jax.numpy.ones(2), jax.numpy.arange(2))
    with pytest.raises(ValueError, match="name them by parameters="):
        PytreeState(strategy, value)
    with pytest.raises(ValueError, match="1 is int32: parameters must be floats"):
        PytreeState(strategy, value, lambda value: value)
    for parameters in (lambda value: {}, lambda value: value[0] + 1, lambda value: 0):
        with pytest.raises(ValueError, match="one or more of the pytree's own arrays"):
            PytreeState(strategy, value, parameters)
    # The arrays are alike, so that their shapes show no difference.
    alike = [np.ones(2, "float32")] * 3
    for parameters in (
        lambda value: value[comm.rank > 0],
        None if comm.rank else lambda value: value[0],
    ):
        with pytest.raises((collectives.CollectiveError, ValueError), match="parameters"):
            PytreeState(strategy, alike, parameters)
    wide = PytreeState(strategy, np.ones(2), lambda value: value)
    wide.value = wide.value * (comm.rank + 2.0)
    assert wide.value.tolist() == [2.5, 2.5]
    state = PytreeState(strategy, value, lambda value: value[0])
    for wrong in (value[0], (value[0][:1], value[1]), (value[1], value[1])):
        with pytest.raises(ValueError, match="must be as before"):
            state.value = wrong
    state.value = (value[0] * (comm.rank + 2.0), value[1])
    with pytest.raises(RuntimeError, match="have averaged the parameters since"):
        state.value = value
    state.saved_tensors()  # as a checkpoint does, which the program doesn't see
    with pytest.raises(RuntimeError, match="have averaged the parameters since"):
        state.value = value
    assert state.value[0].tolist() == [2.5, 2.5]
    state.restore_tensors({"0": np.zeros(2, "float32"), "1": np.arange(2, dtype="int32")})
    state.value = (value[0] * (comm.rank + 2.0), value[1])
    assert state.value[0].tolist() == [2.5, 2.5]


@pytest.mark.ranks(2)
def test_a_step_that_fails_on_one_rank(jax, comm, tmp_path):
    """It has deleted its arrays, which were donated; a checkpoint restores them."""
    from strategies.jax import PytreeState

    path = comm.broadcast_object(str(tmp_path / "state.safetensors"))
    strategy, fails = strategies.LocalSGDStrategy(100, communicator=comm.split(0)), [False]

    def check(each):
        if fails[0]:
            raise ValueError("bad data")
        return each

    def step(given):
        checked = jax.pure_callback(check, jax.ShapeDtypeStruct((4,), "float32"), given[0])
        return checked + 1 + comm.rank, given[1]

    step = jax.jit(step, donate_argnums=0)
    value = jax.numpy.ones(4), jax.random.key(comm.rank)
    # Arrays that are filtered by what they are.
    state = PytreeState(strategy, value, lambda value: [each for each in value if each.ndim])
    checkpoint = strategies.Checkpoint(training=state)
    state.value = step(state.value)
    checkpoint.save(path)
    assert state.value[0].tolist() == [2.5] * 4
    state.value = step(state.value)
    fails[0] = comm.rank == 1
    try:
        state.value = step(state.value)
    except Exception:
        assert comm.rank == 1
    # At once, instead of at the deadline: rank 1 learns of it where the ranks would average.
    with pytest.raises((collectives.MismatchError, RuntimeError, ValueError)) as caught:
        strategy.synchronize()
    assert not isinstance(caught.value, collectives.DeadlineExceededError)
    fails[0] = False
    strategy.communicator.barrier()
    checkpoint.restore(path)
    assert state.value[0].tolist() == [2.5] * 4
    state.value = step(state.value)
    strategy.synchronize()
    assert state.value[0].tolist() == [4.0] * 4
    strategy.communicator.close()


@pytest.mark.ranks(2)
def test_a_round_lasts_until_its_steps_are_computed(jax, comm, monkeypatch):
    from strategies.jax import PytreeState

    strategy = strategies.LocalSGDStrategy(sync_seconds=0.1, communicator=comm.split(0))
    state = PytreeState(strategy, jax.numpy.ones(4), lambda value: value)
    proposal, computed = strategy._rounds.proposal, []

    def slow(each):
        time.sleep(0.2)
        return each

    def proposed():
        computed.append(result.is_ready())
        return proposal()

    monkeypatch.setattr(strategy._rounds, "proposal", proposed)
    step = jax.jit(
        lambda each: jax.pure_callback(slow, jax.ShapeDtypeStruct((4,), "float32"), each)
    )
    for _ in range(3):
        result = step(state.value)
        state.value = result
    strategy.synchronize()
    assert len(computed) >= 2
    assert all(computed)
    strategy.communicator.close()


def test_parameter_servers_take_no_pytrees(jax, comm):
    """Each worker would train its own."""
    from strategies.jax import PytreeState

    with strategy_on(comm, 1) as strategy:
        for call in (
            lambda: PytreeState(strategy, jax.numpy.ones(2)),
            lambda: strategy.value_and_grad(loss),
        ):
            with pytest.raises(TypeError, match=r"keep them in strategies\.Variable"):
                call()
        if comm.rank in strategy.roles.servers:
            strategy.serve()
        else:
            strategy.shutdown()
