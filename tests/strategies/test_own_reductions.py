"""Reductions of users: which methods their ops and strategies define, and who calls them."""

import numpy as np
import pytest

from strategies import Strategy, Variable, VariableAggregation, get_replica_context, optimizers
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.storage import assign_sub
from strategies.core.values import PerReplica
from strategies.cross_device_ops import CrossDeviceOps, RingAllReduce
from tests.strategies.support import Call, mirrored, recorded, refusal, same_refusal

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


class Recording(CrossDeviceOps):
    """Ops that record their calls."""

    def __init__(self):
        self.calls = []

    def total(self, name, op, value, options):
        assert op in ReduceOp
        assert isinstance(options, CommunicationOptions)
        assert get_replica_context() is None
        self.calls.append((name, np.shape(value)))
        return self.communicator.all_reduce(np.asarray(value), op.value)


class Reduces(Recording):
    def reduce(self, reduce_op, per_replica_value, destinations, options=None):
        return self.total("reduce", reduce_op, per_replica_value, options)


class ReducesImplementation(Recording):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return self.total("reduce", reduce_op, per_replica_value, options)


class BatchReduces(Recording):
    def batch_reduce(self, reduce_op, value_destination_pairs, options=None):
        return [
            self.total("batch", reduce_op, value, options) for value, _ in value_destination_pairs
        ]


class BatchReducesImplementation(Recording):
    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return (
            self.total("batch", reduce_op, value, options) for value, _ in value_destination_pairs
        )


class Both(Reduces, BatchReduces):
    pass


OWN = [Reduces, ReducesImplementation, BatchReduces, BatchReducesImplementation, Both]
every_own = pytest.mark.parametrize("own", OWN)


def name_of(own, called):
    """The method that is recorded where the strategy calls `called`."""
    if own is Both:
        return called
    return "reduce" if own in (Reduces, ReducesImplementation) else "batch"


@every_own
def test_optimizers_call_them(comm, own):
    ops = own()
    with mirrored(comm, None, ops) as strategy:
        with strategy.scope():
            variables = [Variable(np.zeros(3)), Variable(np.zeros((2, 1), np.float32))]
        gradients = [np.full(3, comm.rank + 1.0), np.full((2, 1), 2.0)]
        pairs = list(zip(gradients, variables, strict=True))
        strategy.run(optimizers.SGD(1.0).apply_gradients, (pairs,))
    assert ops.calls == [(name_of(own, "batch"), (3,)), (name_of(own, "batch"), (2, 1))]
    assert variables[0].numpy().tolist() == [-comm.size * (comm.size + 1) / 2] * 3
    assert variables[1].numpy().tolist() == [[-2.0 * comm.size]] * 2


@every_own
def test_replicas_call_them(comm, own):
    ops, given = own(), {"a": np.float32(comm.rank), "b": [np.ones(2), np.arange(3)]}
    with mirrored(comm, None, ops) as strategy:
        result = strategy.run(lambda: get_replica_context().all_reduce("mean", given))
        single = strategy.run(lambda: get_replica_context().all_reduce("sum", np.ones(4)))
    assert [shape for _, shape in ops.calls] == [(), (2,), (3,), (4,)]
    assert {name for name, _ in ops.calls} == {name_of(own, "batch")}
    assert result["a"] == (comm.size - 1) / 2
    assert [each.tolist() for each in result["b"]] == [[1, 1], [0, 1, 2]]
    assert single.tolist() == [comm.size] * 4


@every_own
def test_strategies_and_variables_call_them(comm, own):
    ops = own()
    with mirrored(comm, None, ops) as strategy:
        assert strategy.reduce("sum", comm.rank, axis=None) == comm.size * (comm.size - 1) / 2
        assert strategy.reduce("mean", np.arange(comm.rank + 1), axis=0).dtype == np.float64
        with strategy.scope():
            total = Variable(np.zeros(2), aggregation=VariableAggregation.MEAN)
        strategy.run(total.assign, ([float(comm.rank), 1.0],))
    assert ops.calls == [(name_of(own, "reduce"), shape) for shape in [(), (), (2,)]]
    assert total.numpy().tolist() == [(comm.size - 1) / 2, 1.0]


@every_own
def test_they_can_be_called_by_hand_in_a_scope(comm, own):
    ops = own()
    with mirrored(comm) as strategy, strategy.scope():
        value = PerReplica([np.array([comm.rank, 1.0])])
        if own in (ReducesImplementation, BatchReducesImplementation):
            total = ops.reduce("Sum", value, "CPU:0")
            assert total.tolist() == [comm.size * (comm.size - 1) / 2, comm.size]
            (mean,) = ops.batch_reduce(ReduceOp.MEAN, [(value, value)])
            assert mean.tolist() == [(comm.size - 1) / 2, 1]
            refusal(ValueError, "reduce_op='max'", ops.reduce, "max", value, None)
        first = ops.broadcast(PerReplica([np.float64(comm.rank + 7)]), None)
        assert first == 7.0


def test_a_wrapper_gets_the_values_that_it_reduces(comm):
    seen = []

    class Wrapper(RingAllReduce):
        def batch_reduce(self, reduce_op, value_destination_pairs, options=None):
            seen.append(len(value_destination_pairs))
            return super().batch_reduce(reduce_op, value_destination_pairs, options)

    with mirrored(comm, None, Wrapper()) as strategy:
        strategy.run(lambda: get_replica_context().all_reduce("sum", [1.0, 2.0, 3.0]))
        assert strategy.reduce("sum", 1.0, axis=None) == comm.size
    assert seen == [3, 1]


