"""Checkpoints of torch modules, optimizers and schedulers."""

import importlib
from pathlib import Path

import pytest

import strategies
from tests.strategies.support import same_refusal

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.timeout_seconds(60)]

SCHEDULERS = ("StepLR", "MultiStepLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR")


@pytest.fixture
def folder(comm, tmp_path):
    return Path(comm.broadcast_object(str(tmp_path)))


def made(torch, seed, scheduler="StepLR"):
    torch.manual_seed(seed)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    )
    schedulers = torch.optim.lr_scheduler
    arguments = {
        "StepLR": (2, 0.5),
        "MultiStepLR": ([1, 3], 0.5),
        "OneCycleLR": ([0.2, 0.1], 10),
        "ReduceLROnPlateau": (),
    }
    if scheduler == "SequentialLR":
        parts = [schedulers.StepLR(optimizer, 1), schedulers.ExponentialLR(optimizer, 0.5)]
        return model, optimizer, schedulers.SequentialLR(optimizer, parts, [2])
    return model, optimizer, getattr(schedulers, scheduler)(optimizer, *arguments[scheduler])


def step(torch, model, optimizer, scheduler):
    optimizer.zero_grad()
    hidden = model[1](model[0](torch.ones(4, 3) + torch.arange(4.0)[:, None]))
    loss = model[2](hidden.bfloat16()).float().square().sum()
    loss.backward()
    optimizer.step()
    scheduler.step(*([1.0] if type(scheduler).__name__ == "ReduceLROnPlateau" else []))


def same(torch, one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(torch, one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same(torch, *pair)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    else:
        assert one == other


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_restored_program_goes_on(torch, comm, folder, kind):
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    model, optimizer, scheduler = made(torch, 1, kind)
    strategy.distribute(model, optimizer)
    count = strategies.Variable(0)
    for _ in range(3):
        step(torch, model, optimizer, scheduler)
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": count}
    path = strategies.Checkpoint(**named).save(folder / "state")

    import safetensors.torch

    with open(path, "rb") as file:
        content = file.read()
    assert b"pickle" not in content
    stored = safetensors.torch.load(content)
    torch.testing.assert_close(stored["model/2.weight"], model[2].weight.detach())
    torch.testing.assert_close(stored["optimizer/state/0/step"], torch.tensor(3.0))

    other = made(torch, 2, kind)
    strategy.distribute(*other[:2])
    named |= dict(zip(("model", "optimizer", "scheduler"), other, strict=True))
    strategies.Checkpoint(**named).restore(path)
    step(torch, model, optimizer, scheduler)
    step(torch, *other)
    for one, two in zip((model, optimizer, scheduler), other, strict=True):
        same(torch, one.state_dict(), two.state_dict())
    # A script of one process, without a strategy.
    third = made(torch, 3, kind)
    strategies.Checkpoint(model=third[0]).restore(path, expect_partial=True)
    torch.testing.assert_close(third[0][2].weight, stored["model/2.weight"])


def test_what_does_not_fit_changes_nothing(torch, comm, folder):
    model, optimizer, scheduler = made(torch, 1)
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    strategy.distribute(model, optimizer)
    step(torch, model, optimizer, scheduler)
    path = strategies.Checkpoint(model=model, optimizer=optimizer).save(folder / "state")
    before = model[0].weight.detach().clone()
    model[0].weight.data += 1
    wider = torch.nn.Sequential(model[0], torch.nn.BatchNorm1d(5), model[2])
    groups = torch.optim.Adam(wider.parameters())
    strategy.distribute(wider, groups)
    with pytest.raises(strategies.CheckpointError) as caught:
        strategies.Checkpoint(model=wider, optimizer=groups).restore(path)
    text = str(caught.value)
    assert "1.weight: float32 of shape (4,), wanted float32 of shape (5,)" in text
    assert "optimizer: groups of [2, 2] parameters, wanted [6]" in text
    torch.testing.assert_close(model[0].weight.detach(), before + 1)

    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"key": 1}

        def set_extra_state(self, state):
            self.key = state["key"]

    schedulers = torch.optim.lr_scheduler
    plain = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
    for saved, wanted, text in [
        (torch.nn.Linear(1, 1), Extra(1, 1), "no state that isn't a tensor, wanted _extra_state"),
        (Extra(1, 1), torch.nn.Linear(1, 1), "_extra_state, wanted no state that isn't a tensor"),
        (
            schedulers.StepLR(plain, 1),
            schedulers.LambdaLR(plain, lambda _: 1.0),
            "is the state of a StepLR, wanted that of a LambdaLR",
        ),
    ]:
        number = strategies.Variable(1.0)
        path = strategies.Checkpoint(a=number, odd=saved).save(folder / f"other-{comm.rank}")
        number.assign(2.0)
        with pytest.raises(strategies.CheckpointError, match=text):
            strategies.Checkpoint(a=number, odd=wanted).restore(path)
        assert number.numpy() == 2.0
        strategies.Checkpoint(a=number, odd=saved).restore(path)

    class Odd(torch.nn.Linear):
        def get_extra_state(self):
            return object()

        def set_extra_state(self, state):
            pass

    with pytest.raises(TypeError, match="_extra_state is a object: a checkpoint holds tensors"):
        strategies.Checkpoint(model=Odd(1, 1)).save(folder / "odd")


@pytest.mark.ranks(2)
def test_the_state_of_a_disabled_scaler_is_empty(torch, comm, folder):
    made = {enabled: torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True)}
    with strategies.MultiWorkerMirroredStrategy(communicator=comm).scope():
        saved = {
            enabled: strategies.Checkpoint(scaler=each).save(folder / str(enabled))
            for enabled, each in made.items()
        }
        for own, of in ((False, False), (False, True), (True, True)):
            strategies.Checkpoint(scaler=made[own]).restore(saved[of])
        with pytest.raises(strategies.CheckpointError, match="has no state, wanted that of a Grad"):
            strategies.Checkpoint(scaler=made[True]).restore(saved[False])


