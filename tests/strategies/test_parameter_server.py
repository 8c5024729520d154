"""Workers that pull from parameter servers, and push to them."""

import gc
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

import strategies
from collectives import (
    DeadlineExceededError,
    DtypeMismatchError,
    MismatchError,
    RankFailedError,
    ShapeMismatchError,
)
from collectives.messaging.mailbox import Mailbox
from strategies import (
    InputOptions,
    ReduceOp,
    Variable,
    VariableAggregation,
    VariableSynchronization,
    optimizers,
)
from strategies.parameter_server import FixedShardsPartitioner, ParameterServerStrategy
from tests.strategies.parameter_servers import (
    number_of,
    on_threads,
    run_workers,
    strategy_on,
    together,
    worlds,
)
from tests.strategies.support import refusal, same_refusal, tf_config

pytestmark = [pytest.mark.mpi, worlds]

servers_of = pytest.mark.parametrize("servers", [1, 2])


def fitting(comm, servers):
    """The largest number of servers that leaves a worker."""
    return min(servers, comm.size - 1)


def ramp(number, shape=(5, 3), dtype=np.float32):
    """Values that identify their owner."""
    return (np.arange(np.prod(shape)).reshape(shape) + 100 * number).astype(dtype)


@servers_of
@pytest.mark.parametrize("chief", [False, True])
def test_the_chiefs_initial_values_count(comm, servers, chief):
    servers = fitting(comm, servers)

    def work(strategy):
        own = 7 if strategy.is_chief else 1
        made = [Variable(ramp(own)), Variable(lambda: np.float64(own)), Variable(ramp(own, (2,)))]
        kinds = [type(each) for each in made]
        return own, [each.numpy() for each in made], kinds

    results = run_workers(comm, servers, work, chief=chief)
    assert [own for own, _, _ in results] == [7] + [1] * (len(results) - 1)
    for _, values, kinds in results:
        for value, right in zip(values, [ramp(7), np.float64(7), ramp(7, (2,))], strict=True):
            np.testing.assert_array_equal(value, right)
            assert value.dtype == right.dtype
        assert kinds == [Variable] * 3


@pytest.mark.parametrize("first", ["chief", "others"])
def test_creation_is_no_collective(comm, first):
    """The first worker needs no other; a later one finds the existing variables."""

    def work(strategy):
        if strategy.is_chief and first == "chief":
            variables = [Variable(ramp(number)) for number in range(3)]
            variables[2].assign_add(ramp(1))
            together(strategy)
        elif strategy.is_chief:
            threading.Event().wait(0.3)
            variables = [Variable(ramp(number)) for number in range(3)]
            variables[2].assign_add(ramp(1))
        else:
            if first == "chief":
                together(strategy)
            variables = [Variable(np.zeros((5, 3), np.float32)) for _ in range(3)]
        return [variable.shape for variable in variables], variables[1].numpy()

    for shapes, value in run_workers(comm, 1, work):
        assert shapes == [(5, 3)] * 3
        np.testing.assert_array_equal(value, ramp(1))


def test_workers_send_each_other_nothing(comm, monkeypatch):
    """As with TensorFlow's device filters: a worker needs only the servers."""
    peers, send = set(), Mailbox.send

    def recorded(mailbox, peer, *message):
        peers.add(peer)
        return send(mailbox, peer, *message)

    monkeypatch.setattr(Mailbox, "send", recorded)

    def work(strategy):
        variable, optimizer = Variable(ramp(1)), optimizers.SGD(0.5)
        strategy.run(optimizer.apply_gradients, ([(ramp(2), variable)],))
        return variable.numpy().shape, set(peers), set(strategy.roles.servers)

    for shape, told, servers in run_workers(comm, fitting(comm, 2), work):
        assert shape == (5, 3)
        assert told
        assert told <= servers


