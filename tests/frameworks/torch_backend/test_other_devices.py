"""Groups of several backends, and what a tensor on a GPU would go through, without a GPU."""

import operator

import pytest

from tests.frameworks.torch_backend import test_operations as operations

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.filterwarnings("ignore:.*deprecated"),
]


class Stream:
    """A stream of a GPU that does nothing; counts what is ordered by it."""

    recorded = waited = 0

    def record_event(self):
        Stream.recorded += 1
        return self

    def query(self):
        return True

    def wait_event(self, event):
        Stream.waited += 1


@pytest.fixture
def as_on_gpu(torch, monkeypatch):
    """Give tensors to the communicator as they are, which finds the path of their memory."""
    from collectives.torch import collective_calls, messages, process_group

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group, "gpus_of", lambda tensors: [torch.device("cuda:0")])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: Stream())
    begin = torch.futures.Future.__init__
    monkeypatch.setattr(torch.futures.Future, "__init__", lambda self, devices=None: begin(self))
    for module in (collective_calls, messages):
        monkeypatch.setattr(module, "stays_tensor", lambda tensor: True)
    # No tensor is taken for memory that NumPy can read.
    monkeypatch.setattr(collective_calls, "name_of", lambda kind, dtype: None)


@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("test", operations.COLLECTIVES, ids=lambda test: test.__name__)
def test_calls_without_access_to_the_memory(torch, dist, comm, as_on_gpu, test, later):
    before = Stream.recorded, Stream.waited
    test(torch, dist, comm, later=later)
    if later:
        assert all(map(operator.lt, before, (Stream.recorded, Stream.waited)))
    # Calls are made in the thread of the program.
    assert not dist.group.WORLD._queue.pending


def test_an_error_of_cuda_ends_a_call(torch):
    from collectives.torch.works import PendingWork

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose streams work")
    work = PendingWork([], "a call", [torch.device("cuda:0")])
    work.finish(None)
    # The first without CUDA in torch, the second without a driver.
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA driver"):
        work.wait()


def test_messages_by_way_of_the_host(torch, dist, comm, as_on_gpu):
    operations.test_messages(torch, dist, comm)
    operations.test_callbacks_of_messages_may_wait_for_them(torch, dist, comm)
    operations.test_batches_of_messages(torch, dist, comm)


def test_the_future_of_several_calls(torch):
    from collectives.torch.works import AllWorks, PendingWork, done

    tensors, failed = [torch.ones(1), torch.zeros(1)], PendingWork([], "a call")
    works = [done([each]) for each in tensors]
    assert AllWorks(works).get_future().wait() == tensors
    failed.finish(ValueError("of a call"))
    future = AllWorks([*works, failed]).get_future()
    with pytest.raises(ValueError, match="of a call"):
        future.wait()


def test_a_group_of_two_backends(torch, dist, comm):
    """torch gives every device to the first backend that is written in Python."""
    size = comm.size
    group = dist.new_group(backend="cpu:collectives,cuda:nccl")
    assert type(group) is type(dist.group.WORLD)
    tensor = torch.full((3,), comm.rank + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    rows = torch.empty(size)
    dist.all_gather_single(rows, torch.tensor([comm.rank + 0.0]), group=group)
    assert rows.tolist() == list(range(size))
    dist.destroy_process_group(group)
