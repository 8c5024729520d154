"""An optimizer whose gradients are reduced over the ranks during backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

from torch.optim import SparseAdam

from collectives.horovod.process_sets import ProcessSet, ranks
from collectives.reductions.reduction import ReduceOp, as_op
from collectives.torch.closures import over_ranks
from collectives.torch.horovod.compression import Compression, Compressor
from collectives.torch.horovod.joined_reducer import JoinedReducer
from collectives.torch.parameters import open_reducers, replaced, settings_of


class _Distributed:
    """What is added to the optimizer's own class."""

    _gradients: JoinedReducer
    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    _synchronizes, _synchronized = True, False

    def synchronize(self) -> None:
        """Reduce gradients that no backward has reduced. The others are reduced by backward.

        Without a backward since the last step, this rank takes part with the gradients it has.
        """
        if self._gradients.closed:
            raise RuntimeError("another DistributedOptimizer has replaced this one: use that")
        for group in self.param_groups:
            if not self._gradients.has_all(group["params"]):
                raise ValueError(
                    "the optimizer has parameters that it did not have in DistributedOptimizer:"
                    f" {self._gradients.renewal}, of the optimizer with all its parameters"
                )
        self._gradients.wait(None if self._synchronized else self)
        self._synchronized = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients, also of a step that a gradient scaler skipped."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the optimizer's class
        self._gradients.zeroed()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not synchronize, because `synchronize` was called."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backwards one reduction takes."""
        self._gradients.passes = _checked_passes(passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the groups and the state that the original optimizer shares.

        A scheduler that was made of the original one changes those groups.
        """
        groups, state = self.param_groups, self.state
        super().load_state_dict(state_dict)  # type: ignore[misc]  # of the optimizer's class
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        state.clear()
        state.update(self.state)
        self.param_groups, self.state = groups, state

    def step(self, closure: Any = None) -> Any:
        """Synchronize, and take a step of the optimizer."""
        if closure is None:
            if self._synchronizes:
                self.synchronize()
            self._synchronized = False
            self._gradients.stepped()
            return super().step()  # type: ignore[misc]  # of the optimizer's class

        def reduced() -> Any:
            self._synchronized = False
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        loss = over_ranks(reduced, self._gradients.fold_number)
        try:
            return super().step(loss)  # type: ignore[misc]  # of the optimizer's class
        finally:
            self._gradients.stepped()

    # The optimizer's own step runs its hooks, and would run them twice if torch wrapped this one.
    step.hooked = True  # type: ignore[attr-defined]  # torch reads it


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Compressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = ReduceOp.MEAN,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """An optimizer that steps by the ranks' gradients, reduced by `loss.backward()`. Collective.

    It is of a class derived from the optimizer's, and shares its parameters, options and state.
    Where `backward` returns, every `grad` holds the result, so that clipping needs no
    `synchronize()`, which does no harm. A parameter that has no gradient on a rank counts as zero
    there. The loss of a closure is reduced as its gradients are. Every reduction begins with a
    barrier, for ranks that have joined. A second one of the same parameters replaces the first.

    Args:
        optimizer: a torch.optim.Optimizer. Its parameters must be the same on every rank.
        named_parameters: `model.named_parameters()`, for the names in errors.
        compression: the dtype of the messages.
        backward_passes_per_step: how many backwards are accumulated, not averaged, before a
            reduction. A step before the last one reduces what there is.
        op: Average or Sum.
        gradient_predivide_factor: without effect: gradients are divided before they are added in a
            narrower dtype, and otherwise once.
        num_groups: without effect: buckets have the order of the parameters.
        groups: without effect, too.
        sparse_as_dense: without effect. Sparse gradients become dense, as they do in Horovod
            meanwhile; those of SparseAdam stay sparse.
        process_set: the ranks that train together, all by default. Its ranks can't join. A rank
            that is not in it trains alone.

    Raises:
        ValueError: another op; `gradient_predivide_factor` with Sum; names that are missing or
            occur twice; on every rank, parameters that differ between ranks. The first backward
            raises a MismatchError where the optimizers' classes or settings differ.

    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("optimizer is a DistributedOptimizer: must be the one that it was made of")
    op = as_op(op)
    if op not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise ValueError(f"op={op.value}: must be Average or Sum")
    if gradient_predivide_factor != 1.0 and op is not ReduceOp.MEAN:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not isinstance(compression, Compressor):
        raise TypeError(f"compression={compression!r}: must be Compression.none, .fp16 or .bf16")
    named, passes = _named(optimizer, named_parameters), _checked_passes(backward_passes_per_step)
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    # A scheduler that was made before replaced the `step` of its optimizer.
    own = ("step", "_distributed")
    made.__dict__.update((key, each) for key, each in vars(optimizer).items() if key not in own)
    parameters = [each for _, each in named]
    every = [each for each in list(open_reducers) if isinstance(each, JoinedReducer)]
    with replaced([each for each in every if each.reduces(parameters)]):
        made._gradients = JoinedReducer(
            ranks() if process_set is None else process_set.trainers(),
            named,
            passes,
            op="mean" if op is ReduceOp.MEAN else "sum",
            wire_dtype=compression.wire_dtype,
            sparse=[name for name, _ in named] if isinstance(optimizer, SparseAdam) else (),
        )
    kept = ref(made)
    made._gradients.compared = lambda: settings_of(kept())
    # A parameter's hook keeps the reducer, and that the parameter, which no garbage collection
    # sees. A program may step the original optimizer alone.
    optimizer._distributed = made
    finalize(made, made._gradients.close).atexit = False
    return made


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: must be 1 or more")
    return passes


def _named(optimizer: Any, given: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
    """The optimizer's parameters, with their names."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    if given is None:
        return [(f"parameter {number}", each) for number, each in enumerate(parameters)]
    pairs = list(given)
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"named_parameters has several parameters named {', '.join(twice)}")
    names = {id(parameter): name for name, parameter in pairs}
    missing = sum(id(each) not in names for each in parameters)
    if missing:
        raise ValueError(f"named_parameters lacks {missing} of the optimizer's parameters")
    return [(names[id(each)], each) for each in parameters]