def test_other_shapes_and_dtypes_than_the_chiefs(comm):
    def work(strategy):
        wrong = not strategy.is_chief
        if wrong:
            text = refusal(
                ShapeMismatchError, "the chief's is", Variable, np.zeros((5, 4)), name="weights"
            )
            assert "float64 of shape (5, 3)" in text
            assert "float64 of shape (5, 4)" in text
            assert "Variable 'weights'" in text
            text = refusal(DtypeMismatchError, "the chief's is", Variable, np.zeros(2, np.int32))
            assert "float32 of shape (2,)" in text
            assert "int32 of shape (2,)" in text
        else:
            Variable(np.zeros((5, 3)), name="first")
            Variable(np.zeros(2, np.float32))
        return Variable(ramp(number_of(strategy))).numpy()

    for value in run_workers(comm, 1, work):
        np.testing.assert_array_equal(value, ramp(0))


def test_other_names_than_the_chiefs(comm):
    """Of equal shapes: each worker would train another variable."""
    kept = []

    def work(strategy):
        names = ["a", "b"] if strategy.is_chief else ["b", "a"]
        if strategy.is_chief:
            kept.extend(Variable(1.0, name=name) for name in names)
        else:
            refusal(MismatchError, "in the same order", Variable, 1.0, name=names[0])

    run_workers(comm, 1, work)


def test_other_rules_than_the_chiefs(comm):
    """Also those that follow a variable which is a worker's own."""
    on_read, total = VariableSynchronization.ON_READ, VariableAggregation.SUM
    pairs = [
        ({"trainable": False}, {}),
        ({"aggregation": total}, {"aggregation": VariableAggregation.MEAN}),
        ({"aggregation": total}, {}),
    ]

    def work(strategy):
        for rules in pairs:
            if strategy.is_chief:
                Variable(1.0, **rules[0])
            else:
                # Each worker's own, which others need not make.
                own = Variable(number_of(strategy), synchronization=on_read, aggregation=total)
                assert int(own.local) == number_of(strategy)
                refusal(MismatchError, "the chief's is Variable", Variable, 1.0, **rules[1])
        return float(Variable(number_of(strategy) + 2.0).numpy())

    assert set(run_workers(comm, 1, work)) == {2.0}


def test_other_optimizers_than_another_workers(comm):
    """Their slots would be mixed on the servers; the learning rate is each worker's own."""
    pairs = [
        (optimizers.SGD, {"momentum": 0.5}, optimizers.SGD, {}),
        (optimizers.SGD, {}, optimizers.Adam, {}),
        (optimizers.Adam, {"clipnorm": 1.0}, optimizers.Adam, {"clipnorm": 2.0}),
    ]

    def work(strategy):
        variable = Variable(1.0)
        for own, settings, other, others in pairs:
            if strategy.is_chief:
                optimizer = own(1.0, **settings)
                strategy.run(optimizer.apply_gradients, ([(0.0, variable)],))
            together(strategy)
            if not strategy.is_chief:
                step = other(1.0, **others).apply_gradients
                refusal(
                    MismatchError,
                    r"optimizer \d is .* on worker .* on worker 0 \(rank 1\)",
                    strategy.run,
                    partial(step, [(1.0, variable)]),
                )
                # It stays refused, and is counted as the chief's is.
                refusal(MismatchError, "on worker", strategy.run, partial(step, [(1.0, variable)]))
            together(strategy)
        return float(variable.numpy())

    assert set(run_workers(comm, 1, work)) == {1.0}


def test_threads_that_use_optimizers_for_the_first_time_at_once(comm):
    """Each gets a number of its own: with one, their slots would be one."""

    class Slow(dict):
        def __len__(self):
            length = super().__len__()
            time.sleep(0.01)
            return length

    def work(strategy):
        client = strategy.worker.client
        client._optimizers = Slow()
        made = [optimizers.SGD(1.0, momentum=0.9) for _ in range(16)]
        with ThreadPoolExecutor(16) as pool:
            return sorted(pool.map(client.number_of, made))

    assert run_workers(comm, comm.size - 1, work)[0] == list(range(16))


def test_a_variable_that_the_chief_never_makes(comm):
    def work(strategy):
        Variable(ramp(0))
        if not strategy.is_chief:
            refusal(RankFailedError, r"worker 0 \(rank 1\), the chief, has left", Variable, 1.0)
        return True

    assert all(run_workers(comm, 1, work))


