"""Gradients reduced over the ranks during backward equal those of one process on all data."""

import re
from decimal import Decimal

import pytest

from collectives import Communicator, MismatchError

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3), pytest.mark.timeout_seconds(60)]

ROWS, STEPS = 4, 3
SMALL = {"bucket_bytes": 300, "first_bucket_bytes": 40}
"""Several buckets, of one or more parameters each."""


@pytest.fixture(autouse=True)
def _one_thread(torch):
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _large(torch, monkeypatch, request):
    """The weights' gradients are moved when they arrive, the biases' at the end."""
    from collectives.torch import buckets

    given = getattr(request, "param", 33)
    monkeypatch.setattr(buckets, "_LARGE_BYTES", given)
    return given


def network(torch):
    torch.manual_seed(1)
    nn = torch.nn
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(torch, step, rows):
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    return torch.randn(rows, 5, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def own(comm, x):
    return x.chunk(comm.size)[comm.rank]


def reducer_of(comm, model, **options):
    from collectives.torch.gradients import GradientReducer

    return GradientReducer(comm, model.named_parameters(), **SMALL | options)


def expected(torch, comm, steps=1):
    """Gradients of one process, on the batches of all ranks, of equal weight."""
    model = network(torch)
    for step in range(steps):
        loss_of(model, batch(torch, step, ROWS * comm.size)).backward()
    return [each.grad for each in model.parameters()]


def check(torch, model, gradients, **tolerance):
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_backward_gives_the_mean(torch, comm, overlap, to_none):
    model = network(torch)
    reducer = reducer_of(comm, model, overlap=overlap)
    for step in range(STEPS):
        model.zero_grad(set_to_none=to_none)
        loss_of(model, own(comm, batch(torch, step, ROWS * comm.size))).backward()
        reducer.wait()
        alone = network(torch)
        loss_of(alone, batch(torch, step, ROWS * comm.size)).backward()
        check(torch, model, [each.grad for each in alone.parameters()])
    if comm.size > 1:
        first = next(model.parameters())
        kept = first.grad
        model.zero_grad(set_to_none=False)
        loss_of(model, own(comm, batch(torch, 0, ROWS * comm.size))).backward()
        assert first.grad is kept, "the view stays"


@pytest.mark.ranks(2)
def test_a_large_gradient_is_moved_when_it_arrives(torch, comm):
    """Hooks that come later change what is reduced; one that came earlier has dropped it."""
    from collectives.torch.gradients import GradientReducer

    lengths = {"bias": 8, "weight": 9, "second": 10}
    parameters = {name: torch.nn.Parameter(torch.zeros(length)) for name, length in lengths.items()}
    drop = parameters["second"].register_post_accumulate_grad_hook(
        lambda parameter: setattr(parameter, "grad", None)
    )
    reducer, found = GradientReducer(comm, list(parameters.items())), {}

    def hook(parameter):
        bucket = reducer._buckets[0]._flat
        first = bucket.data_ptr()
        if parameter.grad is not None:
            found[len(parameter)] = first <= parameter.grad.data_ptr() < first + bucket.nbytes
            parameter.grad.mul_(10)

    for each in parameters.values():
        each.register_post_accumulate_grad_hook(hook)

    def backward():
        # In this order the gradients of the graph arrive.
        total = sum(each.sum() for each in reversed(parameters.values()))
        ((comm.rank + 1.0) * total).backward()
        return [each.grad[0].item() for each in parameters.values()]

    assert backward() == [15.0, 15.0, 0.0]
    drop.remove()
    for each in parameters.values():
        each.grad = None
    assert backward() == [15.0] * 3
    assert found == {8: False, 9: True, 10: True}
    reducer.close()


@pytest.mark.parametrize("_large", [9], indirect=True)
@pytest.mark.ranks(2)
def test_a_sum_after_an_interrupted_backward(torch, comm):
    """What had arrived is added to, as it was not reduced."""
    from collectives.torch.gradients import GradientReducer

    late, large, first = (torch.nn.Parameter(torch.zeros(length)) for length in (3, 3, 1))
    parameters = [("late", late), ("large", large), ("first", first)]
    reducer = GradientReducer(comm, parameters, op="sum")

    def fail(gradient):
        raise ZeroDivisionError("in a hook")

    def backward(hook=None):
        copied = late * 1
        if hook is not None:
            copied.register_hook(hook)
        ((comm.rank + 1.0) * (copied.sum() + large.sum() + first.sum())).backward()

    backward()
    late.grad = large.grad = first.grad = None
    with pytest.raises(ZeroDivisionError):
        backward(fail)
    assert large.grad.tolist() == [comm.rank + 1.0] * 3
    backward()
    assert [each.grad[0].item() for _, each in parameters] == [3.0, 6.0, 6.0]
    reducer.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [4, 100], ids=["in two buckets", "in one"])