@pytest.mark.ranks(2)
def test_a_restored_fused_optimizer_steps_as_before(torch, comm, folder):
    """It takes states by their order in memory, here that of channels_last parameters."""
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)

    def made():
        model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=True)
        strategy.distribute(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    def step(named):
        torch.manual_seed(comm.rank)
        named["optimizer"].zero_grad()
        named["model"](torch.rand(2, 2, 4, 4)).square().sum().backward()
        named["optimizer"].step()

    first, second = made(), made()
    step(first)
    first["optimizer"].state["of no parameter"] = 3
    path = strategies.Checkpoint(**first).save(folder / "state")
    strategies.Checkpoint(**second).restore(path)
    assert second["optimizer"].state["of no parameter"] == 3
    for named in (first, second):
        step(named)
    same(torch, first["model"].state_dict(), second["model"].state_dict())


def test_a_modules_versions_are_restored(torch, comm, folder):
    """Its class converts what an earlier version of it has written, and that alone."""

    class Versioned(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            if metadata["version"] < 2:
                state[f"{prefix}weight"] = state[f"{prefix}weight"] * 10
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    model = torch.nn.Sequential(Versioned(1, 1), torch.nn.BatchNorm1d(1))
    strategy.distribute(model, [])
    weight = model[0].weight.item()
    for written, factor in ((2, 1), (1, 10)):
        Versioned._version = written
        path = strategies.Checkpoint(model=model).save(folder / f"of-{written}")
        Versioned._version = 2
        with torch.no_grad():
            model[0].weight.fill_(7)
        strategies.Checkpoint(model=model).restore(path)
        assert model[0].weight.item() == pytest.approx(weight * factor)
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match="weight: is lazy: run the model once"):
        strategies.Checkpoint(model=lazy).save(folder / "lazy")


@pytest.mark.ranks(2)
def test_an_optimizer_restores_only_state_that_its_steps_can_use(torch, comm, folder):
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    optimizers = torch.optim

    def stepped(kind, *shapes, **options):
        model = torch.nn.ParameterList([torch.ones(shape) for shape in shapes])
        optimizer = kind(model.parameters(), 0.1, **options)
        strategy.distribute(model, optimizer)
        sum(each.square().sum() for each in model).backward()
        return model, optimizer

    def step(optimizer):
        optimizer.step(*([lambda: torch.zeros(())] if "LBFGS" in repr(optimizer) else []))

    def checkpoint(optimizer):
        return strategies.Checkpoint(optimizer=optimizer)

    paths = {}
    for kind, options in (
        (optimizers.SGD, {"momentum": 0.9}),
        (optimizers.Adam, {}),
        (optimizers.Adafactor, {}),
        (optimizers.LBFGS, {}),
    ):
        _model, optimizer = stepped(kind, (3, 3), (3,), **options)
        step(optimizer)
        paths[kind] = checkpoint(optimizer).save(folder / kind.__name__)
        _model, fresh = stepped(kind, (3, 3), (3,), **options)
        checkpoint(fresh).restore(paths[kind])
        same(torch, fresh.state_dict(), optimizer.state_dict())
        step(fresh)
    _model, swapped = stepped(optimizers.SGD, (3,), (3, 3), momentum=0.9)
    wanted = r"optimizer: state of parameter 0 of shape \(3, 3\), wanted \(3,\); state of par"
    with pytest.raises(strategies.CheckpointError, match=wanted):
        checkpoint(swapped).restore(paths[optimizers.SGD])
    for kind, of in (("Adam", "SGD"), ("Adamax", "Adam"), ("SGD", "Adam")):
        _model, other = stepped(getattr(optimizers, kind), (3, 3), (3,))
        wanted = rf"optimizer: is the state of {of} \(.*, wanted {kind} \("
        with pytest.raises(strategies.CheckpointError, match=wanted):
            checkpoint(other).restore(paths[getattr(optimizers, of)])
        step(other)
    _model, decoupled = stepped(optimizers.AdamW, (3, 3), (3,))
    checkpoint(decoupled).restore(paths[optimizers.Adam])


@pytest.mark.ranks(2)
def test_two_tensors_of_one_name_are_refused(torch, comm, folder):
    one, two = torch.zeros(1), torch.ones(1)

    class Odd(torch.nn.Linear):
        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            pass

    model = Odd(1, 1)
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)
    strategy.distribute(model, [])
    for extra, name in (
        ({1: one, "1": two}, "_extra_state/1"),
        ({"a/b": one, "a": {"b": two}}, "_extra_state/a/b"),
    ):
        model.extra = extra
        with pytest.raises(ValueError, match=f"{name}: is the name of two entries"):
            strategies.Checkpoint(model=model).save(folder / "odd")
    model = torch.nn.Module()
    model.json = torch.nn.Parameter(one)
    strategy.distribute(model, [])
    with pytest.raises(ValueError, match="json: is the name of two entries"):
        strategies.Checkpoint(model=model).save(folder / "odd")


