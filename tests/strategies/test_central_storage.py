"""CentralStorageStrategy: one copy of a variable per node, with the numbers of mirrored ones."""

import contextlib
import sys
import textwrap
import time

import numpy as np
import pytest
from mpi4py import MPI

from collectives import BackendUnavailableError, Communicator, ShapeMismatchError
from collectives.transports import local
from strategies import (
    MultiWorkerMirroredStrategy,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    optimizers,
)
from strategies.core.indexed_slices import IndexedSlices
from strategies.optimizers.update_rules import DescentRule
from strategies.synchronous.central_storage import CentralStorageStrategy, SharedStorage
from tests.strategies.support import limited, same_refusal

MAPS = {
    "one node": lambda size: [0] * size,
    "two nodes": lambda size: [rank * 2 // size for rank in range(size)],
    "in turns": lambda size: [rank % 2 for rank in range(size)],
}
SHAPES = [(3, 2), (), (7,), (1, 5), (0, 4)]
STEPS = 4
OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.1),
}
on_worlds = pytest.mark.ranks(1, 2, 3, 4, 5)
on_maps = pytest.mark.parametrize("nodes", MAPS)


@contextlib.contextmanager
def made(kind, comm, nodes="one node"):
    """A strategy over nodes of this map."""
    with Communicator(MPI.COMM_WORLD, deadline=30, node_of=MAPS[nodes](comm.size)) as group:
        strategy = kind(communicator=group)
        yield strategy
        strategy.communicator.close()


def gradients_of(step, rank):
    chance = np.random.default_rng([step, rank])
    return [chance.normal(size=shape).astype(np.float32) for shape in SHAPES]


def train(strategy, make, steps=STEPS):
    """The variables and the optimizer after steps with gradients that differ by rank."""
    chance = np.random.default_rng(strategy.communicator.rank)  # the chief's values are used
    with strategy.scope():
        variables = [Variable(chance.normal(size=shape).astype(np.float32)) for shape in SHAPES]
        optimizer = make()
    go_on(strategy, variables, optimizer, range(steps))
    return variables, optimizer


def go_on(strategy, variables, optimizer, steps):
    for step in steps:
        gradients = gradients_of(step, strategy.communicator.rank)
        strategy.run(optimizer.apply_gradients, (zip(gradients, variables, strict=True),))


def bits(arrays):
    return [(array.shape, array.dtype, array.tobytes()) for array in arrays]


def values(variables):
    return bits([variable.numpy() for variable in variables])


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.mpi
@on_worlds
@on_maps
def test_the_numbers_are_those_of_mirrored_variables(comm, nodes):
    def body(strategy, rule):
        variables, optimizer = train(strategy, OPTIMIZERS[rule])
        shared = {isinstance(each.storage, SharedStorage) for each in variables}
        slots = {key: bits([slot]) for key, slot in optimizer.saved_tensors().items()}
        return values(variables), slots, shared

    with made(MultiWorkerMirroredStrategy, comm, nodes) as strategy:
        expected = {rule: body(strategy, rule)[:2] for rule in OPTIMIZERS}
    with made(CentralStorageStrategy, comm, nodes) as strategy:
        for rule in OPTIMIZERS:
            assert body(strategy, rule) == (*expected[rule], {True}), rule


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@on_maps
def test_sparse_gradients_too(comm, nodes):
    def body(strategy, rule):
        rank = strategy.communicator.rank
        with strategy.scope():
            variable, optimizer = Variable(np.ones((5, 2))), OPTIMIZERS[rule]()
        for step in range(3):
            rows = [rank, 4, (rank + step) % 5]
            slices = IndexedSlices(np.full((3, 2), rank + step + 0.5), rows)
            strategy.run(optimizer.apply_gradients, ([(slices, variable)],))
        return values([variable])

    with made(MultiWorkerMirroredStrategy, comm, nodes) as strategy:
        expected = [body(strategy, rule) for rule in OPTIMIZERS]
    with made(CentralStorageStrategy, comm, nodes) as strategy:
        assert [body(strategy, rule) for rule in OPTIMIZERS] == expected


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_restored_slots_continue(comm):
    with made(CentralStorageStrategy, comm) as strategy:
        variables, optimizer = train(strategy, OPTIMIZERS["adam"])
        state, kept = optimizer.saved_tensors(), [variable.numpy() for variable in variables]
        go_on(strategy, variables, optimizer, range(STEPS, STEPS + 2))
        expected = values(variables)
        for restored in (optimizer, OPTIMIZERS["adam"]()):  # with slots, and without any yet
            for variable, value in zip(variables, kept, strict=True):
                variable.assign(value)
            restored.restore_tensors(state)
            go_on(strategy, variables, restored, range(STEPS, STEPS + 2))
            assert values(variables) == expected