def test_gradients_in_each_others_places(torch, comm, bucket_bytes):
    """The program has exchanged two gradients, or gives one parameter that of another."""
    (_, a), (_, b) = parameters = two(torch)
    limits = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    reducer = reducer_of(comm, torch.nn.ParameterDict(parameters), **limits)

    def backward():
        ((comm.rank + 1.0) * (a.sum() + 10 * b.sum())).backward()
        return [each.grad[0].item() for each in (a, b)]

    assert backward() == [1.5, 15.0]
    a.grad, b.grad = b.grad, a.grad
    assert backward() == [16.5, 16.5]
    a.grad, b.grad = None, a.grad
    assert backward() == [1.5, 31.5]
    a.grad, b.grad = b.grad, None
    assert backward() == [33.0, 15.0]
    reducer.close()


@pytest.mark.ranks(2)
def test_a_hook_exchanges_gradients_of_a_bucket(torch, comm):
    (_, a), (_, b) = parameters = two(torch)
    reducer = reducer_of(comm, torch.nn.ParameterDict(parameters), bucket_bytes=100)
    arrived = []

    def exchange(parameter):
        arrived.append(parameter)
        if len(arrived) == 4:
            a.grad, b.grad = b.grad, a.grad

    for each in (a, b):
        each.register_post_accumulate_grad_hook(exchange)
    for expected in ([1.5, 15.0], [15.0, 1.5]):
        for each in (a, b):
            if each.grad is not None:
                each.grad.zero_()
        ((comm.rank + 1.0) * (a.sum() + 10 * b.sum())).backward()
        assert [each.grad[0].item() for each in (a, b)] == expected
    reducer.close()


@pytest.mark.parametrize("_large", [8], indirect=True)
@pytest.mark.ranks(2)
def test_parameters_that_share_a_gradient(torch, comm):
    """It holds both parameters' gradients, as without a reducer."""
    (_, a), (_, b) = parameters = two(torch)
    reducer = reducer_of(comm, torch.nn.ParameterDict(parameters), bucket_bytes=100)
    a.grad = b.grad = torch.zeros(2)
    ((comm.rank + 1.0) * (a.sum() + 10 * b.sum())).backward()
    assert a.grad.tolist() == b.grad.tolist() == [16.5] * 2
    reducer.close()


def test_accumulation(torch, comm):
    """In no_sync, in several backwards without a step, and by `wait` alone."""
    wanted = expected(torch, comm, STEPS)
    for silent in (STEPS - 1, 0, STEPS):
        model = network(torch)
        reducer = reducer_of(comm, model)
        for step in range(STEPS):
            loss = loss_of(model, own(comm, batch(torch, step, ROWS * comm.size)))
            if step < silent:
                with reducer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        reducer.wait()
        check(torch, model, wanted)
        reducer.close()


