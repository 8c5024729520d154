"""Torch models under a strategy train as one process does on the whole batches."""

import copy
import gc
import io
import weakref
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import collectives
import strategies

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.timeout_seconds(60)]

ROWS, STEPS = 4, 4


@pytest.fixture(autouse=True)
def _one_thread(torch):
    torch.set_num_threads(1)


def network(torch, seed=1):
    torch.manual_seed(seed)
    nn = torch.nn
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))


def batches(torch, size, rows=ROWS):
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return [torch.randn(rows * size, 5, generator=generator) for _ in range(STEPS)]


def loss_of(model, x):
    return model.eval()(x).square().mean()


def optimizers(torch, parameters):
    parameters = list(parameters)
    return {
        "SGD": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "Adam": lambda: torch.optim.Adam(parameters, 0.05),
    }


def train(torch, model, optimizer, parts, *, clip=None, scheduler=None, to_none=True):
    for x in parts:
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, x).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def check(torch, model, expected):
    for (name, own), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, msg=lambda m, n=name: f"{n}: {m}")


def strategy_of(kind, comm):
    made = {
        "worker": lambda: strategies.MultiWorkerMirroredStrategy(communicator=comm),
        "mirrored": lambda: strategies.MirroredStrategy(communicator=comm),
        "central": lambda: strategies.CentralStorageStrategy(communicator=comm),
    }
    return made[kind]()


@pytest.mark.parametrize("kind", ["worker", "mirrored", "central"])
def test_steps_are_those_of_one_process(torch, comm, kind):
    """With clipping and a scheduler, made before or after; in the scope and in `run`."""
    whole = batches(torch, comm.size)
    for name in ("SGD", "Adam"):
        alone = network(torch)
        optimizer = optimizers(torch, alone.parameters())[name]()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(torch, alone, optimizer, whole, clip=0.1, scheduler=scheduler)

        strategy = strategy_of(kind, comm)
        with strategy.scope():
            model = network(torch, seed=1 + comm.rank)
            model[2].running_var += comm.rank
            optimizer = optimizers(torch, model.parameters())[name]()
            given = model, optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            assert strategy.distribute(model, optimizer) == given
        parts = [x.chunk(comm.size)[comm.rank] for x in whole]
        strategy.run(
            train,
            (torch, model, optimizer, parts),
            {"clip": 0.1, "scheduler": scheduler, "to_none": name == "SGD"},
        )
        check(torch, model, alone)
        torch.testing.assert_close(model[2].running_var, torch.ones(8))
        assert type(optimizer).__name__ == name
        assert torch.save(model, io.BytesIO()) is None
        assert copy.deepcopy(model).state_dict().keys() == alone.state_dict().keys()


def test_accumulation_weights_and_mixed_precision(torch, comm):
    """Ranks have parts of unequal length, which a distributed DataLoader gives; the last is empty.

    One rank's loss overflows in 16 bits: no rank takes the step.
    """
    strategy = strategy_of("worker", comm)
    data = torch.utils.data.TensorDataset(torch.randn(13, 5, generator=torch.manual_seed(5)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    alone = network(torch)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1, momentum=0.9)
    train(torch, alone, optimizer, [x for (x,) in loader])

    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    strategy.distribute(model, optimizer, weighted=True)
    gradients = strategy.gradients_of(model)
    lengths = []
    for (x,) in strategy.experimental_distribute_dataset(loader):
        optimizer.zero_grad()
        gradients.weight = len(x)
        lengths.append(len(x))
        loss_of(model, x).backward()
        optimizer.step()
    check(torch, model, alone)
    assert sum(lengths) == 13 or comm.size > 1

    strategy.distribute(model, optimizer)
    gradients = strategy.gradients_of(model)
    whole = batches(torch, comm.size)
    alone.zero_grad()
    model.zero_grad()
    for x in whole[:2]:
        loss_of(alone, x).backward()
    part = [x.chunk(comm.size)[comm.rank] for x in whole]
    with gradients.no_sync():
        loss_of(model, part[0]).backward()
    loss_of(model, part[1]).backward()
    for own, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, part[2])
    if comm.rank == comm.size - 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for own, other in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=0, atol=0)


def of_base(torch, base):
    """A class whose `step` calls that of its base, so that torch calls hooks twice."""
    base([torch.zeros(1)])

    class Derived(base):
        def step(self, closure=None):
            return super().step(closure)

    return Derived


