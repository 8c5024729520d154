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