@pytest.mark.ranks(2)
def test_local_sgd_saves_an_average_and_goes_on_from_a_restored_one(torch, comm, folder):
    outer = strategies.optimizers.SGD(0.5)
    strategy = strategies.LocalSGDStrategy(100, outer_optimizer=outer, communicator=comm)
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    strategy.distribute(model, optimizer)
    start = model.weight.detach().clone()
    first = strategies.Checkpoint(model=model).save(folder / "first")
    model(torch.full((1, 2), float(comm.rank))).sum().backward()
    optimizer.step()
    path = strategies.Checkpoint(model=model).save(folder / "second")
    # Half of the way from the start to the mean of two ranks, of which one moved by 1.
    torch.testing.assert_close(model.weight.detach(), start - 0.25)
    optimizer.step()
    strategies.Checkpoint(model=model).restore(first)
    strategy.synchronize()
    torch.testing.assert_close(model.weight.detach(), start)
    strategies.Checkpoint(model=model).restore(path)
    torch.testing.assert_close(model.weight.detach(), start - 0.25)


@pytest.mark.ranks(2)
def test_local_sgd_goes_on_from_a_restored_part_or_whole(torch, comm, folder):
    """In the middle of a round, of a module in the distributed one, and of one around it."""
    outer = strategies.optimizers.SGD(0.5)
    strategy = strategies.LocalSGDStrategy(100, outer_optimizer=outer, communicator=comm)
    encoder, decoder = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    model = torch.nn.Sequential(encoder, decoder)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    strategy.distribute(model, optimizer)

    def step():
        for each in model.parameters():
            each.grad = torch.full((1, 1), -1.0 - comm.rank)
        optimizer.step()

    for restored, expected in ((encoder, [0.75, 1.5]), (torch.nn.ModuleList([model]), [0.75] * 2)):
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        path = strategies.Checkpoint(m=restored).save(folder / "state")
        with torch.no_grad():
            encoder.weight.fill_(4.0)
        step()
        strategies.Checkpoint(m=restored).restore(path)
        step()
        strategy.synchronize()
        # Half of the way from the agreed value to the mean of both ranks' steps.
        assert [each.item() for each in model.parameters()] == expected