def test_a_step_that_calls_that_of_its_base(torch, comm):
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = of_base(torch, torch.optim.SGD)(model.parameters(), 1.0)
    strategy.distribute(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
    optimizer.step()
    step = torch.full((1, 3), (comm.size + 1) / 2)
    torch.testing.assert_close(before - model.weight.detach(), step)


@pytest.mark.parametrize("outer", [False, True], ids=["mean", "DiLoCo"])
def test_local_sgd_averages_parameters(torch, comm, outer):
    """As a simulation of all ranks in one process does."""
    settings = {"momentum": 0.9, "nesterov": True}
    outer_optimizer = strategies.optimizers.SGD(0.7, **settings) if outer else None
    strategy = strategies.LocalSGDStrategy(2, outer_optimizer=outer_optimizer, communicator=comm)
    whole = batches(torch, comm.size)
    model = network(torch, seed=1 + comm.rank)
    optimizer = of_base(torch, torch.optim.Adam)(model.parameters(), 0.05)
    # Replaced by the later calls, so that no step counts twice.
    strategy.distribute(torch.nn.Sequential(model), optimizer)
    gc.collect()  # the container is gone
    wrapped = torch.nn.Sequential(model)
    strategy.distribute(wrapped, optimizer)
    strategy.distribute(model, optimizer)
    with strategy.gradients_of(model).no_sync():
        pass
    train(torch, model, optimizer, [x.chunk(comm.size)[comm.rank] for x in whole])

    replicas = [network(torch) for _ in range(comm.size)]
    steps = [torch.optim.Adam(each.parameters(), 0.05) for each in replicas]
    agreed = network(torch)
    outside = torch.optim.SGD(agreed.parameters(), 0.7, **settings)
    for begin in (0, 2):
        for rank, (replica, step) in enumerate(zip(replicas, steps, strict=True)):
            parts = [x.chunk(comm.size)[rank] for x in whole[begin : begin + 2]]
            train(torch, replica, step, parts)
        with torch.no_grad():
            columns = [each.parameters() for each in (agreed, *replicas)]
            for target, *values in zip(*columns, strict=True):
                mean = torch.stack(values).mean(0)
                target.grad = target - mean
                if not outer:
                    target.copy_(mean)
            if outer:
                outside.step()
            for replica in replicas:
                replica.load_state_dict(agreed.state_dict())
    if outer or comm.size > 1:
        check(torch, model, agreed)
    del wrapped, model, optimizer
    gc.collect()
    assert len(strategy._modules) == 0


def test_local_sgd_of_layers_that_are_trained_later(torch, comm, caplog):
    strategy = strategies.LocalSGDStrategy(2, communicator=comm)
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    frozen = list(model[1].parameters())
    for each in frozen:
        each.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer)

    def step(stepping):
        stepping.zero_grad()
        model(torch.full((3, 2), comm.rank + 1.0)).sum().backward()
        stepping.step()

    def are_equal(parameters):
        given = [comm.all_gather(each.detach().reshape(1, -1)) for each in parameters]
        return all((each == each[0]).all() for each in given)

    for _ in range(2):
        step(optimizer)
    for each in frozen:
        each.requires_grad_(True)
    for _ in range(2):
        step(optimizer)
    assert are_equal(model.parameters())
    assert not caplog.messages
    step(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        strategy.synchronize()
    (text,) = caplog.messages
    assert "0.weight was changed, but not by a step of an optimizer that was given" in text


@pytest.mark.ranks(2)
def test_local_sgd_with_a_gradient_scaler(torch, comm):
    """A step that it skips on one rank is missed, which the error explains; not a fused one."""
    for fused in (True, False):
        strategy = strategies.LocalSGDStrategy(2, communicator=comm)
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=fused)
        strategy.distribute(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def train(model=model, optimizer=optimizer, scaler=scaler, strategy=strategy):
            for number in range(2):
                optimizer.zero_grad()
                overflow = comm.rank == 1 and number == 0
                loss = model(torch.ones(1, 2)).sum() * (float("inf") if overflow else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            strategy.synchronize()

        if fused:
            train()
            torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -0.75))
        else:
            with pytest.raises(collectives.MismatchError, match="A GradScaler skips optimizer"):
                train()