@pytest.mark.ranks(3)
def test_waiting_for_the_chief_obeys_the_deadline(comm):

    def work(strategy):
        if strategy.is_chief:
            together(strategy)
            return Variable(ramp(1)).numpy()
        before, comm.deadline = comm.deadline, 0.4
        with pytest.raises(DeadlineExceededError, match="rank 1, the chief") as raised:
            Variable(ramp(0))
        comm.deadline = before
        assert raised.value.absent == (1,)
        together(strategy)
        return Variable(ramp(0)).numpy()

    for value in run_workers(comm, 1, work):
        np.testing.assert_array_equal(value, ramp(1))


@servers_of
def test_what_all_workers_assign_arrives(comm, servers):
    servers = fitting(comm, servers)

    def work(strategy):
        number = number_of(strategy)
        total = Variable(np.zeros((5, 3), np.int64))
        taken = Variable(ramp(9), aggregation=VariableAggregation.SUM)
        for step in range(20):
            total.assign_add(ramp(number, dtype=np.int64) + step)
            strategy.run(lambda: taken.assign_sub(np.full((5, 3), number + 1, np.float32)))
        strategy.worker.client.fence()
        together(strategy)
        return total.numpy(), taken.numpy()

    results = run_workers(comm, servers, work)
    workers = range(len(results))
    total = sum(20 * ramp(number, dtype=np.int64) + 190 for number in workers)
    taken = ramp(9) - 20 * sum(number + 1 for number in workers)
    for result in results:
        np.testing.assert_array_equal(result[0], total)
        np.testing.assert_array_equal(result[1], taken)


def test_a_worker_reads_its_own_pushes(comm):
    def work(strategy):
        number = number_of(strategy)
        variables = [Variable(np.zeros(1000)) for _ in strategy.roles.workers]
        own = variables[number]
        for step in range(50):
            strategy.run(lambda: own.assign(np.full(1000, number + 10 * step)))  # noqa: B023
            assert (own.numpy() == number + 10 * step).all()
            own.assign_add(np.full(1000, 0.5))
            assert own[7] == number + 10 * step + 0.5
        return True

    assert all(run_workers(comm, 1, work))


def test_each_worker_is_a_sync_group_of_one(comm):
    def work(strategy):
        number = number_of(strategy)
        assert strategy.num_replicas_in_sync == 1
        assert strategy.is_chief == (number == 0)
        assert strategy.cluster_resolver.task_type == "worker"
        assert strategy.cluster_resolver.task_id == number
        assert strategy.reduce(ReduceOp.SUM, np.array([1.0, number]), axis=0) == 1 + number
        counter = Variable(np.int64(0), synchronization=on_read(), aggregation=summed())

        def step():
            context = strategies.get_replica_context()
            assert context.replica_id_in_sync_group == 0
            counter.assign_add(number)
            return context.all_reduce("sum", np.array([number]))

        assert strategy.run(step) == [number]
        assert counter.numpy() == number
        contexts = []
        data = strategy.distribute_datasets_from_function(
            lambda context: contexts.append(context) or [np.ones(number + 1)]
        )
        assert [len(batch) for batch in data] == [number + 1]
        return contexts[0].num_input_pipelines, contexts[0].input_pipeline_id, repr(strategy)

    results = run_workers(comm, 1, work)
    workers = comm.size - 1
    for number, (pipelines, pipeline, text) in enumerate(results):
        assert (pipelines, pipeline) == (workers, number)
        name = f"worker {number} (rank {number + 1}) of {workers} workers and 1 ps"
        assert text == f"<ParameterServerStrategy {name}>"


def on_read():
    return strategies.VariableSynchronization.ON_READ


def summed():
    return VariableAggregation.SUM


