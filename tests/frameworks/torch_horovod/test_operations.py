"""Horovod's calls on tensors give what Horovod documents."""

from functools import partial
from math import factorial

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]


def test_ranks(hvd, comm):
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.local_rank, comm.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (comm.node, comm.nodes)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous() == (len(set(comm.all_gather_object(comm.local_size))) == 1)
    assert all([hvd.mpi_threads_supported(), hvd.mpi_built(), hvd.mpi_enabled()])
    assert not any(
        [hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built()]
    )
    assert bool(hvd.nccl_built()) <= hvd.cuda_built()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.rank() == comm.rank
    with pytest.raises(NotImplementedError, match="add_process_set"):
        hvd.init(comm=[0, 1])
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    with pytest.raises(AttributeError, match=r"no elastic: restart from a checkpoint"):
        _ = hvd.elastic


def test_allreduce(torch, hvd, comm):
    tensor = torch.tensor([comm.rank + 1.0, 2.0])
    total = comm.size * (comm.size + 1) / 2
    mean = [total / comm.size, 2.0]
    assert hvd.allreduce(tensor).tolist() == mean
    assert hvd.allreduce(tensor, op=hvd.Sum).tolist() == [total, 2.0 * comm.size]
    assert hvd.allreduce(tensor, average=False).tolist() == [total, 2.0 * comm.size]
    assert hvd.allreduce(tensor, op=hvd.Max, name="largest").tolist() == [comm.size, 2]
    assert hvd.allreduce(tensor, op=hvd.Min).tolist() == [1, 2]
    assert hvd.allreduce(tensor, op=hvd.Product).tolist() == [factorial(comm.size), 2**comm.size]
    scaled = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
    assert scaled.tolist() == [total, 2.0 * comm.size]
    half = hvd.allreduce(tensor, compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    assert half.tolist() == mean
    with pytest.raises(ValueError, match="both given"):
        hvd.allreduce(tensor, average=True, op=hvd.Sum)
    assert tensor[0] == comm.rank + 1
    assert not hvd.allreduce(tensor).requires_grad
    assert hvd.allreduce_(tensor, prescale_factor=2.0) is tensor
    assert tensor.tolist() == [2 * each for each in mean]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_integers_stay_integers(torch, hvd, comm, dtype):
    """Averages and factors are rounded towards zero, in place and out of place."""
    given = torch.tensor([5 + comm.rank, 100], dtype=getattr(torch, dtype))
    own = (torch.tensor([5 + comm.rank, 100]) * 0.7).long()
    factors = {"prescale_factor": 0.7, "postscale_factor": 0.5}
    sums = comm.all_reduce(own.numpy())
    mean = (sums / comm.size * 0.5).astype(int).tolist()
    halves = (sums * 0.5).astype(int).tolist()
    results = [
        hvd.allreduce(given, **factors),
        hvd.synchronize(hvd.allreduce_async(given, **factors)),
        hvd.grouped_allreduce(iter([given]), **factors)[0],
        hvd.synchronize(hvd.grouped_allreduce_async([given], **factors))[0],
        hvd.allreduce_(given.clone(), **factors),
        hvd.synchronize(hvd.allreduce_async_(given.clone(), **factors)),
        hvd.grouped_allreduce_(iter([given.clone()]), **factors)[0],
        hvd.synchronize(hvd.grouped_allreduce_async_(iter([given.clone()]), **factors))[0],
        torch.cat([hvd.allgather(hvd.reducescatter(given, **factors))]),
        hvd.allgather(hvd.synchronize(hvd.reducescatter_async(given, **factors))),
    ]
    for each in results:
        assert each.dtype == given.dtype
        assert each.tolist() == mean
    assert given.tolist() == [5 + comm.rank, 100]
    in_place = given.clone()
    assert hvd.allreduce_(in_place, op=hvd.Sum, **factors) is in_place
    assert in_place.tolist() == halves


def test_differentiated_calls(torch, hvd, comm):
    """As Horovod's: gathered and broadcast tensors get averages, scattered sums whole gradients."""
    tensor = torch.full((comm.size, 2), comm.rank + 1.0, requires_grad=True)
    weight = comm.rank + 1.0
    total = comm.size * (comm.size + 1) / 2
    for call, gradient in (
        (lambda: hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.fp16), total),
        (lambda: hvd.grouped_allreduce([tensor, tensor.detach()])[0], total / comm.size),
        (lambda: hvd.allgather(tensor), total / comm.size),
        (lambda: hvd.grouped_allgather([tensor])[0], total / comm.size),
        (
            lambda: hvd.broadcast(tensor, comm.size - 1),
            total / comm.size * (comm.rank == comm.size - 1),
        ),
    ):
        tensor.grad = None
        (call() * weight).sum().backward()
        torch.testing.assert_close(tensor.grad, torch.full((comm.size, 2), gradient))
    rows = torch.arange(1.0, comm.size + 1)[:, None].expand(-1, 2)
    for call, gradient in (
        (lambda: hvd.alltoall(tensor), rows),
        (lambda: hvd.reducescatter(tensor), rows),
        (lambda: hvd.reducescatter(tensor, op=hvd.Sum), rows * comm.size),
        (lambda: hvd.reducescatter(tensor, op=hvd.Max), rows * (comm.rank == comm.size - 1)),
    ):
        tensor.grad = None
        (call() * weight).sum().backward()
        torch.testing.assert_close(tensor.grad, gradient)