@pytest.mark.ranks(2)
def test_outer_momentum_of_a_model_with_a_frozen_layer(torch, comm, folder):
    def begun():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
        model[0].requires_grad_(False)
        outer = strategies.optimizers.SGD(0.5, momentum=0.9)
        strategy = strategies.LocalSGDStrategy(1, outer_optimizer=outer, communicator=comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.distribute(model, optimizer)
        return model, optimizer, strategies.Checkpoint(model=model, outer=outer)

    def step(model, optimizer, _):
        optimizer.zero_grad()
        model(torch.full((1, 1), comm.rank + 1.0)).sum().backward()
        optimizer.step()
        return [each.item() for each in model.parameters()]

    program = begun()
    step(*program)
    path = program[2].save(folder / "frozen")
    going_on = [step(*program) for _ in range(2)]
    again = begun()
    again[2].restore(path)
    assert [step(*again) for _ in range(2)] == going_on


@pytest.mark.ranks(2)
def test_outer_momentum_stays_where_distribute_is_called_again(torch, comm, folder, caplog):
    """Also in a file that another program restores, where layers were frozen, or replaced."""

    def begun():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        outer = strategies.optimizers.SGD(0.5, momentum=0.9)
        strategy = strategies.LocalSGDStrategy(1, outer_optimizer=outer, communicator=comm)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        strategy.distribute(model, optimizer)
        checkpoint = strategies.Checkpoint(model=model, outer=outer)
        return model, optimizer, strategy, outer, checkpoint

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.full((1, 1), comm.rank + 1.0)).sum().backward()
        optimizer.step()
        return [each.item() for each in model.parameters()]

    found = []
    for times in (0, 2):
        model, optimizer, strategy, outer, checkpoint = begun()
        model[0].requires_grad_(False)
        strategy.distribute(model, optimizer)
        step(model, optimizer)
        model[0].requires_grad_(True)
        strategy.distribute(model, optimizer)
        for _ in range(times):
            strategy.distribute(model, optimizer)
        step(model, optimizer)
        path = checkpoint.save(folder / f"{times}")
        found.append([step(model, optimizer) for _ in range(2)])
        again, optimizer, strategy, outer, checkpoint = begun()
        checkpoint.restore(path)
        assert [step(again, optimizer) for _ in range(2)] == found[-1]
    assert found[0] == found[1]
    # What was restored is not a change by somebody else.
    checkpoint.restore(path)
    checkpoint.save(folder / f"other-{comm.rank}")
    assert not caplog.records
    # Parameters that have moved, or come in the place of others, begin without momentum, under
    # the same numbers.
    before = outer.values
    again[0].weight.data = again[0].weight.data.clone()
    strategy.distribute(again, optimizer)
    assert outer.values[0] is not before[0]
    assert outer.values[1] is before[1]
    again[0] = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(again.parameters(), 0.1)
    strategy.distribute(again, optimizer)
    step(again, optimizer)
    path = checkpoint.save(folder / "replaced")
    after = step(again, optimizer)
    fresh, optimizer, strategy, outer, checkpoint = begun()
    checkpoint.restore(path)
    assert step(fresh, optimizer) == after


@pytest.mark.ranks(1, 2)
def test_what_every_rank_trains_apart_is_not_saved(torch, comm, folder, monkeypatch):
    # Other tests of this world may have a process group.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    strategy = strategies.MultiWorkerMirroredStrategy(communicator=comm)

    def made():
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.SGD(model.parameters(), 1.0)

    def save(**named):
        with strategy.scope():
            return strategies.Checkpoint(**named).save(folder / "state")

    model, optimizer = made()
    for named, what in (
        ({"model": model}, r"^the torch module Linear \(with the parameter 'weight'\) is 'model'"),
        ({"state": {"best": optimizer}}, "^the torch optimizer SGD is 'state/best'"),
        ({"a": strategies.Variable(1), "model": model}, "^the torch module Linear .* is 'model'"),
    ):
        if comm.size > 1:
            same_refusal(
                comm, TypeError, f"(?s){what} in Checkpoint.save: .*distribute", save, **named
            )
            assert not any(folder.iterdir()), "a file was written"
        else:
            save(**named)
    save(model=model.eval())
    strategies.Checkpoint(model=model.train()).save(folder / f"own {comm.rank}")

    model, optimizer = made()
    reducer = importlib.import_module("collectives.torch.gradients").GradientReducer(
        comm, model.named_parameters()
    )
    save(model=model, optimizer=optimizer)
    reducer.close()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    save(model=model, optimizer=optimizer)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    strategy.distribute(model, [])
    save(model=model, optimizer=optimizer)
