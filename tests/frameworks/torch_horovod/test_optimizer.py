"""DistributedOptimizer trains on the ranks' batches as one process does on all."""

import gc
import weakref

import pytest

import collectives

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]
STEPS = 4


def network(torch):
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def batches(torch, size, passes=1):
    """For each step, and each of its passes, the whole batch, of `size` equal parts."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return [[torch.randn(2 * size, 3, generator=generator) for _ in range(passes)]] * STEPS


def trained(torch, steps, scale=1.0, clip=None):
    """The parameters of one process; `scale` multiplies its mean gradients."""
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for passes in steps:
        optimizer.zero_grad()
        for batch in passes:
            (model(batch).square().mean() * scale).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return list(model.parameters())


def check(torch, hvd, model, wanted, tolerance=1e-5):
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    expected = torch.cat([each.detach().reshape(-1) for each in wanted])
    torch.testing.assert_close(flat, expected, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(flat, each) for each in hvd.allgather(flat[None]))


def own(comm, batch):
    return batch.chunk(comm.size)[comm.rank]


def distributed(torch, hvd, **options):
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    assert isinstance(optimizer, torch.optim.SGD)
    return model, optimizer


@pytest.mark.parametrize("case", ["plain", "fp16", "sum", "passes"])
def test_training(torch, hvd, comm, case):
    options = {
        "plain": {"gradient_predivide_factor": 2.0},
        "fp16": {"compression": hvd.Compression.fp16},
        "sum": {"op": hvd.Sum},
        "passes": {"backward_passes_per_step": 2},
    }[case]
    steps = batches(torch, comm.size, 2 if case == "passes" else 1)
    model, optimizer = distributed(torch, hvd, **options)
    for passes in steps:
        optimizer.zero_grad()
        for batch in passes:
            model(own(comm, batch)).square().mean().backward()
        optimizer.step()
    wanted = trained(torch, steps, comm.size if case == "sum" else 1.0)
    check(torch, hvd, model, wanted, 2e-2 if case == "fp16" else 1e-5)


def test_clipping_between_synchronize_and_step(torch, hvd, comm):
    model, optimizer = distributed(torch, hvd, backward_passes_per_step=2)
    steps = batches(torch, comm.size)
    for (batch,) in steps:
        optimizer.zero_grad()
        # The first of two passes: nothing is reduced before `synchronize`.
        model(own(comm, batch)).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    check(torch, hvd, model, trained(torch, steps, clip=0.01))


def test_a_closure_schedulers_and_hooks(torch, hvd, comm):
    model, optimizer = distributed(torch, hvd, backward_passes_per_step=2)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    steps = batches(torch, comm.size)
    for (batch,) in steps:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = model(own(comm, batch)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
        scheduler.step()
    assert len(calls) == STEPS
    check(torch, hvd, model, trained(torch, steps))


# The scheduler watches the step of the original optimizer, which is never called.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_scheduler_of_the_original_optimizer_after_a_state_was_loaded(torch, hvd, comm):
    parameter = torch.nn.Parameter(torch.ones(2))
    original = torch.optim.SGD([parameter], 1.0 + comm.rank, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(original, 1, 0.1)
    optimizer = hvd.DistributedOptimizer(original)
    last = comm.size - 1
    hvd.broadcast_optimizer_state(optimizer, last)
    for step in range(3):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        scheduler.step()
        hvd.broadcast_optimizer_state(optimizer, last)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 ** (step + 1) * comm.size)
        assert original.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        for each in (original, optimizer):
            momentum = each.state[parameter]["momentum_buffer"]
            assert momentum.tolist() == [2 - 0.5**step] * 2
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups is original.param_groups


def test_parameters_that_a_rank_does_not_use(torch, hvd, comm):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(comm.size + 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
    hvd.broadcast_parameters(model.state_dict(), 0)
    model[comm.rank](torch.full((1, 2), comm.rank + 1.0)).sum().backward()
    optimizer.step()
    for rank, layer in enumerate(model):
        wanted = (rank + 1.0) / comm.size if rank < comm.size else 0.0
        assert layer.weight.grad.tolist() == [[pytest.approx(wanted)] * 2]


def test_joined_ranks_add_zeros(torch, hvd, comm):
    """Rank r has r + 1 batches; two optimizers, and calls between them."""
    pairs = [distributed(torch, hvd) for _ in range(2)]
    pairs.append(distributed(torch, hvd, backward_passes_per_step=2))
    (batch,) = batches(torch, comm.size)[0]
    for step in range(comm.rank + 1):
        active = comm.size - step
        for model, optimizer in pairs:
            optimizer.zero_grad()
            for _ in range(optimizer._gradients.passes):
                model(own(comm, batch)).sum().backward()
            optimizer.step()
            gradients = [each.grad.clone() for each in model.parameters()]
        ones = torch.ones(3)
        assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [active] * 3
        assert hvd.allreduce(ones).tolist() == pytest.approx([active / comm.size] * 3)
        assert hvd.synchronize(hvd.allreduce_async(ones, op=hvd.Sum)).tolist() == [active] * 3
        tensors = [ones, torch.ones(2, dtype=torch.int64)]
        later = hvd.grouped_allreduce_async(tensors, op=hvd.Sum)
        assert [each.tolist() for each in hvd.synchronize(later)] == [[active] * 3, [active] * 2]
        grouped = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert [each.tolist() for each in grouped] == [[active] * 3, [active] * 2]
    # That of the last layer's bias is 1 for each example, of a rank that has not joined.
    assert gradients[-1].tolist() == pytest.approx([2 * 2 * active / comm.size] * 2)
    assert hvd.join() == comm.size - 1
    # All ranks have left it: calls go on as before.
    for model, _ in pairs:
        hvd.broadcast_parameters(model.state_dict(), comm.size - 1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == comm.size


def test_two_optimizers_of_one_model(torch, hvd, comm):
    """Each of its own parameters, as for two parts that learn at different rates."""
    model, alone = network(torch), network(torch)

    def optimizers(model):
        halves = model[0].parameters(), model[2].parameters()
        return [torch.optim.SGD(half, rate) for half, rate in zip(halves, (0.1, 0.3), strict=True)]

    both = [hvd.DistributedOptimizer(each) for each in optimizers(model)]
    for given, pair, part in (
        (model, both, lambda batch: own(comm, batch)),
        (alone, optimizers(alone), lambda batch: batch),
    ):
        for step, (batch,) in enumerate(batches(torch, comm.size)):
            for optimizer in pair:
                optimizer.zero_grad()
            loss = given(part(batch)).square().mean()
            if step == 2:
                # Only the second one's parameters have a gradient, on every rank.
                loss = given[2](given[1](given[0](part(batch))).detach()).square().mean()
            loss.backward()
            for optimizer in pair[step == 2 :]:
                optimizer.step()
    check(torch, hvd, model, alone.parameters())


def test_joined_ranks_of_several_optimizers_of_one_model(torch, hvd, comm):
    """A backward begins the reductions of both before it ends one."""
    model = network(torch)
    pair = [
        hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), 0.1))
        for part in (model[0], model[2])
    ]

    def step():
        for optimizer in pair:
            optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for optimizer in pair:
            optimizer.step()

    for _ in range(2 * comm.rank):
        step()
    assert hvd.join() == comm.size - 1
    hvd.broadcast_parameters(model.state_dict(), comm.size - 1)
    step()
    check(torch, hvd, model, model.parameters())


def test_optimizers_of_other_settings(torch, hvd, comm):
    """The ranks would train apart; what one rank has loaded may be broadcast before."""
    model, batch = network(torch), torch.ones(2, 3)
    odd = comm.rank == comm.size - 1
    for kind, options in (
        (torch.optim.Adam if odd else torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8 if odd else 0.9}),
        (torch.optim.SGD, {"lr": 0.2 if odd else 0.1}),
    ):
        optimizer = hvd.DistributedOptimizer(kind(model.parameters(), **options))
        for _ in range(2):
            with pytest.raises(collectives.MismatchError, match="SGD"):
                model(batch).sum().backward()
            optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, 0)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    check(torch, hvd, model, model.parameters())


def test_a_second_optimizer_replaces_those_of_its_parameters(torch, hvd, comm):
    """As of a model whose first layer is frozen for some steps."""
    model, alone = network(torch), network(torch)
    ((batch,), *_) = batches(torch, comm.size)
    first = None
    with pytest.raises(ValueError, match="parameters or arguments differ"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            compression=hvd.Compression.fp16 if comm.rank else hvd.Compression.none,
        )
    for trains in (False, True):
        for each in (model, alone):
            each[0].requires_grad_(trains)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        other = torch.optim.SGD(alone.parameters(), 0.1)
        for each, stepped, part in ((model, optimizer, own(comm, batch)), (alone, other, batch)):
            each(part).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
        first = first or optimizer
    with pytest.raises(ValueError, match="parameters or arguments differ"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            compression=hvd.Compression.fp16 if comm.rank else hvd.Compression.none,
        )
    optimizer.step()  # It goes on after a second one has failed.
    other.step()
    check(torch, hvd, model, alone.parameters())
    with pytest.raises(RuntimeError, match="another DistributedOptimizer has replaced this one"):
        first.step()


def test_what_an_optimizer_was_not_given(torch, hvd, comm):
    model = network(torch)
    model[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[2].parameters(), 0.1))
    optimizer.add_param_group({"params": list(model[0].parameters())})
    with pytest.raises(ValueError, match="parameters that it did not have in Distributed"):
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    model[0].requires_grad_(True)
    ((batch,), *_) = batches(torch, comm.size)
    with pytest.raises(RuntimeError, match="does now: make the DistributedOptimizer anew"):
        model(own(comm, batch)).square().mean().backward()


# LBFGS itself converts the loss.
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
def test_a_line_search_decides_by_the_loss_of_all(torch, hvd, comm):
    model, alone = network(torch), network(torch)
    ((batch,), *_) = batches(torch, comm.size)

    def searched(model):
        return torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    optimizer = hvd.DistributedOptimizer(searched(model))
    for each, stepped, part in (
        (model, optimizer, own(comm, batch)),
        (alone, searched(alone), batch),
    ):

        def closure(each=each, stepped=stepped, part=part):
            stepped.zero_grad()
            loss = (each(part).sin() + part[:, :2]).square().mean()
            loss.backward()
            return loss

        losses = [float(stepped.step(closure)) for _ in range(3)]
    check(torch, hvd, model, alone.parameters(), 1e-3)
    assert hvd.allgather(torch.tensor(losses)[None]).unique().numel() <= 3


def test_a_process_set_trains_apart(torch, hvd, comm):
    members = hvd.add_process_set(range(1, comm.size))
    if comm.rank:
        model, optimizer = distributed(torch, hvd, process_set=members)
        steps = batches(torch, comm.size - 1)
        for (batch,) in steps:
            optimizer.zero_grad()
            model(batch.chunk(comm.size - 1)[members.rank()]).square().mean().backward()
            optimizer.step()
        flat = [torch.cat([each.detach().reshape(-1) for each in model.parameters()])]
        flat.append(torch.cat([each.reshape(-1) for each in trained(torch, steps)]).detach())
        torch.testing.assert_close(*flat, rtol=1e-5, atol=1e-5)
    else:
        # As Horovod's: a rank that isn't in the set trains alone.
        steps = batches(torch, 1)
        model, optimizer = distributed(torch, hvd, process_set=members)
        for (batch,) in steps:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        for own, alone in zip(model.parameters(), trained(torch, steps), strict=True):
            torch.testing.assert_close(own.detach(), alone.detach())
    hvd.remove_process_set(members)


@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_embeddings(torch, hvd, comm, sparse_as_dense):
    """Of an optimizer that takes sparse gradients alone; the rows of all ranks are averaged."""
    torch.manual_seed(1)
    model = torch.nn.Embedding(10, 3, sparse=True)
    alone = torch.nn.Embedding(10, 3, sparse=True)
    alone.load_state_dict(model.state_dict())
    single = torch.optim.SparseAdam(list(alone.parameters()), lr=0.1)
    options = {"groups": 1, "sparse_as_dense": sparse_as_dense}
    made = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
    optimizer = hvd.DistributedOptimizer(made, **options)
    rows = [torch.tensor([[rank, 4, 5 + rank % 2]]) for rank in range(comm.size)]
    model(rows[comm.rank]).sum().backward()
    assert model.weight.grad.is_sparse
    optimizer.step()
    (sum(alone(each).sum() for each in rows) / comm.size).backward()
    single.step()
    torch.testing.assert_close(model.weight.detach(), alone.weight.detach())


def test_the_last_rank_that_joined_may_be_any(torch, hvd, comm):
    for _ in range(comm.size - comm.rank):
        hvd.allreduce(torch.ones(2))
    assert hvd.join() == 0


@pytest.mark.parametrize("call", ["allgather", "smallest", "differentiated", "object"])
def test_calls_that_zeros_cannot_take_part_in(torch, hvd, comm, call):
    def make():
        if call == "allgather":
            return hvd.allgather(torch.ones(2))
        if call == "smallest":
            return hvd.allreduce(torch.ones(2), op=hvd.Min)
        if call == "object":
            return hvd.allgather_object(1)
        return hvd.allreduce(torch.ones(2, requires_grad=True))

    if comm.rank:
        with pytest.raises(NotImplementedError, match=r"ranks \[0\] have joined"):
            make()
    # The rank that has joined waits for the others. It has noticed a call, and they none.
    assert hvd.join() == comm.size - 1
    assert make() is not None


@pytest.mark.parametrize("kind", ["sparse", "conjugated", "meta"])
def test_asynchronous_calls_that_are_refused(torch, hvd, comm, kind):
    """Before ranks that have joined notice them."""
    given = {
        "sparse": torch.ones(2).to_sparse(),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "meta": torch.ones(2, device="meta"),
    }[kind]
    if comm.rank:
        for call in (hvd.allreduce_async, hvd.allreduce_async_):
            with pytest.raises(TypeError, match="must be"):
                call(given)
        mean = hvd.synchronize(hvd.allreduce_async(torch.ones(2)))
        torch.testing.assert_close(mean, torch.full((2,), (comm.size - 1) / comm.size))
    assert hvd.join() == comm.size - 1


def test_passes_begin_anew_after_join(torch, hvd, comm):
    model, optimizer = distributed(torch, hvd, backward_passes_per_step=2)
    (batch,) = batches(torch, comm.size)[0]
    for passes in (2 + (comm.rank == 0), 4):
        optimizer.zero_grad()
        for number in range(passes):
            ((1 + comm.rank + number) * model(own(comm, batch)).sum()).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        hvd.join()
    weights = [each.tolist() for each in model.parameters()]
    assert comm.all_gather_object(weights) == [weights] * comm.size


def test_calls_of_others_end_join(torch, hvd, comm):
    """And the ranks' next calls but one match again."""
    import collectives

    with pytest.raises(collectives.MismatchError):
        comm.all_reduce(torch.ones(2)) if comm.rank else hvd.join()
    if comm.rank:
        with pytest.raises(collectives.MismatchError, match="rank 0: all_gather_object"):
            hvd.allreduce(torch.ones(2))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [comm.size] * 2
    with pytest.raises(collectives.MismatchError):
        comm.all_reduce(torch.ones(2)) if comm.rank else hvd.allreduce(torch.ones(2))
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [comm.size] * 2