def test_what_is_refused(torch, comm, monkeypatch):
    strategy = strategy_of("worker", comm)
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong, match in (
        ((object(), optimizer), "model is a object: must be a torch module"),
        ((model, object()), "optimizer is a object: must be a torch optimizer"),
        ((torch.nn.DataParallel(model), optimizer), "is a DataParallel, which reduces"),
    ):
        with pytest.raises(TypeError, match=match):
            strategy.distribute(*wrong)
    with pytest.raises(ValueError, match="must be a model that was given to distribute"):
        strategy.gradients_of(model)
    other = torch.nn.Parameter(torch.ones(7))
    with pytest.raises(ValueError, match=r"parameter of shape \(7,\) that the model did not have"):
        strategy.distribute(model, torch.optim.SGD([*model.parameters(), other], 0.1))
    strategy.distribute(model, optimizer)
    optimizer.add_param_group({"params": [other]})
    with pytest.raises(ValueError, match=r"parameter of shape \(7,\) that the model did not have"):
        optimizer.step()
    options = strategies.CommunicationOptions(implementation="RING")
    others = strategies.MultiWorkerMirroredStrategy(None, options, communicator=comm)
    with pytest.raises(ValueError, match="must have no cross_device_ops"):
        others.distribute(network(torch), [])


@pytest.mark.ranks(2, 3)
def test_layers_with_which_ranks_would_train_apart(torch, comm):
    from collectives.torch import SyncBatchNorm

    strategy = strategy_of("worker", comm)
    for layer in (torch.nn.Embedding(4, 3, max_norm=1.0), torch.nn.EmbeddingBag(4, 3, max_norm=1)):
        with pytest.raises(ValueError, match=r"0 has max_norm=1.*: must be None"):
            strategy.distribute(torch.nn.Sequential(layer), [])
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), SyncBatchNorm(8, comm=comm))
    with pytest.raises(ValueError, match="weighted=True, and 1 is a SyncBatchNorm"):
        strategy.distribute(model, [], weighted=True)
    # As the error says.
    strategy.distribute(model, [])
    alone = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8))
    alone.load_state_dict(model.state_dict())
    whole = torch.randn(4 * comm.size + 1, 5, generator=torch.manual_seed(2))
    scale = torch.arange(8.0)
    own = whole.tensor_split(comm.size)[comm.rank]
    mean = len(whole) / comm.size
    ((model(own) * scale).square().mean() * len(own) / mean).backward()
    (alone(whole) * scale).square().mean().backward()
    for each, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(each.grad, other.grad)


@pytest.mark.ranks(2)
def test_what_other_optimizers_do_apart_is_logged(torch, comm, caplog):
    strategy, model = strategy_of("worker", comm), network(torch)
    strategy.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x = batches(torch, comm.size)[0]

    def loss():
        model.zero_grad()
        found = loss_of(model, x)
        found.backward()
        return found

    # The gradients are the ranks' common ones, so that this steps as the first one would.
    other = torch.optim.Adam(model.parameters(), 0.1)
    loss()
    other.step()
    assert not caplog.records
    quadratic = torch.optim.LBFGS(model.parameters(), max_iter=1)
    for _ in range(2):
        quadratic.step(loss)
    (record,) = caplog.records
    assert "LBFGS was not given to distribute with its model: the loss" in record.getMessage()
    model.append(torch.nn.Linear(1, 1))
    more = torch.optim.SGD(model.parameters(), 0.1)
    loss()
    more.step()
    (_, record) = caplog.records
    assert "4.weight was added since" in record.getMessage()
    strategy.distribute(model, more)
    loss()
    more.step()
    assert len(caplog.records) == 2