@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_without_shared_memory_each_rank_has_a_copy(rule):
    def body(kind):
        def one_rank(transport):
            with limited(transport):
                strategy = kind(communicator=Communicator(transport))
                variables, optimizer = train(strategy, OPTIMIZERS[rule])
                assert not isinstance(variables[0].storage, SharedStorage)
                return values(variables), bits(optimizer.saved_tensors().values())

        return local.run(3, one_rank)

    assert body(CentralStorageStrategy) == body(MultiWorkerMirroredStrategy)


# --- one copy ------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(2, 3, 5)
@on_maps
def test_the_ranks_of_a_node_read_one_array_in_place(comm, nodes):
    with made(CentralStorageStrategy, comm, nodes) as strategy:
        group = strategy.communicator
        with strategy.scope():
            variable = Variable(np.zeros(100))
        assert variable.local is variable.local
        assert not variable.local.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            variable.local[0] = 1
        variable.storage.own_part()[...] = group.rank + 1
        group.barrier()
        nodes_of_all = group.all_gather_object(group.node)
        members = [rank + 1 for rank, node in enumerate(nodes_of_all) if node == group.node]
        # Every rank's part, as read by every other rank.
        seen = np.unique(variable.local)
        assert seen.tolist() == members
        assert (variable + 0).sum() == variable.local.sum()
        group.barrier()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@on_maps
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
def test_an_assignment_changes_the_one_copy_once(comm, nodes, method):
    change = {"assign": lambda old, new: new, "assign_add": np.add, "assign_sub": np.subtract}
    each = np.arange(1.0, comm.size + 1)
    folds = {"SUM": each.sum(), "MEAN": each.mean(), "ONLY_FIRST_REPLICA": 1.0}
    with made(CentralStorageStrategy, comm, nodes) as strategy:
        for aggregation, folded in folds.items():
            with strategy.scope():
                variable = Variable(10.0, aggregation=VariableAggregation[aggregation])
            expected = 10.0
            for _ in range(3):
                strategy.run(getattr(variable, method), (strategy.communicator.rank + 1.0,))
                expected = change[method](expected, folded)
                assert float(variable) == pytest.approx(expected), aggregation
                getattr(variable, method)(7)
                expected = change[method](expected, 7.0)
                assert float(strategy.run(variable.read_value)) == pytest.approx(expected)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_values_that_are_aggregated_on_read_stay_with_their_replica(comm):
    with made(CentralStorageStrategy, comm) as strategy:
        with strategy.scope():
            variable = Variable(
                0.0,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
        strategy.run(variable.assign, (strategy.communicator.rank + 1.0,))
        assert float(variable) == comm.size * (comm.size + 1) / 2


class SlowOnTheFirstRank(optimizers.Optimizer):
    """Gradient descent that runs much later on the first rank than on the others."""

    def __init__(self, rank):
        super().__init__(1.0)
        self.rank = rank

    @property
    def rule(self):
        if self.rank == 0:
            time.sleep(0.05)
        return DescentRule(self.learning_rate)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_no_rank_reads_old_values(comm):
    with made(CentralStorageStrategy, comm) as strategy:
        with strategy.scope():
            variable = Variable(np.zeros(30))
            optimizer = SlowOnTheFirstRank(strategy.communicator.rank)
        for step in range(1, 4):
            strategy.run(optimizer.apply_gradients, ([(np.ones(30), variable)],))
            assert (variable.local == -step * comm.size).all()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_ranks_with_different_initial_shapes_all_raise(comm):
    with made(CentralStorageStrategy, comm) as strategy, strategy.scope():
        with pytest.raises(ShapeMismatchError, match="the ranks' shapes differ"):
            Variable(np.zeros(strategy.communicator.rank + 1))
        assert float(Variable(strategy.communicator.rank + 1.0)) == 1.0


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_slots_without_enough_shared_memory(comm, monkeypatch):
    with made(CentralStorageStrategy, comm) as strategy:
        with strategy.scope():
            variable = Variable(np.ones(3))
        optimizer = optimizers.SGD(0.1, momentum=0.9)
        monkeypatch.setattr(type(strategy.communicator), "empty_shared", lambda *_: None)
        with pytest.raises(MemoryError, match=r"float64 of shape \(3,\): enlarge /dev/shm"):
            strategy.run(optimizer.apply_gradients, ([(np.ones(3), variable)],))


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_devices_are_one_for_each_rank_of_the_node_and_the_cpu(comm):
    devices = [f"/cpu:{rank}" for rank in range(comm.size)]
    strategy = CentralStorageStrategy(devices, "/device:CPU:0", communicator=comm)
    assert strategy.num_replicas_in_sync == comm.size
    strategy.communicator.close()
    # A wrong argument on one rank is the same error on all ranks.
    given = devices[1:] if comm.rank == 1 else devices
    match = rf"rank 1: compute_devices=\[.*\]: must have one entry for each of the {comm.size} "
    same_refusal(comm, ValueError, match, CentralStorageStrategy, given, communicator=comm)
    for wrong, match in (
        (3, "not iterable"),
        ("ab"[: comm.size], "a name such as"),
        (["tpu:0"], ""),
    ):
        given = wrong if comm.rank == comm.size - 1 else None
        match = rf"rank {comm.size - 1}: compute_devices=.*{match}"
        same_refusal(comm, ValueError, match, CentralStorageStrategy, given, communicator=comm)
    match = "rank 0: parameter_device='/gpu:0': must name the CPU"
    same_refusal(comm, ValueError, match, CentralStorageStrategy, None, "/gpu:0", communicator=comm)
    given = ["/gpu:0"] * comm.size if comm.rank == 1 else None
    match = "CentralStorageStrategy: rank 1 names a GPU in compute_devices"
    named = {"communicator": comm}
    same_refusal(comm, BackendUnavailableError, match, CentralStorageStrategy, given, **named)


# --- memory --------------------------------------------------------------------------------------

MEASURED = """
import gc
import numpy as np
from mpi4py import MPI
from strategies import MultiWorkerMirroredStrategy, Variable, optimizers
from strategies.synchronous.central_storage import CentralStorageStrategy

def resident():
    "What all ranks hold, in MB; a page that several share counts once."
    gc.collect()
    comm.barrier()
    with open("/proc/self/smaps_rollup") as lines:
        own = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    total = float(comm.all_reduce(np.array(own, np.float64))) / 1000
    comm.barrier()
    return total

strategy = {kind}()
comm = strategy.communicator
comm.all_reduce(np.ones(1_000_000, np.float32))
before = resident()
with strategy.scope():
    # So large that what is freed goes back to the system at once.
    variables = [Variable(np.full(12_500_000, 1.0, np.float32)) for _ in range(2)]
    optimizer = optimizers.SGD(0.1, momentum=0.9)
created = resident()
for variable in variables:
    gradient = np.ones(variable.shape, np.float32)
    strategy.run(optimizer.apply_gradients, ([(gradient, variable)],))
    assert variable.local[-1] < 1, variable.local[-1]
del gradient
trained = resident()
if comm.rank == 0:
    print(created - before, trained - created)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "copies"), [("CentralStorageStrategy", 1), ("MultiWorkerMirroredStrategy", 4)]
)
def test_four_ranks_hold_a_model_of_100_megabytes_once(launch, kind, copies):
    """Slots are stored once, too. The memory of mirrored variables shows that the test can fail."""
    program = textwrap.dedent(MEASURED.format(kind=kind))
    ended = launch(4, [sys.executable, "-c", program], timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    variables, slots = map(float, ended.stdout.split()[-2:])
    assert variables == pytest.approx(100 * copies, abs=25)
    assert slots == pytest.approx(100 * copies, abs=25)