def test_join_without_the_optimizer_is_an_error_on_every_rank(torch, hvd, comm):
    model, optimizer = distributed(torch, hvd)
    (batch,) = batches(torch, comm.size)[0]
    if comm.rank == 0:
        del model, optimizer
        gc.collect()
        with pytest.raises(collectives.MismatchError, match="DistributedOptimizer this rank keeps"):
            hvd.join()
    else:
        with pytest.raises(collectives.MismatchError, match="DistributedOptimizer this rank keeps"):
            model(own(comm, batch)).sum().backward()


def test_an_optimizer_that_is_made_again_keeps_no_earlier_one(torch, hvd, comm):
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    earlier = weakref.ref(hvd.DistributedOptimizer(optimizer))
    later = hvd.DistributedOptimizer(optimizer)
    gc.collect()
    assert earlier() is None
    later.zero_grad()


def test_mismatches_stay_errors(torch, hvd, comm):
    import collectives

    with pytest.raises(collectives.ShapeMismatchError):
        hvd.allreduce(torch.ones(2 + comm.rank))
    if comm.size > 2:
        # Two ranks go on, with different calls.
        with pytest.raises(collectives.MismatchError, match="rank 0: barrier"):
            hvd.allreduce(torch.ones(comm.rank)) if comm.rank else hvd.join()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == comm.size


