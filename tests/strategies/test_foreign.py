"""Models of frameworks are refused where several ranks would train them independently."""

import functools
import gc
import sys
import threading
import timeit
from collections import deque

import numpy as np
import pytest

import strategies
from collectives import MismatchError
from strategies import (
    CentralStorageStrategy,
    Checkpoint,
    LocalSGDStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    Variable,
    experimental_set_strategy,
    get_replica_context,
    optimizers,
)
from strategies.coordinator import ClusterCoordinator
from strategies.foreign.reach import find_trainable
from tests.strategies.imagined_framework import Model, Optimizer, imagined, load, unloaded
from tests.strategies.parameter_servers import run_workers, strategy_on
from tests.strategies.support import (
    as_replicas,
    lone_strategy,
    on_ranks,
    refusal,
    same_refusal,
)

__all__ = ["imagined", "unloaded"]

MADE = (
    "(?s)the Imagined Model 'net' was created in the scope of {}: it would train independently"
    ".*do it by hand"
)
REACHED = "(?s)the Imagined Model 'net' is used in run of {}: .*do it by hand"
STEPPED = "the Imagined Optimizer 'Descent' would change variables inside the {}: "


def local_sgd(communicator):
    return LocalSGDStrategy(3, communicator=communicator)


SYNCED = "MultiWorkerMirroredStrategy"
KINDS = [MultiWorkerMirroredStrategy, MirroredStrategy, CentralStorageStrategy, local_sgd]


def made_in_scope(strategy, *names):
    with strategy.scope():
        return [Model(name) for name in names]


def name_of(strategy):
    return type(strategy).__name__


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_strategy_refuses_them_on_every_rank(comm, kind, imagined):
    strategy, net = kind(communicator=comm), Model("net")
    name = name_of(strategy)
    same_refusal(comm, TypeError, MADE.format(name), made_in_scope, strategy, "net", "a")
    same_refusal(comm, TypeError, REACHED.format(name), strategy.run, lambda: net)
    step = Optimizer.step
    same_refusal(comm, TypeError, STEPPED.format(f"run of {name}"), strategy.run, trained, [step])
    with strategy.scope():
        own = Variable(np.ones(3))
    strategy.run(lambda: optimizers.SGD(1.0).apply_gradients([(np.full(3, 1 / comm.size), own)]))
    strategy.communicator.close()


def trained(step):
    step(Optimizer())


@pytest.mark.mpi
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_may_train_them(comm, kind, imagined):
    strategy = kind(communicator=comm)
    (net,) = made_in_scope(strategy, "net")
    with strategy.scope():
        assert strategy.run(lambda: Optimizer().step() or net) is net
    strategy.communicator.close()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_so_do_workers_of_parameter_servers(comm, imagined):
    def work(strategy):
        name, net = name_of(strategy), Model("net")
        refusal(TypeError, MADE.format(name), made_in_scope, strategy, "net")
        refusal(TypeError, REACHED.format(name), strategy.run, lambda: net)
        net.frozen = True  # for the scope that this runs in
        return refusal(TypeError, STEPPED.format("scope of " + name), Optimizer().step)

    assert len(set(run_workers(comm, 1, work))) == 1


@pytest.mark.mpi
@pytest.mark.ranks(3)
def test_so_do_functions_that_a_chief_schedules(comm, imagined):
    with strategy_on(comm, 1, chief=True) as strategy:
        if comm.rank == 2:
            coordinator, net = ClusterCoordinator(strategy), Model("net")
            coordinator.schedule(lambda: net)
            refusal(TypeError, REACHED.format(name_of(strategy)), coordinator.join)
            strategy.shutdown()
        else:
            strategy.serve()


def test_the_default_strategy_and_one_device_are_one_replica(imagined):
    for strategy in (strategies.get_strategy(), strategies.OneDeviceStrategy("/cpu:0")):
        (net,) = made_in_scope(strategy, "net")
        assert strategy.run(lambda net=net: Optimizer().step() or net) is net


# --- scopes --------------------------------------------------------------------------------------


def in_scopes(function):
    """Call it with a strategy of two replicas, both threads."""
    return on_ranks(2, function)