def test_tensors_that_gradients_depend_on_are_not_overwritten(torch, hvd, comm):
    leaf = torch.arange(3.0, requires_grad=True)
    computed = leaf * 1
    for call in (
        lambda: hvd.allreduce_(computed),
        lambda: hvd.allreduce_async_(computed),
        lambda: hvd.grouped_allreduce_([computed]),
        lambda: hvd.grouped_allreduce_async_([computed]),
        lambda: hvd.broadcast_(computed, 0),
    ):
        with pytest.raises(ValueError, match="falsify their gradients"):
            call()
    assert hvd.allreduce_(leaf, op=hvd.Sum, prescale_factor=2.0) is leaf
    assert leaf.tolist() == [0, 2 * comm.size, 4 * comm.size]


@pytest.mark.parametrize("kind", ["sparse", "conjugated", "computed"])
def test_refused_tensors_are_not_scaled(torch, hvd, comm, kind):
    one, leaf = torch.ones(2, dtype=torch.complex64), torch.ones(2, requires_grad=True)
    refused = {"sparse": torch.ones(2).to_sparse(), "conjugated": one.conj(), "computed": leaf * 1}
    for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
        plain = torch.ones(2) + comm.rank
        with pytest.raises((TypeError, ValueError)):
            call([plain, refused[kind]], op=hvd.Sum, prescale_factor=3.0)
        assert plain.tolist() == [1 + comm.rank] * 2
    for call in (hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises((TypeError, ValueError)):
            call(refused[kind], op=hvd.Sum, prescale_factor=3.0)
    assert one.tolist() == refused["computed"].tolist() == [1, 1]
    assert refused["sparse"].to_dense().tolist() == [1, 1]


def test_the_version_of_nccl_without_a_cupy_that_can_be_imported(hvd, tmp_path, monkeypatch):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('no CUDA')")
    monkeypatch.syspath_prepend(tmp_path)
    assert hvd.cuda_built()
    assert hvd.nccl_built() == 0


def test_different_groups(torch, hvd, comm):
    """Of tensors, or of shapes of sparse ones: an error, after which the next call works."""
    one, op = torch.ones(4), hvd.Sum
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (4 + comm.rank,), check_invariants=True)
    for call in (
        lambda: hvd.grouped_allgather([one] * (1 + comm.rank)),
        lambda: hvd.grouped_reducescatter([one] * (1 + comm.rank)),
        lambda: hvd.grouped_allgather_async([one] * (1 + comm.rank)),
        lambda: hvd.grouped_reducescatter_async([one] * (1 + comm.rank)),
        lambda: hvd.sparse_allreduce_async(sparse, None, op),
    ):
        with pytest.raises(hvd.HorovodInternalError, match="rank 0: barrier"):
            call()
        assert hvd.allreduce(one, op=op).tolist() == [comm.size] * 4