@servers_of
@pytest.mark.parametrize("shards", [None, 2])
def test_gradients_of_all_workers_are_applied(comm, servers, shards):
    """The order of SGD's steps is irrelevant: these numbers add up without rounding."""
    servers = fitting(comm, servers)
    partitioner = shards and FixedShardsPartitioner(shards)

    def work(strategy):
        number = number_of(strategy)
        weights, bias = Variable(ramp(1)), Variable(np.float32(8))
        optimizer = optimizers.SGD(0.5)
        gradients = ramp(number), np.float32(number + 1)
        for _ in range(4):
            pairs = zip(gradients, (weights, bias), strict=True)
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        strategy.worker.client.fence()
        together(strategy)
        return weights.numpy(), bias.numpy(), optimizer.saved_tensors()["iterations"]

    results = run_workers(comm, servers, work, variable_partitioner=partitioner)
    workers = range(len(results))
    for weights, bias, iterations in results:
        np.testing.assert_array_equal(weights, ramp(1) - 2 * sum(map(ramp, workers)))
        assert bias == 8 - 2 * sum(number + 1 for number in workers)
        assert iterations == 4 * len(results)


OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: optimizers.Adam(0.01),
}


def train(run, make, steps=7):
    """A small problem, whose numbers depend on every bit; returns the final values.

    The bias has no gradient at first: its steps count all the same for Adam.
    """
    generator = np.random.default_rng(5)
    target = generator.normal(size=(6, 4)).astype(np.float32)
    weights = Variable(generator.normal(size=(6, 4)).astype(np.float32))
    bias = Variable(np.zeros(4, np.float32))
    optimizer = make()

    def step(images, number):
        error = images @ weights + bias - images @ target
        ours = error.sum(axis=0) if number > 2 else None
        optimizer.apply_gradients([(images.T @ error, weights), (ours, bias)])

    for number in range(steps):
        run(step, args=(generator.normal(size=(8, 6)).astype(np.float32), number))
    return weights.numpy().copy(), bias.numpy().copy()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", [None, 4])
def test_one_worker_has_the_numbers_of_the_default_strategy(comm, name, shards):
    right = train(strategies.get_strategy().run, OPTIMIZERS[name])

    def work(strategy):
        return train(strategy.run, OPTIMIZERS[name])

    partitioner = shards and FixedShardsPartitioner(shards)
    (result,) = run_workers(comm, comm.size - 1, work, variable_partitioner=partitioner)
    for value, wanted in zip(result, right, strict=True):
        assert value.tobytes() == wanted.tobytes()


def test_adam_counts_the_updates_of_all_workers(comm):
    """Workers take turns, so that the numbers are those of one worker with all steps."""
    right = Variable(ramp(0, dtype=np.float64))
    reference = optimizers.Adam(0.1)
    workers = comm.size - 1
    for step in range(3 * workers):
        reference.apply_gradients([(ramp(step, dtype=np.float64), right)])

    def work(strategy):
        number, variable = number_of(strategy), Variable(ramp(0, dtype=np.float64))
        optimizer = optimizers.Adam(0.1)
        for step in range(3 * workers):
            if step % workers == number:
                pairs = [(ramp(step, dtype=np.float64), variable)]
                strategy.run(optimizer.apply_gradients, args=(pairs,))
                strategy.worker.client.fence()
            together(strategy)
        saved = optimizer.saved_tensors()
        return variable.numpy(), saved

    wanted = reference.saved_tensors()
    for value, saved in run_workers(comm, 1, work):
        assert value.tobytes() == right.numpy().tobytes()
        assert saved.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_array_equal(saved[name], wanted[name], err_msg=name)


def test_a_restored_count_of_steps_goes_on(comm):
    """Of an optimizer without slots, by whose steps a schedule of the learning rate goes."""

    def work(strategy):
        variable, optimizer = Variable(ramp(0)), optimizers.SGD(0.1)
        optimizer.restore_tensors({"iterations": 40, "learning_rate": 0.1})
        together(strategy)
        for _ in range(3):
            strategy.run(optimizer.apply_gradients, args=([(ramp(1), variable)],))
        strategy.worker.client.fence()
        together(strategy)
        return int(optimizer.saved_tensors()["iterations"])

    assert set(run_workers(comm, 1, work)) == {40 + 3 * (comm.size - 1)}