def test_a_model_that_is_frozen_at_the_end_of_the_scope_is_allowed(imagined):
    def body(strategy):
        with strategy.scope():
            net = Model("net")
            net.frozen = True
        return strategy.run(lambda: net.name)

    assert in_scopes(body) == ["net", "net"]


def test_a_model_that_no_longer_exists_at_the_end_of_the_scope_is_allowed(imagined):
    """Although the garbage collector hasn't collected it yet."""

    def body(strategy):
        gc.disable()
        try:
            with strategy.scope():
                initial = len(Model("temporary").name)
                circular = Model("circular")
                circular.itself = circular
                del circular
                return initial
        finally:
            gc.enable()

    assert in_scopes(body) == [9, 9]


def test_the_largest_is_named(imagined):
    def body(strategy):
        return refusal(TypeError, "Model 'largest'", made_in_scope, strategy, "a", "largest", "b")

    assert len(set(in_scopes(body))) == 1


def test_the_programs_own_exception_leaves_the_scope(imagined):
    def body(strategy):
        refusal(KeyError, "mine", fails, strategy)
        made_in_scope(strategy)

    in_scopes(body)


def fails(strategy):
    with strategy.scope():
        Model("net")
        raise KeyError("mine")


def test_an_inner_scope_refuses_what_was_made_in_it(imagined):
    def body(strategy):
        with strategy.scope():
            refusal(TypeError, "Model 'inner'", made_in_scope, strategy, "inner")
        assert not strategies.has_strategy()

    in_scopes(body)


def test_steps_in_a_scope_raise_at_once(imagined):
    def body(strategy):
        with strategy.scope():
            text = refusal(TypeError, STEPPED.format("scope of " + SYNCED), Optimizer().step)
        Optimizer().step()
        return text

    assert len(set(in_scopes(body))) == 1


def test_another_threads_models_are_not_the_scopes(imagined):
    def body(strategy):
        with strategy.scope():
            other = threading.Thread(target=lambda: (Model("theirs"), Optimizer().step()))
            other.start()
            other.join()
        return True

    assert in_scopes(body) == [True, True]


def test_a_framework_imported_inside_counts(unloaded):
    """Its objects are found although no hook recorded their creation."""
    kept = []

    def body(strategy):
        with strategy.scope():
            load()
            kept.append(Model("net with a long name"))

    strategy = lone_strategy()
    strategy.trains_alone = False
    refusal(TypeError, "Model 'net with a long name' was created in", body, strategy)


def test_a_strategy_put_in_force_without_a_scope(imagined):
    def body(strategy):
        experimental_set_strategy(strategy)
        try:
            kept = Model("net")
            refusal(TypeError, STEPPED.format("scope of " + SYNCED), Optimizer().step)
        finally:
            text = refusal(TypeError, MADE.format(SYNCED), experimental_set_strategy, None)
        assert not strategies.has_strategy()
        assert not kept.frozen
        Optimizer().step()
        return text

    assert len(set(in_scopes(body))) == 1


# --- what a function reaches ---------------------------------------------------------------------

GLOBAL = Model("global")
HELD = {"models": [GLOBAL]}


class Trainer:
    def __init__(self, model):
        self.model = model

    def step(self, batch=None):
        return batch

    def __call__(self, batch=None):
        return batch


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model


def uses_global(batch=None):
    return GLOBAL, batch


def uses_held():
    return HELD


def calls_another():
    return [uses_global() for _ in range(2)]


def default(model=GLOBAL):
    return model


def keyword(*, model=GLOBAL):
    return model


def by_closure():
    model = Model("closure")
    return lambda: model


def in_inner_function():
    def inner():
        return GLOBAL

    return inner


def decorated(function):
    @functools.wraps(function)
    def wrapper():
        return None

    return wrapper


class Settings:
    net = Model("shared")


class Derived(Settings):
    pass


def uses_class():
    return Settings.net


def uses_module():
    return this.GLOBAL


this = sys.modules[__name__]