def test_refusals(torch, hvd, comm):
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    named = list(model.named_parameters())
    for options, message in (
        ({"op": hvd.Max}, "must be Average or Sum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "not supported with op != Average"),
        ({"named_parameters": named[1:]}, "lacks 1 of"),
        ({"named_parameters": [*named, ("0.bias", named[0][1])]}, r"several .* named 0\.bias"),
        ({"backward_passes_per_step": 0}, "must be 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(optimizer, **options)
    with pytest.raises(TypeError, match="compression=16: must be"):
        hvd.DistributedOptimizer(optimizer, compression=16)


def test_a_step_without_a_backward_counts_as_zeros(torch, hvd):
    """Once for `synchronize` and `step`; and sums after a step that a gradient scaler skipped."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 0.0), op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        if hvd.rank() != 1 or step != 1:
            parameter.sum().backward()
        optimizer.synchronize()
        optimizer.step()
        wanted = torch.full((2,), float(hvd.size() - (step == 1)))
        torch.testing.assert_close(parameter.grad, wanted)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        parameter.sum().backward()
        torch.testing.assert_close(parameter.grad, torch.full((2,), float(hvd.size())))


def test_a_sum_is_not_summed_again(torch, hvd):
    """Neither by the last backward of a step nor by an earlier one, where no step came between."""
    a = torch.nn.Parameter(torch.ones(1))
    options = {"op": hvd.Sum, "backward_passes_per_step": 2}
    kept = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=0.0), [("a", a)], **options)
    for _ in range(2):
        a.sum().backward()
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="a: a second backward without a step would sum"):
            a.sum().backward()
    del kept


def test_memory_goes_with_the_optimizer(torch, hvd, comm):
    """As of `strategies.distribute`; or with the original one, which a program may step alone."""
    model = network(torch)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    gc.collect()
    model(torch.ones(1, 3) * comm.rank).sum().backward()
    optimizer.step()
    check(torch, hvd, model, list(model.parameters()))
    alive = [weakref.ref(each) for each in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(each() is not None for each in alive)


def test_ranks_that_accumulate_differently(torch, hvd, comm):
    """A reduction of two backwards would be added to another rank's of one."""
    model, passes = torch.nn.Linear(2, 1), 1 + (comm.rank > 0)
    made = torch.optim.SGD(model.parameters(), 0.1)
    hvd.DistributedOptimizer(made, model.named_parameters(), backward_passes_per_step=passes)
    for _ in range(passes - 1):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match="1 passes per step"):
        model(torch.ones(1, 2)).sum().backward()


def test_epochs_that_end_between_two_steps(torch, hvd, comm):
    """As where batches are accumulated, and an epoch ends before the last step."""
    model = torch.nn.Linear(2, 1)
    made = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(made, model.named_parameters())
    for _ in range(2):
        for _ in range(1 + (comm.rank == 0)):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if comm.rank == 0:
            model(torch.ones(1, 2)).sum().backward()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
    weights = comm.all_gather(model.weight.detach())
    assert torch.equal(weights[0], weights[-1])


@pytest.mark.parametrize("kind", ["two backwards", "no step", "gradients cleared before the step"])
def test_ranks_that_go_on_one_batch_apart(torch, hvd, comm, kind):
    """One rank's reduction would be added to those of another batch, until the end."""
    model, odd = torch.nn.Linear(2, 1), comm.rank == comm.size - 1
    made = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(made, model.named_parameters())

    def program():
        for step in range(3):
            first = odd and step == 0
            model(torch.ones(1, 2)).sum().backward()
            if first and kind.startswith("gradients"):
                optimizer.zero_grad()
            if not (first and kind in ("two backwards", "no step")):
                optimizer.step()
            if not (first and kind == "two backwards"):
                optimizer.zero_grad()

    with pytest.raises(hvd.HorovodInternalError, match="reduction 2 since the last step"):
        program()