def test_different_names_and_factors(torch, hvd, comm):
    """No tensor shows them; each rank would get a result, of what doesn't belong together."""
    one, grad = torch.ones(comm.size), torch.ones(comm.size, requires_grad=True)
    name, half = f"of {comm.rank}", 0.5 if comm.rank else 1.0
    reductions = ("allreduce", "allreduce_", "reducescatter", "allreduce_async", "allreduce_async_")
    grouped = ("grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async")
    grouped += ("grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async")
    named = ("allgather", "allgather_async", "alltoall", "alltoall_async")
    calls = [
        *(partial(getattr(hvd, each), one.clone()) for each in (*reductions, *named)),
        *(partial(getattr(hvd, each), [one.clone()]) for each in grouped),
        *(partial(call, one.clone(), 0) for call in (hvd.broadcast, hvd.broadcast_async)),
        *(partial(call, one.clone(), 0) for call in (hvd.broadcast_, hvd.broadcast_async_)),
        partial(hvd.grouped_allgather, [one]),
        partial(hvd.grouped_allgather_async, [one]),
        partial(hvd.sparse_allreduce_async, one.to_sparse(), op=hvd.Sum),
        *(partial(call, grad) for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter)),
    ]
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError, match="of 0"):
            call(name=name)
    scaled = [*(getattr(hvd, each) for each in (*reductions, *grouped)), hvd.reducescatter_async]
    for call in scaled:
        given = [one.clone()] if "grouped" in call.__name__ else one.clone()
        for factor in ("prescale_factor", "postscale_factor"):
            with pytest.raises(hvd.HorovodInternalError, match=r"factors .*0\.5"):
                call(given, **{factor: half})
    with pytest.raises(hvd.HorovodInternalError, match="grouped_allreduce of 1, with a gradient"):
        hvd.grouped_allreduce([grad] * (1 + comm.rank))
    handle = hvd.allreduce_async(one, name="same", op=hvd.Sum, prescale_factor=0.5)
    assert hvd.synchronize(handle).tolist() == [0.5 * comm.size] * comm.size
    assert hvd.allreduce(one, name="same", op=hvd.Sum).tolist() == [comm.size] * comm.size
    with pytest.raises(hvd.HorovodInternalError, match="1 tensors: of 0"):
        hvd.broadcast_parameters([(name, one)], 0)
    with pytest.raises(hvd.HorovodInternalError, match="1 tensors"):
        hvd.broadcast_parameters([one] * (1 + comm.rank), 0)
    # Horovod sorts a mapping by its keys.
    mapping = {"b": one * 2, "a": one * 1} if comm.rank else {"a": one * 3, "b": one * 4}
    hvd.broadcast_parameters(mapping, 0)
    assert (mapping["a"][0], mapping["b"][0]) == (3, 4)


def test_asynchronous_calls(torch, hvd, comm):
    tensor, mean = torch.full((2,), comm.rank + 1.0), (comm.size + 1) / 2
    handles = [hvd.allreduce_async(tensor), hvd.allreduce_async_(tensor, postscale_factor=2.0)]
    results = [hvd.synchronize(handle) for handle in handles]
    assert [result.tolist() for result in results] == [[mean] * 2, [2 * mean] * 2]
    assert results[1] is tensor
    assert all(hvd.poll(handle) for handle in handles)
    # A second time, without a second scaling.
    assert hvd.synchronize(handles[1]).tolist() == [2 * mean] * 2


def test_every_asynchronous_form(torch, hvd, comm):
    """The results of the blocking forms, by handles that are waited for in another order."""
    tensor = torch.arange(2.0 * comm.size) + comm.rank
    splits = [2] * comm.size
    pairs = [
        (hvd.allgather, hvd.allgather_async, (tensor,)),
        (hvd.broadcast, hvd.broadcast_async, (tensor, 1)),
        (hvd.alltoall, hvd.alltoall_async, (tensor,)),
        (hvd.alltoall, hvd.alltoall_async, (tensor, splits)),
        (hvd.reducescatter, hvd.reducescatter_async, (tensor,)),
        (hvd.grouped_allreduce, hvd.grouped_allreduce_async, ([tensor, tensor[1:]],)),
        (hvd.grouped_allgather, hvd.grouped_allgather_async, ([tensor, tensor[1:]],)),
        (hvd.grouped_reducescatter, hvd.grouped_reducescatter_async, ([tensor, tensor[1:]],)),
    ]
    handles = [later(*given) for _, later, given in pairs]
    for (now, _, given), handle in reversed(list(zip(pairs, handles, strict=True))):
        torch.testing.assert_close(hvd.synchronize(handle), now(*given))
    assert tensor[0] == comm.rank
    given = [tensor.clone(), tensor.clone()]
    results = hvd.synchronize(hvd.grouped_allreduce_async_(given, op=hvd.Sum, prescale_factor=2.0))
    assert results[0] is given[0]
    torch.testing.assert_close(given[1], 2 * hvd.allreduce(tensor, op=hvd.Sum))
    assert hvd.synchronize(hvd.broadcast_async_(tensor, 1)) is tensor
    assert tensor[0] == 1


