"""Tensors of torch on the GPU as inputs and outputs."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "complex64", "bool"])
def test_tensors_come_back_as_tensors(alone, torch, dtype):
    tensor = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))
    for given in (tensor, tensor.T, tensor[:, ::2]):
        result = alone.all_reduce(given)
        assert result.is_cuda
        assert result.dtype == tensor.dtype
        assert torch.equal(result, given)
        assert torch.equal(alone.all_gather(given), given)


def test_in_place(alone, torch):
    tensor = torch.ones(1000, device="cuda")
    assert alone.all_reduce(tensor, out=tensor) is tensor
    assert alone.broadcast(tensor) is tensor
    assert torch.equal(tensor, torch.ones_like(tensor))


def test_many(alone, torch):
    tensors = [torch.full((number + 1,), float(number), device="cuda") for number in range(5)]
    for result, tensor in zip(alone.all_reduce_many(tensors, "mean"), tensors, strict=True):
        assert result.is_cuda
        assert torch.equal(result, tensor)


def test_the_call_follows_torchs_stream(alone, torch):
    out = torch.empty(1 << 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1 << 16, device="cuda")
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        tensor += 1
        alone.all_reduce(tensor, out=out)
        later = out + 1
    stream.synchronize()
    assert torch.equal(later, torch.full_like(later, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_recurring_calls(alone, torch, dtype):
    def made(turn):
        return (torch.arange(24, device="cuda") + turn).reshape(4, 6).to(getattr(torch, dtype))

    op = "max" if dtype == "bool" else "sum"
    calls = {
        "all_reduce": {"op": op},
        "reduce": {"op": op},
        "reduce_scatter": {"op": op},
        "all_gather": {},
    }
    for turn in range(4):
        for name, options in calls.items():
            call, start = getattr(alone, name), getattr(alone, f"{name}_async")
            out = torch.empty_like(made(turn))
            assert call(made(turn), **options, out=out) is out
            results = [out, call(made(turn), **options), start(made(turn), **options).wait()]
            out = torch.empty_like(made(turn))
            assert start(made(turn), **options, out=out).wait() is out
            for result in (*results, out):
                assert result.dtype == out.dtype
                assert torch.equal(result, made(turn)), (name, turn)
        tensor = made(turn)
        assert alone.broadcast(tensor) is tensor
        assert alone.broadcast_async(tensor).wait() is tensor
        assert alone.all_reduce(tensor, op, out=tensor) is tensor
        assert torch.equal(tensor, made(turn))
    if dtype != "bool":  # which NCCL doesn't reduce
        bound = {key[1] for key in alone._bound_calls if key[0] == "on a GPU"}
        assert bound == {*calls, "broadcast"}


def test_recurring_calls_with_tensors_that_are_not_plain(alone, torch):
    """They take the general path, after calls of the same shape that are bound."""
    tensor = torch.arange(16.0, device="cuda").reshape(4, 4)
    for _ in range(2):
        alone.all_reduce(tensor)
    assert torch.equal(alone.all_reduce(tensor.T), tensor.T)
    assert torch.equal(alone.all_reduce_async(tensor.T).wait(), tensor.T)
    with pytest.raises(ValueError, match="requires grad"):
        alone.all_reduce(tensor.clone().requires_grad_())
    with pytest.raises(ValueError, match="requires grad"):
        alone.all_reduce_async(tensor.clone().requires_grad_())
    with pytest.raises(ValueError, match="must have the result's"):
        alone.all_reduce(tensor, out=torch.empty(2, 8, device="cuda"))
    sliced = torch.zeros(4, 8, device="cuda")[:, ::2]
    assert alone.all_reduce(tensor, out=sliced) is sliced
    assert torch.equal(sliced, tensor)


def test_recurring_calls_on_another_stream(alone, torch):
    stream, out = torch.cuda.Stream(), torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    for turn in range(3):
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 16, device="cuda")
            torch.cuda._sleep(50_000_000)
            tensor += turn
            alone.all_reduce(tensor, out=out)
            handle = alone.all_reduce_async(out)
            # Its memory is free for the next tensor of the stream.
            del tensor
            other = torch.full((1 << 16,), -1.0, device="cuda")
            later = out + 1
        assert torch.equal(handle.wait(), torch.full_like(out, turn))
        stream.synchronize()
        assert torch.equal(later, torch.full_like(later, turn + 1))
        assert torch.equal(other, torch.full_like(other, -1))