def test_sums_and_their_second_backward(torch, comm):
    from collectives.torch.gradients import GradientError

    model = network(torch)
    reducer_of(comm, model, op="sum")
    whole = batch(torch, 0, ROWS * comm.size)
    loss = loss_of(model, own(comm, whole)) / comm.size
    loss.backward(retain_graph=True)
    check(torch, model, expected(torch, comm))
    if comm.size > 1:
        with pytest.raises(GradientError, match="second backward without a step"):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        check(torch, model, expected(torch, comm))


@pytest.mark.parametrize("overlap", [True, False])
def test_weights(torch, comm, overlap, caplog):
    """Ranks with 1, 2, … rows, and one without any, whose loss is NaN or isn't there."""
    model = network(torch)
    reducer = reducer_of(comm, model, weighted=True, overlap=overlap)
    counts = [rank + (comm.size == 1) for rank in range(comm.size)]
    whole = batch(torch, 0, sum(counts))
    alone = network(torch)
    loss_of(alone, whole).backward()
    wanted = [each.grad for each in alone.parameters()]
    part = whole.split(counts)[comm.rank]
    for skips in (False, True):
        model.zero_grad()
        reducer.weight = len(part)
        if len(part) or not skips:
            loss_of(model, part).backward()
        reducer.wait()
        check(torch, model, wanted)
    if comm.size > 1:
        from collectives.torch.gradients import GradientError

        for wrong in (None, "4", 4j, torch.ones(2)):
            model.zero_grad()
            reducer.weight = wrong if comm.rank == 1 else 1
            with pytest.raises(GradientError, match=re.escape(f"rank 1: weight={wrong!r}")):
                loss_of(model, whole).backward()
        for first, second in ((torch.full((1,), 2.0), Decimal(2)), (4.0, 5.0 + comm.rank)):
            model.zero_grad()
            caplog.clear()
            reducer.weight = first
            with reducer.no_sync():
                loss_of(model, whole).backward()
            reducer.weight = second
            loss_of(model, whole).backward()
            assert ("for which weight was 4.0" in caplog.text) == (first == 4.0)
        check(torch, model, [2 * each for each in wanted])


class Branches:
    """A model whose second layer is used by choice."""

    def __init__(self, torch):
        torch.manual_seed(2)
        self.first, self.second = torch.nn.Linear(5, 1), torch.nn.Linear(5, 1)

    def named_parameters(self):
        for name in ("first", "second"):
            yield from ((f"{name}.{n}", p) for n, p in getattr(self, name).named_parameters())

    def loss(self, x, *, both=True):
        return (self.first(x) + (self.second(x) if both else 0)).square().mean()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [True, False])
def test_unused_parameters_are_an_error_on_every_rank(torch, comm, overlap):
    from collectives.torch.gradients import GradientError, GradientReducer

    model = Branches(torch)
    options = SMALL | {"overlap": overlap}
    reducer = GradientReducer(comm, model.named_parameters(), **options)
    x = batch(torch, comm.rank, ROWS)
    for unused_on in ([1], range(comm.size)):
        with pytest.raises(GradientError, match=r"no gradient to second.weight, second.bias"):
            model.loss(x, both=comm.rank not in unused_on).backward()
    for _, parameter in model.named_parameters():
        parameter.grad = None
    model.loss(x).backward()
    mean = comm.all_reduce(torch.autograd.grad(model.loss(x), model.second.weight)[0], "mean")
    torch.testing.assert_close(model.second.weight.grad, mean)
    # Used by an earlier backward of the same step.
    model.second.weight.grad = model.second.bias.grad = None
    with reducer.no_sync():
        model.loss(x).backward()
    model.first.weight.grad = model.first.bias.grad = None
    model.loss(x, both=False).backward()
    torch.testing.assert_close(model.second.weight.grad, mean)
    reducer.close()
    # As zeros by choice.
    GradientReducer(comm, model.named_parameters(), unused="zeros", **options)
    for _, parameter in model.named_parameters():
        parameter.grad = None
    model.loss(x).backward()
    for _, parameter in model.named_parameters():
        parameter.grad = None
    model.loss(x, both=comm.rank == 0).backward()
    mine = torch.autograd.grad(model.loss(x), model.second.weight)[0]
    mean = comm.broadcast(mine) / comm.size
    torch.testing.assert_close(model.second.weight.grad, mean)
    # None where no rank has one, as in one process: an optimizer skips it.
    for _, parameter in model.named_parameters():
        parameter.grad = None
    model.loss(x, both=False).backward()
    assert model.second.weight.grad is model.second.bias.grad is None
    assert model.first.weight.grad is not None