def test_sparse_tensors(torch, hvd, comm):
    """Rows that several ranks hold are added; a rank may hold none."""
    indices, values = [[0, comm.rank, 0]], [[1.0, 2.0], [comm.rank, 1.0], [1.0, 1.0]]
    kept = 3 if comm.rank else 0
    parts = torch.tensor(indices)[:, :kept], torch.tensor(values)[:kept]
    given = torch.sparse_coo_tensor(*parts, (comm.size, 2), check_invariants=True)
    for op in (hvd.Average, hvd.Sum):
        handle = hvd.sparse_allreduce_async(given, "rows", op)
        found = handle()
        assert found.is_sparse
        torch.testing.assert_close(found.to_dense(), hvd.allreduce(given.to_dense(), op=op))
        assert hvd.synchronize(handle) is found
    with pytest.raises(ValueError, match="op=max: must be Average or Sum of sparse tensors"):
        hvd.sparse_allreduce_async(given, "rows", hvd.Max)


def test_process_sets(torch, hvd, comm):
    """Ranks 1 and higher, in every call; `root_rank` is a number among all ranks."""
    members = hvd.add_process_set(hvd.ProcessSet(range(1, comm.size)))
    assert members.process_set_id
    assert members.size() == comm.size - 1
    assert members.included() == (comm.rank > 0)
    one = torch.full((comm.size - 1,), float(comm.rank))
    if comm.rank:
        assert members.rank() == comm.rank - 1
        inside = range(1, comm.size)
        last, options = comm.size - 1, {"process_set": members}
        total = [float(sum(inside))] * last
        mean = [each / last for each in total]
        assert hvd.allreduce(one, **options).tolist() == mean
        assert hvd.allreduce_(one.clone(), op=hvd.Sum, **options).tolist() == total
        assert hvd.synchronize(hvd.allreduce_async(one, **options)).tolist() == mean
        assert hvd.grouped_allreduce([one], **options)[0].tolist() == mean
        later = hvd.grouped_allreduce_async([one], **options)
        assert hvd.synchronize(later)[0].tolist() == mean
        rows = [float(rank) for rank in inside for _ in inside]
        assert hvd.allgather(one, **options).tolist() == rows
        assert hvd.alltoall(one, **options).tolist() == [float(rank) for rank in inside]
        assert hvd.reducescatter(one, **options).tolist() == mean[:1]
        scattered = hvd.reducescatter(one, None, hvd.Compression.none, hvd.Sum, members)
        assert scattered.tolist() == total[:1]
        assert hvd.broadcast(one, last, **options).tolist() == [last] * last
        assert hvd.broadcast_object(comm.rank, last, process_set=members) == last
        assert hvd.allgather_object(comm.rank, **options) == list(inside)
        hvd.barrier(process_set=members)
        with pytest.raises(ValueError, match=r"root_rank=0: must be one of ProcessSet\(\[1"):
            hvd.broadcast(one, 0, **options)
    else:
        with pytest.raises(ValueError, match=r"ProcessSet\(\[1.*rank 0 is not in it"):
            hvd.allreduce(one, process_set=members)
    everyone = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=hvd.global_process_set)
    assert everyone.item() == comm.size
    with pytest.raises(ValueError, match="a set of these ranks exists"):
        hvd.add_process_set(list(range(1, comm.size)))
    with pytest.raises(ValueError, match=f"must have ranks from 0 to {comm.size - 1}"):
        hvd.add_process_set([comm.size])
    assert hvd.remove_process_set(members)
    assert not hvd.remove_process_set(members)
    with pytest.raises(ValueError, match=r"give it to hvd\.add_process_set"):
        members.size()
    again = hvd.ProcessSet([0])
    hvd.init(process_sets=[again])
    assert again.included() == (comm.rank == 0)
    hvd.shutdown()
    hvd.init()
    with pytest.raises(ValueError, match=r"give it to hvd\.add_process_set"):
        again.included()