@pytest.mark.ranks(2, 3)
def test_what_one_rank_alone_gives(torch, comm):
    """Every rank raises, and the next call works."""
    strategy, last = strategy_of("worker", comm), comm.rank == comm.size - 1
    model = network(torch)
    with pytest.raises((collectives.MismatchError, ValueError), match="bogus"):
        strategy.distribute(model, [], unused="bogus" if last else "error")
    with pytest.raises(ValueError, match="remainder='pad'"):
        strategy.sampler(range(10), remainder="pad" if last else "drop")
    for given in ((iter([]) if last else range(10), 0), (range(10), 0.5 if last else 0)):
        with pytest.raises((TypeError, collectives.MismatchError), match="sampler"):
            strategy.sampler(given[0], seed=given[1])
    with pytest.raises(ValueError, match="unused='zeros'"):
        strategy.distribute(model, [], unused="zeros" if last else "error")
    odd = torch.nn.Linear(2, 2)
    odd.register_buffer("state", torch.zeros(2).to_sparse() if last else torch.zeros(2))
    with pytest.raises((TypeError, collectives.MismatchError), match="sparse_coo"):
        strategy.distribute(odd, [])
    more = torch.nn.Sequential(model)
    if last:
        more.append(torch.nn.BatchNorm1d(3, affine=False))
    with pytest.raises(collectives.MismatchError, match="6 parameters and 6 buffers"):
        strategy.distribute(more, [])
    kinds = {True: torch.optim.Adam, False: torch.optim.SGD}
    for wrong in (
        torch.optim.SGD(model.parameters(), 0.2 if last else 0.1),
        torch.optim.SGD(model.parameters(), torch.tensor(0.2 if last else 0.1)),
        torch.optim.SGD(model.parameters(), 0.1, nesterov=last, momentum=0.9),
        kinds[last](model.parameters(), 0.1),
    ):
        with pytest.raises(ValueError, match="distribute: the ranks' optimizers differ"):
            strategy.distribute(model, wrong)
    groups = [{"params": [each]} for each in model.parameters()]
    for group in groups[1:]:
        group["lr"] = 0.2 if last else 0.3
    with pytest.raises(ValueError, match=f"{len(groups)} groups"):
        strategy.distribute(model, torch.optim.SGD(groups, 0.1))
    two = [[*model[0].parameters()], [*model[2:].parameters()]]
    members = [{"params": each} for each in (two[::-1] if last else two)]
    for order in (members, [*model.parameters()][:: -1 if last else 1]):
        with pytest.raises(ValueError, match=r"of parameters \[\[0, 1"):
            strategy.distribute(model, torch.optim.SGD(order, 0.1))
    unreadable = torch.optim.SGD(model.parameters(), 0.1)
    if last:
        unreadable.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        strategy.distribute(model, unreadable)
    # What is equal may be kept in other types, and groups may have more than settings.
    equal = torch.optim.SGD(model.parameters(), np.float64(1.0) if last else torch.tensor(1))
    equal.param_groups[0]["name"] = f"of rank {comm.rank}"
    strategy.distribute(model, equal)
    # Replicas that train apart may do so at rates of their own.
    apart = strategies.LocalSGDStrategy(2, communicator=comm)
    other = network(torch)
    apart.distribute(other, torch.optim.SGD(other.parameters(), 0.1 + comm.rank))
    if last:
        other[0].weight = torch.nn.Parameter(other[0].weight.detach() + 1)
    with pytest.raises(collectives.MismatchError, match=r"0\.weight was replaced since distribute"):
        apart.synchronize()
    strategy.distribute(model, [])
    assert len(strategy.sampler(range(10), remainder="drop")) == 10 // comm.size