REACHING = {
    "argument": ("x", lambda batch: batch, [Model("x")]),
    "nested argument": ("x", lambda batch: batch, [{"a": (0, [Model("x")])}]),
    "argument's attribute": ("x", lambda batch: batch, [Slotted(Model("x"))]),
    "global": ("global", uses_global, []),
    "global in containers": ("global", uses_held, []),
    "a function that it calls": ("global", calls_another, []),
    "an inner function": ("global", in_inner_function, []),
    "default": ("global", default, []),
    "keyword's default": ("global", keyword, []),
    "closure": ("closure", by_closure(), []),
    "method": ("x", Trainer(Model("x")).step, []),
    "callable object": ("x", Trainer(Slotted(Model("x"))), []),
    "partial": ("x", functools.partial(Trainer.step, Trainer(Model("x"))), []),
    "partial's function": ("global", functools.partial(uses_global, 1), []),
    "decorated": ("global", decorated(uses_global), []),
    "a class's attribute": ("shared", uses_class, []),
    "the class of an object": ("shared", lambda given: given.net, [Derived()]),
    "deque": ("x", lambda given: given[0], [deque([Model("x")])]),
    "a module's attribute": ("global", uses_module, []),
    "the model itself": ("x", Model("x"), []),
}


@pytest.mark.parametrize("way", REACHING)
def test_what_is_reached(imagined, way):
    name, function, arguments = REACHING[way]
    assert find_trainable(function, arguments, {}).name == name
    assert find_trainable(lambda **named: named, [0], {"a": [function, *arguments]}).name == name


def test_what_is_not_reached(imagined):
    import tests.strategies.imagined_framework as module

    frozen = Model("frozen", frozen=True)
    numbers = np.ones(3)
    later = None

    def step(batch):
        return frozen, numbers, later, module, np.sum(batch), strategies, Variable, Model, unknown  # noqa: F821

    def waits():
        return never

    circle = []
    circle.append(circle)
    arguments = [numbers, circle, [0] * 100_000 + [Model("far")], lone_strategy(), Model, {1, 2}]
    assert find_trainable(step, arguments, {"x": Variable(1.0)}) is None
    assert find_trainable(waits, [], {}) is None
    never = 0


# The functions below use these names as attributes of other objects.
net, elements = Model("unrelated"), [Model("unrelated")]


def attributes(given):
    elements = given.elements
    given.net = elements
    return np.sum(given.net), this.unknown.net, [each.net for each in elements]


def test_names_of_attributes_are_no_globals(imagined):
    assert find_trainable(attributes, [np.ones(3)], {}) is None
    # Methods that the function doesn't call.
    assert find_trainable(lambda given: given, [Uncalled()], {}) is None


class Uncalled:
    def evaluate(self):
        return GLOBAL


def test_large_data_costs_little(imagined):
    """Nothing beyond the limit is searched, in whichever order a set is iterated."""
    data = [[Slotted(number) for number in range(64)] for _ in range(64)]
    seconds = min(timeit.repeat(lambda: find_trainable(lambda: data, [], {}), number=1, repeat=50))
    assert seconds < 1e-3  # about 50 µs, and more than 10 ms if all were searched
    far = {Slotted(Slotted(number)) for number in range(63)} | {Slotted(Slotted(Model("far")))}
    wide = [far, *({Slotted(Slotted(number)) for number in range(64)} for _ in range(9))]
    large = {Model(str(number)) for number in range(65)}  # the first elements differ by rank
    for too_much in (wide, large):
        assert find_trainable(lambda given=too_much: given, [], {}) is None
    assert find_trainable(lambda: far, [], {}).name == "far"


def test_run_accepts_allowed_objects(imagined):
    frozen = Model("frozen", frozen=True)

    def one_replica(strategy, number):
        return get_replica_context().all_reduce("SUM", np.array(float(number))), frozen.name

    assert as_replicas(2, one_replica) == [(1.0, "frozen")] * 2


# --- apply_gradients -----------------------------------------------------------------------------