def test_groups_and_movements(torch, hvd, comm):
    mean = (comm.size + 1) / 2
    tensors = [
        torch.full((2,), comm.rank + 1.0),
        torch.full((3,), comm.rank + 1, dtype=torch.int64),
    ]
    grouped = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [each.tolist() for each in grouped] == [[mean * comm.size] * n for n in (2, 3)]
    assert grouped[1].dtype == torch.int64
    hvd.grouped_allreduce_(tensors[:1], postscale_factor=2.0)
    assert tensors[0].tolist() == [2 * mean] * 2

    gathered = hvd.allgather(torch.full((comm.rank, 2), comm.rank))
    assert gathered[:, 0].tolist() == [rank for rank in range(comm.size) for _ in range(rank)]
    given = torch.full((2,), comm.rank)
    assert hvd.broadcast(given, 1).tolist() == [1, 1]
    assert given.tolist() == [comm.rank] * 2
    assert hvd.broadcast_(given, root_rank=1) is given
    assert given.tolist() == [1, 1]

    sent = torch.arange(comm.size) + 10 * comm.rank
    assert hvd.alltoall(sent).tolist() == [10 * rank + comm.rank for rank in range(comm.size)]
    splits = torch.tensor([comm.size, *[0] * (comm.size - 1)])
    received, counts = hvd.alltoall(sent, splits)
    assert counts.tolist() == [comm.size * (comm.rank == 0)] * comm.size
    assert len(received) == comm.size**2 * (comm.rank == 0)
    with pytest.raises(ValueError, match="add up to"):
        hvd.alltoall(sent, [1])
    with pytest.raises(ValueError, match="multiple of"):
        hvd.alltoall(torch.zeros(comm.size + 1))
    with pytest.raises(hvd.HorovodInternalError, match="different dtypes"):
        hvd.alltoall(torch.zeros(comm.size, dtype=torch.int32 if comm.rank else torch.float32))
    with pytest.raises(hvd.HorovodInternalError, match="rows of different shapes"):
        hvd.alltoall(torch.zeros(comm.size, 1 + comm.rank))
    for scatter in (hvd.reducescatter, hvd.reducescatter_async, hvd.alltoall):
        with pytest.raises(ValueError, match="without axes"):
            scatter(torch.tensor(1.0))
    rows = hvd.reducescatter(torch.arange(comm.size + 1.0), op=hvd.Sum)
    assert rows.tolist() == [
        comm.size * each for each in ([0, 1] if comm.rank == 0 else [comm.rank + 1])
    ]
    hvd.barrier()


def test_equal_starts(torch, hvd, comm):
    torch.manual_seed(comm.rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (comm.rank + 1), momentum=0.9)
    if comm.rank == 0:
        model(torch.ones(4, 2) * torch.arange(4.0)[:, None]).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model[0].bias += comm.rank
    hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
    for parameters in (model.state_dict(), model.named_parameters()):
        hvd.broadcast_parameters(parameters, root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
    for each in model.state_dict().values():
        assert torch.equal(each, hvd.broadcast(each, 0))
    states = hvd.allgather_object(optimizer.state_dict()["param_groups"])
    assert all(state == states[0] for state in states)
    for parameter in model.parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert torch.equal(momentum, hvd.broadcast(momentum, 0))
    assert hvd.broadcast_object({"epoch": comm.rank}, root_rank=1) == {"epoch": 1}
    given = list(model.parameters())[: 1 + (comm.rank > 0)]
    kinds = torch.optim.SGD, torch.optim.Adam
    for other in (torch.optim.SGD(given), kinds[comm.rank > 0](model.parameters())):
        with pytest.raises(hvd.HorovodInternalError, match=r"SGD with groups of \[.\] parameters"):
            hvd.broadcast_optimizer_state(other, root_rank=0)