def test_samplers(torch, comm):
    """Equal lengths, all samples, an order of its own in each epoch, and resumption."""
    strategy = strategy_of("worker", comm)
    data = range(10)
    for remainder, length in (("repeat", -(-10 // comm.size)), ("drop", 10 // comm.size)):
        sampler = strategy.sampler(data, remainder=remainder, seed=3)
        assert len(sampler) == length
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
        rows = comm.all_gather(np.array(epochs), axis=1)
        assert rows.shape == (2, length * comm.size)
        assert not np.array_equal(*rows)
        for row in rows:
            assert set(row.tolist()) == set(data) or remainder == "drop"
            assert len(set(row.tolist())) == min(10, length * comm.size)
        sampler.set_epoch(1)
        begun = iter(sampler)
        first = [next(begun), next(begun)]
        resumed = strategy.sampler(data, remainder=remainder, seed=3)
        resumed.restore_tensors(sampler.saved_tensors())
        assert first + list(resumed) == epochs[1]
    assert list(strategy.sampler(data, shuffle=False))[:2] == [comm.rank, comm.rank + comm.size]
    sampler = strategy.sampler(data, seed=3)
    whole = list(sampler)
    # Iterations count for themselves, as those of torch's own samplers.
    for index in sampler:
        assert index == whole[0]
        assert list(sampler) == whole
        break
    assert list(zip(sampler, sampler, strict=True)) == list(zip(whole, whole, strict=True))
    resumed, begun = strategy.sampler(data, seed=3), iter(sampler)
    assert next(begun) == whole[0]
    resumed.restore_tensors(sampler.saved_tensors())
    for _ in range(2):  # the documented loop, after a look at the first sample
        assert next(iter(resumed)) == whole[1]
        resumed.set_epoch(0)
    assert list(resumed) == whole[1:]
    running = iter(sampler)
    next(running)
    with pytest.raises(ValueError, match="position=-1"):
        sampler.set_epoch(0, -1)
    sampler.set_epoch(0, 1)
    assert len(list(running)) == len(whole) - 1
    assert list(sampler) == whole[1:]
    # The next epoch follows one that has ended, where the program counts them.
    for counted, samplers in ((1, resumed), (0, strategy.sampler(data, seed=3))):
        assert len(list(samplers)) == len(whole)
        assert samplers.saved_tensors()["epoch"] == counted
        assert samplers.saved_tensors()["position"] == 0
    with pytest.raises(ValueError, match="remainder='pad'"):
        strategy.sampler(data, remainder="pad")


@pytest.mark.ranks(2, 3)
def test_memory_goes_with_the_model(torch, comm):
    """Parameters' hooks hold their reducer, a cycle that garbage collection doesn't see."""
    strategy, alive = strategies.MultiWorkerMirroredStrategy(communicator=comm), []
    for number in range(3):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(number):
            strategy.distribute(model, optimizer)
        strategy.distribute(model, optimizer)
        alive += [weakref.ref(model.weight), weakref.ref(strategy.gradients_of(model))]
        # The program drops the list of modules that it gave, and makes another optimizer.
        strategy.distribute(torch.nn.ModuleList([model]), optimizer)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        gc.collect()
        model(torch.ones(1, 3) * comm.rank).sum().backward()
        optimizer.step()
        assert (
            len({each.tobytes() for each in comm.all_gather_object(model.weight.detach().numpy())})
            == 1
        )
        del model, optimizer
    # An optimizer alone, of parameters that are in no module any more.
    bare = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([bare], 1.0)
    strategy.distribute(torch.nn.ParameterList([bare]), optimizer)
    gc.collect()
    (bare * comm.rank).sum().backward()
    optimizer.step()
    assert bare.tolist() == [1 - (comm.size - 1) / 2] * 2
    alive.append(weakref.ref(bare))
    del bare, optimizer
    gc.collect()
    assert [each() for each in alive] == [None] * 7


@pytest.mark.ranks(2, 3)
def test_optimizers_states_keep_their_kind(torch, comm):
    """Their dtypes, of which torch's own loading keeps few, and objects of a rank's own."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = object()
    kinds = "bfloat16", "float8_e4m3fn", "complex64", "uint16", "bool"
    optimizer.state[model.weight] = {
        kind: torch.full((2, comm.rank + 1), comm.rank).to(getattr(torch, kind)) for kind in kinds
    } | {"own": own, "nothing": torch.ones(comm.rank), "pair": (comm.rank, [1.5])}
    strategies.MultiWorkerMirroredStrategy(communicator=comm).distribute(model, optimizer)
    state = optimizer.state[model.weight]
    assert state.pop("own") is own
    assert state.pop("pair") == (0, [1.5])
    assert state.pop("nothing").shape == (0,)
    assert [(str(each.dtype), each.tolist()) for each in state.values()] == [
        (f"torch.{kind}", [[0], [0]]) for kind in kinds
    ]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["Adam", "fused Adam", "SGD", "LBFGS"])
def test_optimizers_become_the_chiefs(torch, comm, kind):
    """Whether the chief alone has read a checkpoint, or all ranks have stepped apart.

    A fused optimizer takes states by their order in memory: here that of the weight isn't C order.
    """
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    for all_step in (False, True):
        model = torch.nn.Linear(3, 2)
        settings = {"momentum": 0.9} if kind == "SGD" else {}
        if kind == "fused Adam":
            model.weight.data = model.weight.data.t().contiguous().t()
            settings = {"fused": True}
        optimizer = getattr(torch.optim, kind.split()[-1])(model.parameters(), lr=0.1, **settings)

        def loss(rows=None, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            squares = model(torch.ones(1, 3) if rows is None else rows).square().sum()
            squares.backward()
            return squares

        if all_step or comm.rank == 0:
            optimizer.step(partial(loss, torch.full((1, 3), comm.rank + 1.0)))
        states = [str(each["state"]) for each in comm.all_gather_object(optimizer.state_dict())]
        strategy.distribute(model, optimizer)
        assert str(optimizer.state_dict()["state"]) == states[0] != states[-1]
        optimizer.step(loss)
        weights = model.weight.detach().numpy().tobytes()
        assert all(each.isfinite().all() for each in model.parameters())
        assert comm.all_gather_object(weights) == [weights] * comm.size


@pytest.mark.ranks(2, 3)
def test_a_later_distribute_replaces_those_that_share_parameters(torch, comm):
    strategy = strategy_of("worker", comm)
    encoder = torch.nn.Linear(5, 3)
    model = torch.nn.Sequential(encoder, torch.nn.Linear(3, 1))
    for each in (encoder, model):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        strategy.distribute(each, optimizer)
    with pytest.raises(ValueError, match="must be a model that was given to distribute"):
        strategy.gradients_of(encoder)
    x = batches(torch, comm.size)[0]
    part = x.chunk(comm.size)[comm.rank]
    own = torch.autograd.grad(loss_of(model, part), list(model.parameters()))
    wanted = [comm.all_reduce(each, "mean") for each in own]
    loss_of(model, part).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    # This step takes the gradients of the backward before it.
    optimizer.step(lambda: None)
    with pytest.raises(RuntimeError, match="no backward has brought gradients"):
        optimizer.step()


@pytest.mark.ranks(2, 3)
def test_an_earlier_distribute_stays_where_a_later_one_fails(torch, comm):
    strategy, last = strategy_of("worker", comm), comm.rank == comm.size - 1
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer)
    scaled = torch.optim.SGD(model.parameters(), 0.1)
    scaled.param_groups[0]["scale"] = 1.0 + last
    for wrong in (
        {"wire_dtype": torch.float16 if last else None},
        {"wire_dtype": torch.int8},
        {"optimizer": scaled},
        {"wire_dtype": "float16"},
        {"optimizer": torch.optim.SGD(model.parameters(), 0.2 if last else 0.1)},
    ):
        with pytest.raises((ValueError, TypeError)):
            strategy.distribute(model, wrong.pop("optimizer", optimizer), **wrong)
    expected = network(torch)
    parts = batches(torch, comm.size)
    train(torch, model, optimizer, [each.chunk(comm.size)[comm.rank] for each in parts])
    train(torch, expected, torch.optim.SGD(expected.parameters(), 0.1), parts)
    check(torch, model, expected)


@pytest.mark.ranks(2)
def test_optimizers_that_step_in_turn(torch, comm):
    """The gradients of the last step, which was another optimizer's, are no reason for a step."""
    for unused in ("error", "zeros"):
        model, strategy = network(torch), strategy_of("worker", comm)
        both = [torch.optim.SGD(each.parameters(), 0.1) for each in (model[0], model[2:])]
        strategy.distribute(model, both, unused=unused)

        def expected(step, fails=unused == "error"):
            error = collectives.torch.GradientError
            return pytest.raises(error) if fails and step == 1 else nullcontext()

        for step in range(4):
            model.zero_grad()
            if step != 1 or comm.rank == 0:
                with expected(step):
                    loss_of(model, torch.ones(ROWS, 5) * (comm.rank + step)).backward()
            with expected(step):
                both[step % 2].step()
        weights = [each.detach().numpy().tobytes() for each in model.parameters()]
        assert comm.all_gather_object(weights) == [weights] * comm.size


@pytest.mark.ranks(2)
def test_a_step_after_a_synchronization_that_has_failed(torch, comm):
    """It raises the same error, without communication."""
    model, strategy = network(torch), strategy_of("worker", comm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer, unused="zeros")
    reducer = strategy.gradients_of(model)

    def interrupt(gradient):
        raise ArithmeticError("in the middle")

    for step in range(3):
        optimizer.zero_grad()
        if step == 1 and comm.rank == 0:
            hook = model[0].weight.register_hook(interrupt)
            with pytest.raises(ArithmeticError):
                loss_of(model, torch.ones(ROWS, 5)).backward()
            hook.remove()
        elif comm.rank == 0:
            loss_of(model, torch.ones(ROWS, 5)).backward()
        failing = pytest.raises(collectives.torch.GradientError) if step == 1 else nullcontext()
        with failing:
            reducer.synchronize(optimizer)
        failing = pytest.raises(collectives.torch.GradientError) if step == 1 else nullcontext()
        with failing:
            optimizer.step()
    weights = [each.detach().numpy().tobytes() for each in model.parameters()]
    assert comm.all_gather_object(weights) == [weights] * comm.size


def refused():
    return pytest.raises(collectives.torch.GradientError, match="was changed between backward")


@pytest.mark.ranks(2)
def test_gradients_of_one_optimizer_that_are_changed(torch, comm):
    strategy, model = strategy_of("worker", comm), network(torch)
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (model[0], model[2:])]
    strategy.distribute(model, both, unused="zeros")
    for changes, raises in ((model[0], nullcontext), (model[2:], refused)):
        if comm.rank == 0:
            loss_of(model, torch.ones(ROWS, 5)).backward()
        both[0].step()
        both[0].zero_grad()
        torch.nn.utils.clip_grad_norm_(changes.parameters(), 0.01)
        with raises() if comm.rank == 0 else nullcontext():
            both[1].step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "how", [{"unused": "zeros"}, {"weighted": True}], ids=["zeros", "weighted"]
)
def test_gradients_that_are_changed_before_all_ranks_have_them(torch, comm, how):
    """A rank without samples gets them in the step, where the others have clipped theirs."""
    strategy, absent = strategy_of("worker", comm), comm.rank == comm.size - 1
    model, expected = network(torch), network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer, **how)
    reducer = strategy.gradients_of(model)

    def backward():
        optimizer.zero_grad()
        reducer.weight = 0 if absent else ROWS
        if not absent:
            loss_of(model, torch.ones(ROWS, 5) * (comm.rank + 1)).backward()

    def clip():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    backward()
    optimizer.step()  # Nothing was changed.
    backward()
    reducer.synchronize(optimizer)
    clip()
    optimizer.step()
    alone = torch.optim.SGD(expected.parameters(), 0.1)
    present = [torch.ones(ROWS, 5) * (rank + 1) for rank in range(comm.size - 1)]
    for clips in (False, True):
        alone.zero_grad()
        loss = sum(loss_of(expected, each) for each in present)
        (loss / (len(present) if how.get("weighted") else comm.size)).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        alone.step()
    check(torch, model, expected)
    backward()
    clip()
    if absent:
        optimizer.step()
    else:
        with refused():
            optimizer.step()
    # In the place of a step, which is missing then.
    backward()
    reducer.wait(optimizer)
    backward()
    optimizer.step()
    # A step that is left out leaves no trace.
    backward()
    clip()
    if absent:
        optimizer.step()
    optimizer.zero_grad()
    reducer.weight = ROWS
    loss_of(model, torch.ones(ROWS, 5)).backward()
    optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("steps", ["of all", "of those that lack a gradient"])
