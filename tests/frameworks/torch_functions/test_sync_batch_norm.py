"""SyncBatchNorm on every rank's part computes what BatchNorm computes on the whole batch."""

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
CHANNELS = 4

# Each: the shape behind N and C, how many examples rank r has, and the layer's arguments.
CASES = {
    "images": ((2, 3), lambda r: 2, {"eps": 1e-2, "momentum": 0.3}),
    "different batches": ((3,), lambda r: 2 * r + 1, {}),
    "an empty batch": ((2, 2), lambda r: 3 * r, {}),
    "average": ((), lambda r: r + 2, {"momentum": None}),
    "no running statistics": ((3,), lambda r: r + 1, {"track_running_stats": False}),
    "no parameters": ((), lambda r: 5, {"affine": False}),
    "no bias": ((3,), lambda r: r + 1, {"bias": False}),
}


def batch_norm(torch, shape, **options):
    layers = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d]
    torch.manual_seed(4)
    layer = layers[len(shape)](CHANNELS, **options)
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter)
    return layer


def parts(torch, comm, shape, examples, step, dtype, offset=2.0):
    """The whole batch, weights of its loss, and which of them are this rank's."""
    counts = [examples(rank) for rank in range(comm.size)]
    generator = torch.Generator(torch.get_default_device()).manual_seed(step)
    whole, weights = (
        torch.randn(sum(counts), CHANNELS, *shape, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    first = sum(counts[: comm.rank])
    return (whole + offset).to(dtype), weights.to(dtype), slice(first, first + counts[comm.rank])


@pytest.mark.parametrize("case", CASES)
def test_as_batch_norm_of_the_whole_batch(torch, comm, case):
    for dtype in (torch.float32, torch.float64):
        compare(torch, comm, case, dtype)


def compare(torch, comm, case, dtype):
    import collectives.torch

    shape, examples, options = CASES[case]
    alone = batch_norm(torch, shape, dtype=dtype, **options)
    layer = collectives.torch.SyncBatchNorm.convert_sync_batchnorm(
        batch_norm(torch, shape, dtype=dtype, **options)
    )
    assert type(layer) is collectives.torch.SyncBatchNorm
    for step in range(3):
        whole, weights, own = parts(torch, comm, shape, examples, step, dtype)
        wanted_input, given_input = whole.clone().requires_grad_(), whole[own].requires_grad_()
        wanted, given = alone(wanted_input), layer(given_input)
        torch.testing.assert_close(given, wanted[own])
        for each in (alone, layer):
            each.zero_grad()
        (wanted * weights).sum().backward()
        (given * weights[own]).sum().backward()
        torch.testing.assert_close(given_input.grad, wanted_input.grad[own], rtol=1e-4, atol=1e-5)
        for part, total in zip(layer.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(comm.all_reduce(part.grad), total.grad, rtol=1e-4, atol=1e-5)
    assert layer.state_dict().keys() == alone.state_dict().keys()
    for name, kept in layer.state_dict().items():
        torch.testing.assert_close(kept, alone.state_dict()[name])
    # In evaluation mode each rank is on its own.
    layer.eval(), alone.eval()
    own_batch = whole[: comm.rank + 2]
    if comm.rank:
        torch.testing.assert_close(layer(own_batch), alone(own_batch))


def test_one_call_forward_and_one_backward(torch, comm, monkeypatch):
    import collectives.torch

    layer, calls = collectives.torch.SyncBatchNorm(CHANNELS, comm=comm), []
    reduce = type(comm).all_reduce
    monkeypatch.setattr(
        type(comm), "all_reduce", lambda self, *rest: calls.append(rest) or reduce(self, *rest)
    )
    inputs = torch.randn(3, CHANNELS, 2)
    result = layer(inputs)
    assert [len(call[0]) for call in calls] == [2 * CHANNELS + 3]
    # The input requires no gradient on rank 0.
    (result.sum() if comm.rank else result.square().sum()).backward()
    assert len(calls) == 2


def test_a_mean_far_from_zero_costs_no_precision(torch, comm):
    import collectives.torch

    layer = collectives.torch.SyncBatchNorm(CHANNELS)
    whole, _, own = parts(torch, comm, (50,), lambda r: 4 + r, 0, torch.float32, offset=1e4)
    alone = batch_norm(torch, (50,), affine=False).double()
    torch.testing.assert_close(
        layer(whole[own]).double(), alone(whole.double())[own], rtol=1e-3, atol=1e-3
    )
    variance = layer.running_var.double()
    torch.testing.assert_close(variance, alone.running_var, rtol=1e-5, atol=0)


def test_second_derivatives(torch, comm):
    """Of a penalty on the gradient, which torch's own layer does not give."""
    import collectives.torch

    whole, weights, own = parts(torch, comm, (), lambda r: r + 2, 1, torch.float64)
    layers = batch_norm(torch, ()).double(), batch_norm(torch, ()).double()
    layer = collectives.torch.SyncBatchNorm.convert_sync_batchnorm(layers[1])

    def penalty(layer, inputs, weights):
        inputs = inputs.clone().requires_grad_()
        loss = (layer(inputs).sin() * weights).sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), inputs)[0]

    wanted = penalty(layers[0], whole, weights)
    torch.testing.assert_close(penalty(layer, whole[own], weights[own]), wanted[own])


def test_half_precision(torch, comm):
    import collectives.torch

    layer = collectives.torch.SyncBatchNorm(CHANNELS)
    whole, _, own = parts(torch, comm, (3,), lambda r: r + 1, 2, torch.bfloat16)
    given = layer(whole[own])
    assert given.dtype == torch.bfloat16
    alone = batch_norm(torch, (3,), affine=False)
    torch.testing.assert_close(given.float(), alone(whole.float())[own], rtol=0.02, atol=0.02)


def test_conversion_keeps_the_rest(torch, comm):
    import collectives.torch

    nn = torch.nn
    model = nn.Sequential(nn.Linear(2, 4), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU())).eval()
    parameters = list(model.parameters())
    convert = collectives.torch.SyncBatchNorm.convert_sync_batchnorm
    converted = convert(model, comm)
    assert converted is model
    layer = model[1][0]
    assert isinstance(layer, collectives.torch.SyncBatchNorm)
    assert layer.comm is comm
    assert not layer.training
    given = list(model.parameters())
    assert all(each is wanted for each, wanted in zip(given, parameters, strict=True))
    assert convert(model)[1][0] is layer


def test_refusals(torch, comm):
    import collectives.torch

    layer = collectives.torch.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match=r"shape \(4,\): must be \(N, C, …\)"):
        layer(torch.zeros(4))
    with pytest.raises(ValueError, match=r"5 channels .*: must have num_features, 4"):
        layer(torch.zeros(2, 5))
    examples = int(comm.rank == 0)
    with pytest.raises(ValueError, match="together have 1 values for each channel: must be 2"):
        layer(torch.zeros(examples, CHANNELS))
    assert layer.num_batches_tracked == 0
    odd = comm.rank == comm.size - 1
    for options in ({"eps": 1e-3 if odd else 1e-5}, {"momentum": None if odd else 0.1}):
        other = collectives.torch.SyncBatchNorm(CHANNELS, **options)
        with pytest.raises(ValueError, match="momentum, track_running_stats or affine differ"):
            other(torch.zeros(3, CHANNELS))
        assert other.num_batches_tracked == 0
    with pytest.raises(collectives.MismatchError, match="5 channels"):
        layer(torch.zeros(2, 5 if odd else CHANNELS))
    layer(torch.zeros(3, CHANNELS))