def test_the_callers_gradient_of_a_workers_own_variable_is_not_changed(comm):
    def work(strategy):
        own = Variable(np.ones(2), synchronization=on_read(), aggregation=summed())
        gradient = np.ones(2)
        optimizer = optimizers.SGD(0.5)
        strategy.run(optimizer.apply_gradients, args=([(gradient, own)],))
        assert own.local.tolist() == [0.5, 0.5]
        return gradient.tolist()

    assert run_workers(comm, 1, work)[0] == [1.0, 1.0]


@pytest.mark.parametrize("server", ["near", "far"])
def test_reads_never_return_half_of_a_change(comm, server):
    """The chief writes arrays of one number each; no rank may read two numbers in one array."""
    length = 60_000

    def work(strategy):
        variable = Variable(np.zeros(length, np.int64))
        if server == "far":
            strategy.worker.client._same_node = lambda number: False
        if strategy.is_chief:
            for step in range(1, 60):
                variable.assign(np.full(length, step))
            assert (variable.numpy() == 59).all()
            seen = [59]
        else:
            seen = [0]
            while seen[-1] < 59:
                value = variable.numpy()
                assert value.min() == value.max()
                seen.append(int(value[0]))
        mapped = strategy.worker.client._mapped
        assert [each is None for each in mapped.values()] == [server == "far"]
        return seen == sorted(seen)

    assert all(run_workers(comm, 1, work))


@pytest.mark.ranks(2)
def test_servers_of_other_nodes_are_read_by_messages():
    """Threads with two simulated nodes: a worker reads the memory of its own node's server."""

    def work(strategy):
        variables = [Variable(ramp(number)) for number in range(4)]
        for number, variable in enumerate(variables):
            variable.assign(ramp(number + 5))
            np.testing.assert_array_equal(variable.numpy(), ramp(number + 5))
        mapped = strategy.worker.client._mapped
        return [mapped[number] is None for number in range(4)]

    assert on_threads(3, 2, work, node_of=[0, 1, 1]) == [[True, False, True, False]]
    assert on_threads(4, 2, work, node_of=[0, 0, 0, 0]) == [[False] * 4] * 2


def test_a_reused_buffer_is_the_readers_own(comm):
    def work(strategy):
        variable = Variable(ramp(3))
        kept = variable.numpy()
        kept[:] = -1
        part = variable.numpy()[1:2]
        np.testing.assert_array_equal(variable.numpy(), ramp(3))
        assert (kept == -1).all()
        np.testing.assert_array_equal(part, ramp(3)[1:2])
        first = variable.numpy()
        place = first.ctypes.data
        del first
        assert variable.numpy().ctypes.data == place, "fresh memory for each read"
        return True

    assert all(run_workers(comm, 1, work))


def test_gradients_that_do_not_fit_are_refused_before_they_are_sent(comm):
    def work(strategy):
        variable = Variable(ramp(number_of(strategy)))
        optimizer = optimizers.SGD(1.0)

        def step(gradient):
            optimizer.apply_gradients([(gradient, variable)])

        refusal(ValueError, r"shape \(3,\)", strategy.run, step, args=(np.ones(3),))
        refusal(ValueError, r"shape \(2, 2\)", variable.assign, np.ones((2, 2)))
        assert strategy.worker.client._pushed[variable.storage.info.shards[0].number] == 0
        return variable.numpy()

    for value in run_workers(comm, 1, work):
        np.testing.assert_array_equal(value, ramp(0))


def divide(array, divisor):
    if not divisor.all():
        raise ZeroDivisionError(f"by {divisor.tolist()}")
    array /= divisor


@pytest.mark.parametrize("server", ["near", "far"])
def test_errors_on_the_server_are_returned_and_it_continues(comm, server):
    def work(strategy):
        if server == "far":
            strategy.worker.client._same_node = lambda number: False
        variable = Variable(np.full(4, 64.0))
        together(strategy)
        if strategy.is_chief:
            variable.storage.change(divide, np.zeros(4))
            refusal(ZeroDivisionError, r"by \[0.0, 0.0", variable.numpy)
            variable.storage.change(divide, np.zeros(4))
            with pytest.raises(ZeroDivisionError) as raised:
                strategy.worker.client.fence()
            assert "in divide" in str(raised.value.__cause__)
            variable.storage.change(divide, np.full(4, 2.0))
            assert (variable.numpy() == 32).all()
        together(strategy)
        return variable.numpy()

    for value in run_workers(comm, 1, work):
        np.testing.assert_array_equal(value, np.full(4, 32.0))