@pytest.mark.ranks(2, 3)
def test_a_refusal_where_asynchronous_calls_are_made_at_once(torch, comm, monkeypatch):
    """As those of arrays on a GPU are, in the order of blocking calls."""
    from concurrent.futures import Future

    from collectives.lifecycle.futures import Handle
    from collectives.torch.gradients import GradientError

    def at_once(self, *arguments, **options):
        future = Future()
        try:
            future.set_result(self.all_reduce(*arguments, **options))
        except MismatchError as error:
            future.set_exception(error)
        return Handle(future)

    monkeypatch.setattr(Communicator, "all_reduce_async", at_once)
    model = network(torch)
    reducer = reducer_of(comm, model)
    assert len(reducer._buckets) > 2
    for bucket in reducer._buckets:
        bucket.on_gpu = True
    x = own(comm, batch(torch, 0, ROWS * comm.size))
    # The buckets of the last layers are reduced first.
    part = model[:2] if comm.rank == 1 else model
    with pytest.raises(GradientError, match=r"no gradient to 2.weight, 2.bias, 4.weight"):
        part(x).square().mean().backward()
    model.zero_grad()
    loss_of(model, x).backward()
    check(torch, model, expected(torch, comm))


class OneOf:
    """A bucket of one parameter that notes when its reduction starts."""

    members, calls = (None,), 1

    def __init__(self, number, started):
        self.number, self.started = number, started

    def begin(self, buckets):
        assert not self.started

    def start(self, op, scale, *, overlap):
        self.started.append((self.number, overlap))
        return lambda: None


@pytest.mark.ranks(1)
def test_buckets_start_when_complete_and_in_their_order(torch, comm):
    from collectives.torch.reduction_round import Round

    started = []
    current = Round(comm, [OneOf(n, started) for n in range(4)], "mean", overlap=True, late=False)
    seen = []
    for number in (2, 3, 0, 1):
        current.arrive(number)
        seen.append([each for each, _ in started])
    assert seen == [[], [], [0], [0, 1, 2]]
    current.complete(())
    assert started == [(0, True), (1, True), (2, True), (3, False)]


@pytest.mark.ranks(2, 3)
def test_gradients_may_arrive_in_another_order_on_each_rank(torch, comm):
    from collectives.torch.gradients import GradientReducer

    model, arrived = Branches(torch), []
    x = batch(torch, 0, ROWS * comm.size)
    model.loss(x).backward()
    wanted = [parameter.grad for _, parameter in model.named_parameters()]
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    GradientReducer(comm, model.named_parameters(), bucket_bytes=1, first_bucket_bytes=1)
    layers = [model.first, model.second]
    # Autograd begins with what was computed last.
    outputs = [layer(own(comm, x)) for layer in layers[:: -1 if comm.rank % 2 else 1]]
    sum(outputs).square().mean().backward()
    assert arrived[0].startswith("first" if comm.rank % 2 else "second")
    for (_, parameter), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_in_backward_is_an_error_on_every_rank(torch, comm, overlap):
    from collectives.torch.gradients import GradientError

    model = network(torch)
    reducer = reducer_of(comm, model, overlap=overlap)

    def fail(gradient):
        raise ZeroDivisionError("in a hook")

    whole = batch(torch, 0, ROWS * comm.size)
    for recovers_by_step in (True, False):
        output = model[1](model[0](own(comm, whole)))
        if comm.rank == 1:
            output.register_hook(fail)
        wrong = ZeroDivisionError if comm.rank == 1 else GradientError
        with pytest.raises(wrong):
            model[2:](output).square().mean().backward()
        if recovers_by_step and comm.rank == 1:
            with pytest.raises(GradientError, match="an exception interrupted a backward"):
                reducer.wait()
        model.zero_grad()
        loss_of(model, own(comm, whole)).backward()
        reducer.wait()
        check(torch, model, expected(torch, comm))


