"""Synchronous training: any number of ranks gets the result of one process in plain NumPy.

Includes the mirroring and mismatches of variables between MPI ranks; their other tests run on
threads.
"""

import numpy as np
import pytest

from collectives import ShapeMismatchError
from strategies import (
    Variable,
    VariableAggregation,
    VariableSynchronization,
    compute_average_loss,
    optimizers,
)
from tests.strategies.support import same_refusal

pytestmark = pytest.mark.mpi
STEPS, EXAMPLES, FEATURES = 20, 40, 5


def examples():
    chance = np.random.default_rng(3)
    inputs = chance.normal(size=(EXAMPLES, FEATURES))
    return inputs, np.sin(inputs @ chance.normal(size=FEATURES))


def batches(batch_size):
    """The global batches of an epoch; the last one may be shorter."""
    inputs, targets = examples()
    return [
        (inputs[start : start + batch_size], targets[start : start + batch_size])
        for start in range(0, EXAMPLES, batch_size)
    ]


def initial():
    chance = np.random.default_rng(4)
    return [chance.normal(size=FEATURES), np.zeros(())]


def losses_and_gradients(weights, inputs, targets, batch_length):
    """Squared errors of tanh units, and the gradients of their sum over the global batch's size."""
    outputs = np.tanh(inputs @ weights[0] + weights[1])
    errors = outputs - targets
    slopes = 2 * errors * (1 - outputs**2) / batch_length
    return errors**2, [inputs.T @ slopes, slopes.sum()]


class Momentum:
    def __init__(self):
        self.velocity = 0.0

    def step(self, weight, gradient):
        self.velocity = 0.9 * self.velocity - 0.05 * gradient
        return weight + self.velocity


class AdaptiveMoments:
    def __init__(self):
        self.mean, self.square, self.steps = 0.0, 0.0, 0

    def step(self, weight, gradient):
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        # Adam as in the paper's algorithm 1, with epsilon placed as in Keras.
        return weight - 0.02 * mean / (np.sqrt(square) + 1e-7 / np.sqrt(1 - 0.999**self.steps))


RULES = {
    "momentum": (lambda: optimizers.SGD(0.05, momentum=0.9), Momentum),
    "adam": (lambda: optimizers.Adam(0.02), AdaptiveMoments),
}


def train_alone(make, batch_size):
    weights, rules, losses = initial(), [make(), make()], []
    while len(losses) < STEPS:
        for inputs, targets in batches(batch_size)[: STEPS - len(losses)]:
            errors, gradients = losses_and_gradients(weights, inputs, targets, len(inputs))
            weights = [
                rule.step(weight, gradient)
                for rule, weight, gradient in zip(rules, weights, gradients, strict=True)
            ]
            losses.append(errors.mean())
    return weights, losses


def train_together(strategy, make, batch_size):
    with strategy.scope():
        # Only the chief's values are used.
        variables = [Variable(value + strategy.communicator.rank) for value in initial()]
        optimizer = make()
    lengths = [len(inputs) for inputs, _ in batches(batch_size)]
    dataset = strategy.experimental_distribute_dataset(batches(batch_size))

    def step(inputs, targets, batch_length):
        errors, gradients = losses_and_gradients(variables, inputs, targets, batch_length)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return compute_average_loss(errors, global_batch_size=batch_length)

    losses = []
    while len(losses) < STEPS:
        for length, (inputs, targets) in zip(lengths, dataset, strict=False):
            if len(losses) < STEPS:
                loss = strategy.run(step, (inputs, targets, length))
                losses.append(strategy.reduce("sum", loss, axis=None))
    return [variable.numpy() for variable in variables], losses


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch_size", [8, 12, 7, 2, 39])
def test_any_number_of_ranks_trains_as_one_process_does(comm, strategy, rule, batch_size):
    make, reference = RULES[rule]
    weights, losses = train_together(strategy, make, batch_size)
    expected, expected_losses = train_alone(reference, batch_size)
    for weight, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=0, atol=1e-9)
    np.testing.assert_allclose(losses, expected_losses, rtol=0, atol=1e-9)
    assert losses[-1] < losses[0] or batch_size == 2
    bits = b"".join(weight.tobytes() for weight in weights)
    assert set(comm.all_gather_object(bits)) == {bits}


# --- variables between MPI ranks -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_variables_are_the_chiefs(strategy, dtype):
    rank = strategy.communicator.rank
    with strategy.scope():
        variable = Variable(lambda: np.arange(4000).reshape(2, -1).astype(dtype) + dtype(rank))
    expected = np.arange(4000).reshape(2, -1).astype(dtype)
    assert variable.dtype == dtype
    np.testing.assert_array_equal(variable.numpy(), expected)


@pytest.mark.ranks(2, 3, 4)
def test_variables_of_different_shapes_are_refused_on_every_rank(comm, strategy):
    with strategy.scope():
        arguments = (ShapeMismatchError, "Variable: the ranks' shapes differ", Variable)
        text = same_refusal(comm, *arguments, np.zeros(comm.rank))
        assert f"rank {comm.size - 1}: float64 of shape ({comm.size - 1},)" in text
        assert float(Variable(comm.rank + 1.0)) == 1.0


@pytest.mark.parametrize("synchronization", ["ON_WRITE", "ON_READ"])
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_replicas_values_become_one(strategy, synchronization, aggregation):
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    with strategy.scope():
        variable = Variable(
            0.0,
            synchronization=VariableSynchronization[synchronization],
            aggregation=VariableAggregation[aggregation],
        )
    strategy.run(variable.assign, (rank + 1,))
    total = size * (size + 1) / 2
    expected = {"SUM": total, "MEAN": total / size, "ONLY_FIRST_REPLICA": 1.0}[aggregation]
    assert float(variable) == pytest.approx(expected)
    own = strategy.run(variable.read_value)
    assert own == (rank + 1 if synchronization == "ON_READ" else float(variable))