def test_batches_that_one_rank_can_not_read(torch, comm, steps):
    """Steps after a refused backward raise its error alone, and the next batch trains as usual."""
    from collectives.torch.gradients import GradientError

    model = network(torch)
    parts = model[:2], model[2:]
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in parts]
    strategy_of("worker", comm).distribute(model, optimizers)
    for step, part in enumerate(batches(torch, comm.size)):
        unread = step in (1, 2)
        absent = unread and comm.rank == 1
        model.zero_grad()
        if not absent:
            loss = loss_of(model, part.chunk(comm.size)[comm.rank])
            if unread:
                with pytest.raises(GradientError, match="rank 1: no backward has brought"):
                    loss.backward()
            else:
                loss.backward()
        before = [each.detach().clone() for each in model.parameters()]
        for number, optimizer in enumerate(optimizers):
            if unread and (absent or steps == "of all"):
                own = absent and number == 0
                match = "no backward has brought" if own else "last backward raised the error"
                with pytest.raises(GradientError, match=match):
                    optimizer.step()
            elif not unread:
                optimizer.step()
        changed = any(
            not torch.equal(*each) for each in zip(before, model.parameters(), strict=True)
        )
        assert changed == (not unread)
    weights = [each.detach().numpy().tobytes() for each in model.parameters()]
    assert comm.all_gather_object(weights) == [weights] * comm.size


