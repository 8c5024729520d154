"""Optimizers against the published update rules in NumPy with float64."""

import copy

import numpy as np
import pytest

from collectives import MismatchError
from strategies import IndexedSlices, Variable, optimizers
from tests.strategies.support import lone_strategy, on_ranks, refusal

STEPS = 6
SHAPES = [(3, 2), (), (4,)]


class Descent:
    """Gradient descent with momentum, as in the Keras documentation."""

    def __init__(self, learning_rate, momentum=0.0, nesterov=False):
        self.learning_rate, self.momentum, self.nesterov = learning_rate, momentum, nesterov
        self.velocity = 0.0

    def step(self, weight, gradient):
        if not self.momentum:
            return weight - self.learning_rate * gradient
        self.velocity = self.momentum * self.velocity - self.learning_rate * gradient
        if self.nesterov:
            return weight + self.momentum * self.velocity - self.learning_rate * gradient
        return weight + self.velocity


class AdaptiveMoments:
    """Adam, in the form before section 2.1 of the paper, which Keras uses."""

    def __init__(self, learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.learning_rate, self.epsilon = learning_rate, epsilon
        self.beta_1, self.beta_2 = beta_1, beta_2
        self.mean = self.square = 0.0
        self.steps = 0

    def step(self, weight, gradient):
        self.steps += 1
        self.mean = self.beta_1 * self.mean + (1 - self.beta_1) * gradient
        self.square = self.beta_2 * self.square + (1 - self.beta_2) * gradient**2
        rate = self.learning_rate * np.sqrt(1 - self.beta_2**self.steps)
        rate /= 1 - self.beta_1**self.steps
        return weight - rate * self.mean / (np.sqrt(self.square) + self.epsilon)


RULES = {
    "sgd": (optimizers.SGD, Descent, {"learning_rate": 0.1}),
    "momentum": (optimizers.SGD, Descent, {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov": (
        optimizers.SGD,
        Descent,
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "adam": (optimizers.Adam, AdaptiveMoments, {}),
    "adam of other betas": (
        optimizers.Adam,
        AdaptiveMoments,
        {"learning_rate": 0.5, "beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.01},
    ),
}


def initial(dtype):
    chance = np.random.default_rng(7)
    return [np.asarray(chance.normal(size=shape), dtype) for shape in SHAPES]


def gradients_of(step, rank, dtype):
    chance = np.random.default_rng([step, rank])
    return [np.asarray(chance.normal(size=shape), dtype) for shape in SHAPES]


def train(strategy, make, named, dtype):
    """The weights after a few steps with gradients that differ by replica."""
    with strategy.scope():
        variables = [Variable(value) for value in initial(dtype)]
        optimizer = make(**named)
    for step in range(STEPS):
        gradients = gradients_of(step, strategy.communicator.rank, dtype)
        strategy.run(optimizer.apply_gradients, (zip(gradients, variables, strict=True),))
    assert optimizer.iterations == STEPS
    return [variable.numpy() for variable in variables]


def expected_weights(make, named, dtype, size):
    weights = [value.astype(np.float64) for value in initial(dtype)]
    rules = [make(**named) for _ in weights]
    for step in range(STEPS):
        parts = [gradients_of(step, rank, dtype) for rank in range(size)]
        sums = [np.sum([part[place] for part in parts], axis=0) for place in range(len(SHAPES))]
        weights = [
            rule.step(weight, total)
            for rule, weight, total in zip(rules, weights, sums, strict=True)
        ]
    return weights


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5)])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_summed_and_the_rule_is_followed(size, dtype, tolerance, rule):
    make, reference, named = RULES[rule]
    results = on_ranks(size, lambda strategy: train(strategy, make, named, dtype))
    expected = expected_weights(reference, named, dtype, size)
    for weights in results:
        for weight, other, wanted in zip(weights, results[0], expected, strict=True):
            assert (weight.dtype, weight.tobytes()) == (dtype, other.tobytes())
            np.testing.assert_allclose(weight, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("rule", RULES)
def test_a_large_variable_is_updated_to_its_last_element(rule, order):
    """The variable is updated in blocks, the last of which is shorter."""
    make, reference, named = RULES[rule]
    chance = np.random.default_rng(3)
    start = np.asarray(chance.normal(size=(300, 701)), order=order)
    variable, optimizer, wanted, expected = (
        Variable(start),
        make(**named),
        start,
        reference(**named),
    )
    for _ in range(3):
        gradient = chance.normal(size=start.shape)
        optimizer.apply_gradients([(gradient.copy(), variable)])
        wanted = expected.step(wanted, gradient)
    np.testing.assert_allclose(variable.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_parts_of_a_complex_number_are_numbers_of_their_own(rule):
    """As in torch's optimizers; large enough for several blocks."""
    make, _, named = RULES[rule]
    chance = np.random.default_rng(5)
    parts = [chance.normal(size=70_000) for _ in range(2)]
    whole = Variable(parts[0] + 1j * parts[1])
    real, imaginary = map(Variable, parts)
    first, second = make(**named), make(**named)
    for _ in range(3):
        gradients = [chance.normal(size=70_000) for _ in range(2)]
        first.apply_gradients([(gradients[0] + 1j * gradients[1], whole)])
        second.apply_gradients(zip(gradients, (real, imaginary), strict=True))
    wanted = real.numpy() + 1j * imaginary.numpy()
    np.testing.assert_allclose(whole.numpy(), wanted, rtol=1e-12)


def test_the_defaults_are_those_of_keras():
    sgd, adam = optimizers.SGD(), optimizers.Adam()
    assert (sgd.learning_rate, sgd.momentum, sgd.nesterov) == (0.01, 0.0, False)
    assert (adam.learning_rate, adam.beta_1, adam.beta_2, adam.epsilon) == (0.001, 0.9, 0.999, 1e-7)


def test_the_learning_rate_may_change_between_steps():
    variable, optimizer = Variable(0.0), optimizers.SGD(1.0)
    for rate in (1.0, 0.5, 0.0):
        optimizer.learning_rate = rate
        optimizer.apply_gradients([(2.0, variable)])
    assert float(variable) == -3.0


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
def test_what_a_momentum_may_be(momentum):
    refusal(ValueError, f"momentum={momentum}: must be from 0 to 1", optimizers.SGD, 0.1, momentum)


# --- which gradients -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
def test_a_variable_without_a_gradient_is_not_changed(size):
    def body(strategy):
        with strategy.scope():
            first, second, optimizer = Variable(1.0), Variable(2.0), optimizers.Adam()
        strategy.run(optimizer.apply_gradients, ([(None, first), (1.0, second)],))
        return float(first), float(second) < 2.0

    assert on_ranks(size, body) == [(1.0, True)] * size


@pytest.mark.parametrize("pairs", [[], [(None, Variable(0.0))], iter([])])
def test_no_gradient_at_all(pairs):
    optimizer = optimizers.SGD()
    refusal(ValueError, "grads_and_vars has no gradient", optimizer.apply_gradients, pairs)
    assert optimizer.iterations == 0


@pytest.mark.parametrize("gradient", [np.zeros(3), np.zeros((2, 1)), 0.0])
def test_a_gradient_has_its_variables_shape(gradient):
    variable, optimizer = Variable(np.ones(2)), optimizers.SGD()
    pairs = [(np.ones(2), variable), (gradient, variable)]
    text = refusal(ValueError, "a gradient has shape", optimizer.apply_gradients, pairs)
    assert text == f"a gradient has shape {np.shape(gradient)}: <Variable float64[2]> has (2,)"
    assert variable.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", [optimizers.SGD, optimizers.Adam])
def test_the_callers_gradient_is_not_changed(make):
    gradient, variable = np.ones(2), Variable(np.ones(2))
    make(0.5).apply_gradients([(gradient, variable)])
    assert gradient.tolist() == [1.0, 1.0]
    assert variable.numpy().tolist() != [1.0, 1.0]


def test_what_is_no_pair_is_refused():
    for wrong in (np.ones(2), (np.ones(2), Variable(1.0), 3), (np.ones(2),)):
        text = f"grads_and_vars has a {type(wrong).__name__} at position 0: must be a pair"
        refusal(TypeError, text, optimizers.SGD(0.1).apply_gradients, [wrong])


def test_what_is_no_learning_rate_is_refused():
    for wrong in ("a", "0.1", None, [0.1], Variable(0.1)):
        text = r"learning_rate=.*: must be a number or a function"
        refusal(TypeError, text, optimizers.SGD, wrong)


def test_integers_are_refused():
    arguments = (optimizers.SGD(0.5).apply_gradients, [(1.0, Variable(3))])
    refusal(TypeError, r"<Variable int32\[\]> holds integers", *arguments)


def test_complex_gradients_of_real_variables_are_refused():
    for gradient in (np.array([1j]), IndexedSlices(np.array([1j]), [0])):
        apply = optimizers.SGD(0.5).apply_gradients
        refusal(TypeError, "is of complex128, and", apply, [(gradient, Variable(np.ones(1)))])


def test_a_copy_leaves_what_the_optimizer_has_restored():
    def step(optimizer):
        variable = Variable(np.zeros(1))
        optimizer.apply_gradients([(np.ones(1), variable)])
        return variable.numpy().tolist()

    optimizer = optimizers.SGD(1.0, momentum=0.5)
    restored = {"slots/0/velocity": np.array([-4.0]), "iterations": 3, "learning_rate": 1.0}
    optimizer.restore_tensors(restored)
    assert step(copy.copy(optimizer)) == step(optimizer) == [-3.0]


# --- where ---------------------------------------------------------------------------------------


def test_for_all_replicas_nothing_is_applied():
    strategy, optimizer = lone_strategy(), optimizers.SGD()
    with strategy.scope():
        variable = Variable(1.0)
        match = "apply_gradients must be called as a replica, inside `run`"
        refusal(RuntimeError, match, optimizer.apply_gradients, [(1.0, variable)])
    assert float(variable) == 1.0


def test_without_a_strategy_it_works_equally():
    variable, optimizer = Variable([1.0, 2.0]), optimizers.SGD(0.5)
    optimizer.apply_gradients([([1.0, 2.0], variable)])
    assert variable.numpy().tolist() == [0.5, 1.0]


def test_variables_of_another_strategy_are_refused():
    def body(strategy):
        with strategy.scope():
            mirrored = Variable(1.0)
        optimizer, gradient = optimizers.SGD(), float(strategy.communicator.rank)
        match = "<Variable .*> belongs to a .*, but apply_gradients was called "
        outside = match + "outside of its `run`: call it inside"
        refusal(RuntimeError, outside, optimizer.apply_gradients, [(gradient, mirrored)])
        match += "as a replica of another strategy, a Multi.*: create variables in the scope"
        pairs = [(gradient, Variable(gradient))]
        strategy.run(refusal, (RuntimeError, match, optimizer.apply_gradients, pairs))
        return float(mirrored)

    assert on_ranks(2, body) == [1.0] * 2


def test_all_gradients_travel_together(monkeypatch):
    def body(strategy):
        with strategy.scope():
            dtypes = [np.float32] * 50 + [np.float64]
            variables = [Variable(np.ones(3, dtype)) for dtype in dtypes]
            optimizer = optimizers.SGD(1.0)
        transport = strategy.communicator._engine.transport
        exchanges, exchange = [], transport.exchange
        monkeypatch.setattr(transport, "exchange", lambda *a: exchanges.append(a) or exchange(*a))
        pairs = [(np.ones(3), variable) for variable in variables]
        strategy.run(optimizer.apply_gradients, (pairs,))
        return len(exchanges), [variable.numpy().tolist() for variable in variables]

    for exchanges, values in on_ranks(2, body):
        assert 0 < exchanges <= 4  # two dtypes, each in at most two rounds
        assert values == [[-1.0] * 3] * 51


def test_gradients_or_slots_of_one_rank_alone_are_refused_before_any_copy_drifts():
    def one_rank(strategy):
        with strategy.scope():
            first, second = Variable(np.zeros(2)), Variable(np.zeros(3))
        optimizer = optimizers.SGD(1.0)
        lacking = None if strategy.communicator.rank == 1 else np.ones(3)
        with pytest.raises(MismatchError, match=r"rank 1: .* variables 0\)"):
            strategy.run(optimizer.apply_gradients, ([(np.ones(2), first), (lacking, second)],))
        assert optimizer.iterations == 0
        assert not first.numpy().any()
        strategy.run(optimizer.apply_gradients, ([(np.ones(2), first), (np.ones(3), second)],))
        np.testing.assert_array_equal(second.numpy(), [-3.0] * 3)
        if strategy.communicator.rank == 1:
            optimizer = copy.deepcopy(optimizer)
        with pytest.raises(MismatchError, match=r"rank 1: .* 0 variables updated before"):
            strategy.run(optimizer.apply_gradients, ([(np.ones(2), first), (np.ones(3), second)],))

    on_ranks(3, one_rank)


# --- gradients in their reduction buffers --------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("given", ["views", "arrays on one rank", "swapped"])
def test_gradient_views_give_the_same_weights(size, given):
    def body(strategy):
        rank = strategy.communicator.rank
        with strategy.scope():
            variables = [Variable(np.ones(2)), Variable(np.ones(2)), Variable(0.0)]
            optimizer = optimizers.SGD(1.0)
        views = optimizer.gradient_views(iter(variables))
        assert [view.shape for view in views] == [(2,), (2,), ()]
        for _ in range(3):
            for place, view in enumerate(views):
                view[...] = place + rank
            gradients = list(views)
            if given == "swapped":
                gradients[0], gradients[1] = views[1], views[0]
            if given == "arrays on one rank" and rank == 0:
                gradients = [view.copy() for view in views]
            strategy.run(optimizer.apply_gradients, (zip(gradients, variables, strict=True),))
        return [float(np.ravel(variable.numpy())[0]) for variable in variables]

    sums = [3 * sum(place + rank for rank in range(size)) for place in range(3)]
    if given == "swapped":
        sums[:2] = sums[1], sums[0]
    assert on_ranks(size, body) == [[1.0 - sums[0], 1.0 - sums[1], -sums[2]]] * size


def test_gradient_views_of_other_variables_are_not_changed():
    first, second, optimizer = Variable(1.0), Variable(1.0), optimizers.SGD(1.0)
    views = optimizer.gradient_views([first, second])
    optimizer.apply_gradients([(2.0, second), (1.0, first)])
    assert (float(first), float(second)) == (0.0, -1.0)
    assert not any(map(np.any, views))
    refusal(ValueError, "variables has no variable", optimizer.gradient_views, [])