def test_sparse_gradients(torch, comm):
    from collectives.torch.gradients import GradientReducer

    def make():
        torch.manual_seed(3)
        return torch.nn.Embedding(7, 3, sparse=True)

    for dense in (False, True):
        model, alone = make(), make()
        GradientReducer(comm, model.named_parameters(), sparse=() if dense else ["weight"])
        rows = [torch.tensor([rank, 5, 5]) for rank in range(comm.size)]
        alone(torch.cat(rows)).square().mean().backward()
        for _ in range(2):
            model.zero_grad()
            model(rows[comm.rank]).square().mean().backward()
            assert model.weight.grad.is_sparse == (not dense or comm.size == 1)
            torch.testing.assert_close(model.weight.grad.to_dense(), alone.weight.grad.to_dense())


@pytest.mark.ranks(2, 3)
def test_dtypes_and_the_wire(torch, comm):
    """One dtype per bucket, 16-bit messages without overflow, layouts other than C order."""
    from collectives.torch.gradients import GradientReducer

    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.complex64]
    for wire in (None, torch.float16, torch.bfloat16):
        parameters = {
            str(number): torch.nn.Parameter(torch.ones(3, 2, dtype=kind))
            for number, kind in enumerate(kinds)
        }
        parameters["last"] = torch.nn.Parameter(
            torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
        )
        GradientReducer(comm, parameters.items(), wire_dtype=wire)
        factor = 40000.0 + 8000 * comm.rank
        sum((each * factor).sum() for each in parameters.values()).abs().backward()
        mean = 40000 + 8000 * (comm.size - 1) / 2
        for parameter in parameters.values():
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.stride() == parameter.stride()
            wanted = torch.full_like(parameter, mean).detach()
            torch.testing.assert_close(parameter.grad, wanted, rtol=2e-2, atol=0)
            exact = wire is None and parameter.dtype != torch.bfloat16
            assert torch.equal(parameter.grad, wanted) or not exact
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    GradientReducer(comm, [("half", half)])
    (half * factor).sum().backward()
    torch.testing.assert_close(half.grad, torch.full_like(half, mean).detach(), rtol=1e-3, atol=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("sparse", [False, True])
def test_models_of_equal_shapes_are_distinguished(torch, comm, sparse):
    """Ranks that reduce them in another order, in backwards of their own or in one."""
    from collectives.torch.gradients import GradientReducer

    models = [torch.nn.Embedding(3, 2, sparse=sparse) for _ in range(2)]
    for model in models:
        names = ["weight"] if sparse else []
        GradientReducer(comm, model.named_parameters(), sparse=names)
    mine = models if comm.rank else models[::-1]
    rows = torch.tensor([comm.rank % 3])
    with pytest.raises(MismatchError, match="gradients of reducer"):
        mine[0](rows).sum().backward()
    for model in models:
        model.zero_grad()
        model(rows).sum().backward()
        assert model.weight.grad.to_dense().sum() == pytest.approx(2)
    with pytest.raises(MismatchError, match="gradients of reducer"):
        (mine[0](rows).sum() + mine[1](rows).sum()).backward()


@pytest.mark.ranks(2, 3)
def test_parameters_that_change(torch, comm):
    from collectives.torch.gradients import GradientError, GradientReducer

    def parameters():
        rows = 2 + (comm.rank == 1)
        shapes = {"same": 2, "other": rows}
        return [(name, torch.nn.Parameter(torch.ones(n))) for name, n in shapes.items()]

    with pytest.raises(ValueError, match=r"(?s)differ.*rank 0: other.*\(2,\).*rank 1: .*\(3,\)"):
        GradientReducer(comm, parameters())
    lazy = torch.nn.LazyLinear(3)
    with pytest.raises(TypeError, match="weight has no elements yet"):
        GradientReducer(comm, lazy.named_parameters())

    model = network(torch)
    model[0].requires_grad_(False)
    reducer = reducer_of(comm, model)
    x = batch(torch, comm.rank, ROWS)
    loss_of(model, x).backward()
    assert reducer.has_all([model[0].weight])
    assert not reducer.has_all([model[0].weight, torch.ones(1)])
    model[0].weight.requires_grad_(True)
    with pytest.raises(GradientError, match=r"0.weight did not require a gradient at first"):
        loss_of(model, x).backward()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    with pytest.raises(GradientError, match=r"2.weight, 2.bias required a gradient at first"):
        loss_of(model, x).backward()


@pytest.mark.ranks(2, 3)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backwards_within_a_backward(torch, comm):
    """Reentrant checkpoints; and a graph of the gradient, which is an error."""
    from torch.utils.checkpoint import checkpoint

    from collectives.torch.gradients import GradientError

    model = network(torch)
    reducer_of(comm, model)
    part = own(comm, batch(torch, 0, ROWS * comm.size)).requires_grad_()
    hidden = checkpoint(model[2:4], model[:2](part), use_reentrant=True)
    model[4](hidden).square().mean().backward()
    check(torch, model, expected(torch, comm))
    with pytest.raises(GradientError, match="create_graph=True"):
        loss_of(model, part).backward(create_graph=True)
    squared = torch.nn.Parameter(torch.ones(2))
    reducer = reducer_of(comm, torch.nn.ParameterDict({"squared": squared}))
    with reducer.no_sync():
        ((comm.rank + 1) * squared**2).sum().backward(create_graph=True)
    reducer.wait()
    assert squared.grad.tolist() == [comm.size + 1.0] * 2


def move(kind, model):
    """Move gradients out of their buckets."""
    if kind == "data":
        for parameter in model.parameters():
            parameter.grad.data = parameter.grad.data * 1.0
    elif kind == "half":
        model.half()
        model.float()
    else:
        model.share_memory()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["data", "half", "shared"])