def applied(strategy, pairs):
    return strategy.run(lambda: optimizers.SGD(1.0).apply_gradients(pairs()))


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_variables_that_are_none(comm, imagined):
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    with strategy.scope():
        own, other = Variable(np.ones(3), name="own"), Variable(np.ones(3))

    def pairs(other):
        return lambda: [(np.ones(3), own), (np.ones(3), other())]

    foreign = (
        "the Imagined Model 'net' at position 1 of apply_gradients is not a strategies.Variable"
    )
    refused = functools.partial(same_refusal, comm, TypeError)
    refused(foreign, applied, strategy, pairs(lambda: Model("net")))
    array = "the variable at position 1 is a ndarray: must be a strategies.Variable"
    refused(array, applied, strategy, pairs(lambda: np.ones(3)))
    views = optimizers.SGD(1.0).gradient_views
    refused("at position 1", strategy.run, lambda: views([own, np.ones(3)]))
    # On one rank only: the same error on all ranks at once, and the next step works.
    last = comm.rank == comm.size - 1
    same_refusal(
        comm,
        MismatchError,
        f"(?s)rank {comm.size - 1}: .*refused by TypeError: {foreign}",
        applied,
        strategy,
        pairs(lambda: Model("net") if last else other),
    )
    applied(strategy, lambda: [(np.ones(3), own)])
    np.testing.assert_array_equal(own, np.full(3, 1.0 - comm.size))
    strategy.communicator.close()


class Differentiated:
    """An array that can't be read, as a torch tensor that requires a gradient."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("use detach()")


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_gradients_that_are_absent_or_unreadable(comm):
    strategy = MultiWorkerMirroredStrategy(communicator=comm)
    with strategy.scope():
        first, second = Variable(np.ones(3), name="w"), Variable(np.ones(2), name="b")
    last = comm.rank == comm.size - 1
    same_refusal(
        comm,
        MismatchError,
        rf"rank {comm.size - 1}: .*None at position 1 \(<Variable 'b'.*np.zeros\(variable.shape\)",
        applied,
        strategy,
        lambda: [(np.ones(3), first), (None if last else np.ones(2), second)],
    )
    same_refusal(
        comm,
        MismatchError,
        r"the gradient at position 1, a Differentiated for <Variable 'b'.*use detach\(\)",
        applied,
        strategy,
        lambda: [(np.ones(3), first), (Differentiated() if last else np.ones(2), second)],
    )
    for odd, text in (
        (np.ones(2, complex), "at position 1 is of complex128"),
        (np.array(["1", "2"]), "at position 1 is of <U1"),
        (np.ma.masked_array(np.ones(2)), "masked array"),
    ):
        same_refusal(
            comm,
            MismatchError,
            text,
            applied,
            strategy,
            lambda odd=odd: [(np.ones(3), first), (odd if last else np.ones(2), second)],
        )
    applied(strategy, lambda: [(np.ones(3), first), (None, second)])
    applied(strategy, lambda: [(np.ones(3), first), (np.zeros(2) if last else np.ones(2), second)])
    np.testing.assert_array_equal(first, np.full(3, 1.0 - 2 * comm.size))
    np.testing.assert_array_equal(second, np.full(2, 2.0 - comm.size))
    strategy.communicator.close()


# --- checkpoints ---------------------------------------------------------------------------------


class Saved(Model):
    """Has the protocol Saveable."""

    def saved_tensors(self):
        return {"": np.ones(2)}

    def restore_tensors(self, tensors):
        pass


def test_checkpoints_refuse_models_that_they_cannot_save(imagined, tmp_path):
    step = Variable(3)
    frozen = Model("net", frozen=True)
    match = "(?s){} is the Imagined Model 'net', which a Checkpoint can't save.*saved_tensors"
    refusal(TypeError, match.format("model"), Checkpoint, model=Model("net"))
    refusal(TypeError, match.format("model"), Checkpoint, model=frozen)
    holder = {"step": step, "models": [0, Model("net")]}
    refusal(TypeError, match.format("all/models/1"), Checkpoint, all=holder)
    trainer = Trainer(frozen)
    trainer.step_count = step
    checkpoint = Checkpoint(trainer=trainer, own=Saved("net"))
    checkpoint.save(tmp_path / "kept")
    trainer.model = Model("net")
    refusal(TypeError, match.format("trainer/model"), checkpoint.save, tmp_path / "kept")
    refusal(TypeError, match.format("trainer/model"), checkpoint.restore, tmp_path / "kept")
    refusal(TypeError, match.format("late"), setattr, checkpoint, "late", Model("net"))