def test_the_chief_acts_and_all_get_the_result(comm):
    def work(strategy):
        number = number_of(strategy)
        acted = []
        first = strategy.chief_first(lambda: acted.append(number) or f"by {number}")
        within = strategy.chief_first(lambda: strategy.chief_first(lambda: number + 7))
        assert within == 7

        def fail():
            raise FileNotFoundError(f"nothing for {number}")

        refusal(FileNotFoundError, "nothing for 0", strategy.chief_first, fail)
        # What the chief can't send, and a variable that it can't make, are errors on all as well.
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            strategy.chief_first(lambda: threading.Lock())
        wrong = "x" if strategy.is_chief else 1.0
        strategy.worker.create, create = lambda *_: int(wrong), strategy.worker.create
        refusal(ValueError, "invalid literal", Variable, 1.0)
        strategy.worker.create = create
        return acted, first, strategy.chief_first(lambda: number + 5)

    results = run_workers(comm, 1, work)
    assert results == [([0], "by 0", 5)] + [([], "by 0", 5)] * (len(results) - 1)


def test_wrong_use(comm):
    with strategy_on(comm, 1) as strategy:
        if comm.rank:
            refusal(RuntimeError, rf"\(rank {comm.rank}\) can't serve", strategy.serve)
        else:
            with strategy.scope():
                refusal(RuntimeError, r"ps 0 \(rank 0\) is not a worker", Variable, 1.0)
            refusal(RuntimeError, r"ps 0 \(rank 0\) is not a worker", strategy.run, lambda: None)
            strategy.serve()
            strategy.serve()
            strategy.shutdown()
        if comm.rank:
            with strategy.scope():
                variable = Variable(1.0)
            strategy.shutdown()
            strategy.shutdown()
            refusal(RuntimeError, "has left the parameter servers", variable.assign, 2.0)
            refusal(RuntimeError, "has left the parameter servers", variable.numpy)


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_clusters_that_cannot_train(comm, job, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", tf_config({job: ["x"] * comm.size}, job, comm.rank))
    missing = "worker" if job == "ps" else "ps"
    same_refusal(
        comm, ValueError, f"has no job {missing}", ParameterServerStrategy, communicator=comm
    )
    monkeypatch.delenv("TF_CONFIG")
    same_refusal(comm, ValueError, "has no job ps", ParameterServerStrategy, communicator=comm)


def test_a_workers_dataset_may_have_options(comm):
    def work(strategy):
        def dataset(context):
            return [np.full(2, context.input_pipeline_id)] * (number_of(strategy) + 1)

        distribute = strategy.distribute_datasets_from_function
        return [list(distribute(dataset, options=each)) for each in (None, InputOptions())]

    for number, made in enumerate(run_workers(comm, 1, work)):
        np.testing.assert_array_equal(made, [[[number] * 2] * (number + 1)] * 2)


@pytest.mark.parametrize(
    ("named", "error"),
    [
        ({"staleness": -1}, ValueError),
        ({"staleness": 1.5}, TypeError),
        ({"staleness": True}, TypeError),
        ({"variable_partitioner": 4}, TypeError),
    ],
)
def test_wrong_arguments(comm, named, error):
    (name,) = named
    same_refusal(comm, error, f"{name}=", ParameterServerStrategy, communicator=comm, **named)


@pytest.mark.ranks(2)
def test_all_resources_are_closed(comm):
    """The end of a strategy frees its memory."""

    def work(strategy):
        variable = Variable(np.ones(5_000_000))
        return float(variable.numpy().sum())

    def maps():
        with open("/proc/self/maps", encoding="ascii") as lines:
            return sum("memfd:collectives" in line for line in lines)

    counts = []
    for _ in range(3):
        assert run_workers(comm, 1, work) == [5e6]
        gc.collect()
        counts.append((maps(), len(os.listdir("/proc/self/fd"))))
    assert counts[2] <= counts[0], counts