def test_gradients_that_were_moved_are_still_reduced(torch, comm, kind):
    from collectives.torch.gradients import GradientError

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 1))
    reducer_of(comm, model)
    parameters = list(model.parameters())

    def backward(scale):
        (sum(each.sum() for each in parameters) * scale).backward()

    mean = sum(range(1, comm.size + 1)) / comm.size
    for step in range(4):
        model.zero_grad(set_to_none=False)
        backward(comm.rank + 1.0)
        for each in parameters:
            assert torch.equal(each.grad, torch.full_like(each, mean)), step
        if step < 2:
            move(kind, model)
    if kind == "half" and comm.rank == 0:
        model[1].half()
        model.zero_grad()
    if kind == "half":
        with pytest.raises(GradientError, match=r"rank 0: 1.bias: it was .torch.float32, "):
            backward(1.0)


def two(torch):
    return [(name, torch.nn.Parameter(torch.ones(2))) for name in ("a", "b")]


@pytest.mark.parametrize("changed", ["dtype", "shape", "strides"])
@pytest.mark.parametrize("_large", [8, 9], indirect=True)
@pytest.mark.ranks(2, 3)
def test_a_refused_reduction_changes_no_gradient(torch, comm, changed):
    from collectives.torch.gradients import GradientError, GradientReducer

    (_, a), (_, b) = parameters = two(torch)
    reducer = GradientReducer(comm, parameters)
    (5 * a.sum() + 9 * b.sum()).backward()
    a.grad = b.grad = None
    if comm.rank == 0:
        a.data = {
            "dtype": a.data.double(),
            "shape": a.data[:1].clone(),
            "strides": torch.ones(4)[::2],
        }[changed]
    with pytest.raises(GradientError, match="rank 0: a: it was"):
        (a.sum() + (comm.rank + 1) * b.sum()).backward()
    assert b.grad.tolist() == [comm.rank + 1.0] * 2
    reducer.close()