# LBFGS itself converts the loss.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_line_search_decides_by_the_loss_of_all_ranks(torch, comm, weighted):
    """Ranks that searched by losses of their own would end at other weights, without an error."""
    strategy, alone = strategy_of("worker", comm), network(torch)
    model = copy.deepcopy(alone)
    rows = [3 * (rank + 1 if weighted else 1) for rank in range(comm.size)]
    whole = torch.randn(sum(rows), 5, generator=torch.Generator().manual_seed(5))
    part = whole.split(rows)[comm.rank]

    def searched(model):
        return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    optimizer, other = searched(model), searched(alone)
    strategy.distribute(model, optimizer, weighted=weighted)
    losses, calls = [], 0
    for each, stepped, given in ((model, optimizer, part), (alone, other, whole)):

        def closure(each=each, stepped=stepped, given=given):
            nonlocal calls
            calls += each is model
            stepped.zero_grad()
            if weighted and each is model:
                strategy.gradients_of(model).weight = len(given)
            loss = (each.eval()(given) - given.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss

        losses.append([float(stepped.step(closure=closure)) for _ in range(3)])
    assert len(set(comm.all_gather_object(calls))) == 1
    every = comm.all_gather_object([each.tolist() for each in model.parameters()])
    assert every == [every[0]] * comm.size
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
    check_closely(torch, model, alone)


def check_closely(torch, model, expected):
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-2, atol=1e-3)