def test_options_are_passed_to_them(comm):
    seen = []

    class Looking(CrossDeviceOps):
        def reduce(self, reduce_op, per_replica_value, destinations, options=None):
            seen.append((options.bytes_per_pack, self.communicator.deadline))
            return per_replica_value

    options = CommunicationOptions(bytes_per_pack=40, timeout_seconds=7)
    with mirrored(comm, None, Looking()) as strategy:
        before = strategy.communicator.deadline
        strategy.run(lambda: get_replica_context().all_reduce("sum", 1.0, options))
        strategy.run(lambda: get_replica_context().all_reduce("sum", 1.0))
        assert strategy.communicator.deadline == before
    assert seen == [(40, 7), (0, before)]


def test_a_result_never_shares_memory_with_the_input(comm):
    class Lazy(CrossDeviceOps):
        def reduce(self, reduce_op, per_replica_value, destinations, options=None):
            return PerReplica([per_replica_value[:]])

    given = np.ones(3)
    with mirrored(comm, None, Lazy()) as strategy:
        result = strategy.run(lambda: get_replica_context().all_reduce("sum", given))
        result += 1
        with strategy.scope():
            variable = Variable(np.zeros(3))
        strategy.run(optimizers.SGD(0.5).apply_gradients, ([(given, variable)],))
    assert given.tolist() == [1, 1, 1]
    assert variable.numpy().tolist() == [-0.5] * 3


@pytest.mark.parametrize("wrong", ["shape", "count"])
def test_wrong_results_are_refused(comm, wrong):
    class Wrong(CrossDeviceOps):
        def batch_reduce(self, reduce_op, value_destination_pairs, options=None):
            return [np.ones(5)] * (1 if wrong == "shape" else 2)

    with mirrored(comm, None, Wrong()) as strategy:
        text = same_refusal(comm, ValueError, "Wrong", strategy.reduce, "sum", np.ones(3), None)
    assert "(5,)" in text
    assert "(3,)" in text


def test_a_class_must_define_a_reduction(comm):
    class Nothing(CrossDeviceOps):
        def broadcast(self, tensor, destinations):
            return tensor

    refusal(TypeError, "Nothing reduces nothing: define one of reduce, batch_reduce", Nothing)
    refusal(TypeError, "CrossDeviceOps reduces nothing", CrossDeviceOps)


def test_gradient_views_go_through_the_ops_as_well(comm):
    with mirrored(comm, None, RingAllReduce()) as strategy:
        with strategy.scope():
            variable = Variable(np.zeros(3))
        optimizer = optimizers.SGD(1.0)

        def step():
            (view,) = optimizer.gradient_views([variable])
            view[...] = comm.rank + 1.0
            with recorded() as calls:
                optimizer.apply_gradients([(view, variable)])
            return calls

        assert strategy.run(step) == [Call("all_reduce", comm.size, "ring", 3)]
    assert variable.numpy().tolist() == [-comm.size * (comm.size + 1) / 2] * 3


class Clipped(Strategy):
    """Each replica's share of a sum is at most 1."""

    def all_reduce_arrays(self, arrays, op, options=None, *, batch=True, out=None):
        clipped = [np.minimum(each, 1) for each in arrays]
        return super().all_reduce_arrays(clipped, op, options, batch=batch, out=out)


@pytest.mark.parametrize("bytes_per_pack", [0, 64])
def test_every_reduction_is_by_a_strategys_own_method(comm, bytes_per_pack):
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
    strategy = Clipped(comm.split(0), communication_options=options)
    with strategy.scope():
        weights = Variable(np.zeros(2))
        count = Variable(0.0, aggregation=VariableAggregation.SUM)
        optimizer = optimizers.SGD(1.0)

    def step():
        optimizer.apply_gradients([(np.full(2, 5.0 + comm.rank), weights)])
        count.assign(6.0 + comm.rank)
        return get_replica_context().all_reduce("sum", 7.0 + comm.rank)

    compressed = CommunicationOptions(compression="float16")
    refusal(ValueError, "would not be compressed", Clipped, comm, communication_options=compressed)
    # Steps that recur are made in fewer calls.
    for number in range(5):
        assert strategy.run(step) == comm.size
        assert weights.numpy().tolist() == [-comm.size * (number + 1.0)] * 2
        assert count.numpy() == comm.size
    for value in (8.0 + comm.rank, np.full(3, 8.0 + comm.rank), {"loss": 8.0}):
        total = strategy.reduce("sum", value, axis=None)
        assert np.all((total["loss"] if isinstance(value, dict) else total) == comm.size)
    strategy.communicator.close()


class MajorityVote(Strategy):
    """Each step is of length 1, in the direction that most replicas' gradients have."""

    def apply_gradients(self, optimizer, gradients, variables):
        votes = self.all_reduce_arrays([np.sign(each) for each in gradients], ReduceOp.SUM)
        for variable, vote in zip(variables, votes, strict=True):
            variable.storage.change(assign_sub, np.sign(vote))


def test_a_step_that_writes_values_itself(comm):
    strategy = MajorityVote(comm.split(0))
    with strategy.scope():
        weights = Variable(np.zeros(2))
        optimizer = optimizers.SGD(1.0)
    gradient = np.array([1.0 + comm.rank, -5.0 if comm.rank == 1 else 1.0])
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weights)]))
    assert weights.numpy().tolist() == [-3, 0 if comm.size == 2 else -3]
    strategy.communicator.close()