@pytest.mark.parametrize("_large", [8, 9], indirect=True)
@pytest.mark.ranks(2, 3)
def test_gradients_that_have_changed_places(torch, comm):
    """Each lies where the other's result belongs."""
    (_, a), (_, b) = parameters = two(torch)
    reducer = reducer_of(comm, torch.nn.ParameterDict(parameters))
    (a.sum() + 2 * b.sum()).backward()
    a.grad, b.grad = b.grad, a.grad
    ((comm.rank + 1.0) * (a.sum() + 10 * b.sum())).backward()
    mean = sum(range(1, comm.size + 1)) / comm.size
    assert a.grad.tolist() == pytest.approx([2 + mean] * 2)
    assert b.grad.tolist() == pytest.approx([1 + 10 * mean] * 2)
    reducer.close()


@pytest.mark.ranks(2, 3)
def test_an_interrupted_backward_and_one_of_other_parameters(torch, comm):
    from collectives.torch.gradients import GradientError, GradientReducer

    (_, a), (_, b) = named = two(torch)
    GradientReducer(comm, named, unused="zeros", bucket_bytes=1, first_bucket_bytes=1)

    def fail(gradient):
        raise ZeroDivisionError("in a hook")

    copied = a * 1
    if comm.rank == 1:
        copied.register_hook(fail)
    with pytest.raises(ZeroDivisionError if comm.rank == 1 else GradientError):
        (copied.sum() + 100 * b.sum()).backward()
    a.grad = b.grad = None
    (a.sum() if comm.rank == 1 else a.sum() + b.sum()).backward()
    torch.testing.assert_close(a.grad, torch.ones(2))
    torch.testing.assert_close(b.grad, torch.full((2,), (comm.size - 1) / comm.size))


@pytest.mark.ranks(2, 3)
def test_a_step_without_a_backward(torch, comm):
    """An error, or zeros; also where all backwards were those of reentrant checkpoints."""
    from torch.utils.checkpoint import checkpoint

    from collectives.torch.gradients import GradientError, GradientReducer

    (_, a), (_, b) = named = two(torch)
    optimizers = [torch.optim.SGD([each], 0.0) for each in (a, b)]
    for unused in ("error", "zeros"):
        reducer = GradientReducer(comm, named, unused=unused)
        for step in range(3):
            a.grad = b.grad = None
            if comm.rank != 1 or step != 1:
                if unused == "error" and step == 1:
                    with pytest.raises(GradientError, match="rank 1: no backward has brought"):
                        (a + b).sum().backward()
                    continue
                (a + b).sum().backward()
            elif unused == "error":
                with pytest.raises(GradientError, match="rank 1: no backward has brought"):
                    reducer.wait(optimizers[0])
                continue
            for optimizer in optimizers:
                reducer.wait(optimizer)
            scale = 1 if step != 1 else (comm.size - 1) / comm.size
            torch.testing.assert_close(b.grad, torch.full((2,), float(scale)))
        if unused == "zeros":
            a.grad = b.grad = None
            x = torch.full((2,), comm.rank + 1.0, requires_grad=True)
            checkpoint(lambda x: a * x, x, use_reentrant=True).sum().backward()
            reducer.wait(optimizers[0])
            torch.testing.assert_close(a.grad, torch.full((2,), (comm.size + 1) / 2))
        reducer.close()


@pytest.mark.ranks(2, 3)
def test_a_second_reducer_of_a_parameter(torch, comm):
    from collectives.torch.gradients import GradientReducer

    named = two(torch)
    first = GradientReducer(comm, named[:1])
    second = named if comm.rank == 1 else two(torch)
    with pytest.raises(ValueError, match="another reducer has a on rank 1"):
        GradientReducer(comm, second)
    first.close()
    GradientReducer(comm, second).close()