def test_what_a_closure_returns_beside_tensors(torch, comm):
    strategy = strategy_of("worker", comm)
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer)
    x = batches(torch, comm.size)[0].chunk(comm.size)[comm.rank]

    def closure(result):
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss if result == "the loss" else result

    assert optimizer.step(lambda: closure(comm.rank + 1.0)) == (comm.size + 1) / 2
    for kind in (np.float32, np.array):
        assert (
            optimizer.step(lambda kind=kind: closure(kind(comm.rank + 1.0))) == (comm.size + 1) / 2
        )
    assert optimizer.step(lambda: closure(None)) is None
    assert optimizer.step(lambda: closure("the loss")).requires_grad


@pytest.mark.ranks(2, 3)
def test_closures_reduce_what_no_backward_has_reduced(torch, comm):
    """As a step without a closure does."""
    strategy, last = strategy_of("worker", comm), comm.rank == comm.size - 1
    whole = batches(torch, comm.size)[0]
    part = whole.chunk(comm.size)[comm.rank]

    def accumulated(model):
        with strategy.gradients_of(model).no_sync():
            loss_of(model, part).backward()

    def without_rows(model):
        strategy.gradients_of(model).weight = 0.0 if last else 1.0
        if not last:
            loss_of(model, part).backward()

    def without_backward(model):
        if not last:
            loss_of(model, part).backward()

    for work, options in (
        (accumulated, {}),
        (without_rows, {"weighted": True}),
        (without_backward, {"unused": "zeros"}),
    ):
        found = []
        for in_closure in (False, True):
            model = network(torch)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            strategy.distribute(model, optimizer, **options)

            def closure(model=model, optimizer=optimizer, work=work):
                optimizer.zero_grad()
                work(model)
                return torch.ones(())

            if in_closure:
                assert float(optimizer.step(closure)) == 1
            else:
                closure()
                optimizer.step()
            found.append([each.tolist() for each in model.parameters()])
        assert found[0] == found[1] != [each.tolist() for each in network(torch).parameters()]
        assert comm.all_gather_object(found[1]) == [found[1]] * comm.size


@pytest.mark.ranks(2, 3)
def test_a_step_without_a_backward_is_noticed_after_closures(torch, comm):
    """And a closure that has raised before its backward, once `wait` is called."""
    from collectives.torch import GradientError

    strategy = strategy_of("worker", comm)
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    strategy.distribute(model, optimizer)
    part = batches(torch, comm.size)[0].chunk(comm.size)[comm.rank]

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, part)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        # Refused in the backward of rank 0, and in the step of the others.
        with pytest.raises(GradientError):
            (optimizer.step if comm.rank else closure)()
        reducer = strategy.gradients_of(model)
        with pytest.raises(GradientError):
            (partial(reducer.wait, optimizer) if comm.rank else partial(optimizer.step, closure))()
    optimizer.step(closure)
    found = [each.tolist() for each in model.parameters()]
    assert comm.all_gather_object(found) == [found] * comm.size


@pytest.mark.ranks(2)
def test_closures_without_a_backward(torch, comm):
    """Of optimizers that search by losses alone, or make the backward themselves."""

    class Searching(torch.optim.SGD):
        def step(self, closure):
            with torch.no_grad():
                before = closure()
            self.zero_grad()
            with torch.enable_grad():
                loss = closure()
            loss.backward()
            super().step()
            return float(before)

    strategy = strategy_of("worker", comm)
    model = network(torch)
    optimizer = Searching(model.parameters(), 0.1)
    strategy.distribute(model, optimizer)
    part = batches(torch, comm.size)[0].chunk(comm.size)[comm.rank]
    found = [optimizer.step(lambda: loss_of(model, part)) for _ in range(3)]
    assert found[0] > found[2]
    every = comm.all_gather_object((found, [each.tolist() for each in model.parameters()]))
    assert every[0] == every[1]


@pytest.mark.ranks(2)
def test_a_step_within_a_backward_is_named(torch, comm):
    strategy = strategy_of("worker", comm)
    model = torch.nn.Linear(5, 1)
    optimizers = {each: torch.optim.SGD([each], 0.1) for each in model.parameters()}
    strategy.distribute(model, list(optimizers.values()))
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda given: optimizers[given].step())
    with pytest.raises(RuntimeError, match="a step within a backward"):
        loss_of(model, torch.ones(2, 5)).backward()
