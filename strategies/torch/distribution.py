"""`Strategy.distribute`: a torch model that all ranks train in step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal
from zlib import crc32

import torch

from collectives import Communicator
from collectives.torch.closures import over_ranks, then_reduced
from collectives.torch.gradients import GradientReducer
from collectives.torch.parameters import replaced, settings_of
from collectives.transports.local import alone
from strategies.core.same_error import PropagatedErrors, refuse_differences
from strategies.foreign.distributed import permit
from strategies.foreign.registry import framework_of
from strategies.replication.replication import Replication
from strategies.torch.lifetime import Lifetime
from strategies.torch.mirroring import mirror_model, mirror_optimizers
from strategies.torch.other_optimizers import OtherOptimizers
from strategies.torch.steps import closure_of, parameters_of, step_hooks

# Positions of an optimizer's parameters are shown, if the text has so many characters.
_SHOWN = 60

_WRAPPERS = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DataParallel",
)


class _Training:
    """What trains one model.

    A parameter's hook refers to the reducer, and that to the parameter, which no garbage collection
    sees: their memory would stay.
    """

    def __init__(
        self,
        strategy: Replication,
        model: Any,
        optimizers: Sequence[Any],
        reducer: GradientReducer,
        hooks: list[Any],
    ) -> None:
        self.strategy, self.model, self.reducer = strategy, weakref.ref(model), reducer
        self._hooks, self._lifetime = hooks, Lifetime(model, optimizers, self.close)

    def close(self) -> None:
        """Reduce no more."""
        self._lifetime.close()
        if self in _trainings:
            _trainings.remove(self)
        self.reducer.close()
        for hook in self._hooks:
            hook.remove()


_trainings: list[_Training] = []
_other_optimizers = OtherOptimizers(
    lambda: [
        (model, each.reducer)
        for each in list(_trainings)
        if each.strategy.num_replicas_in_sync > 1 and (model := each.model()) is not None
    ]
)


def distribute(
    strategy: Replication,
    model: Any,
    optimizer: Any,
    *,
    unused: Literal["error", "zeros"],
    weighted: bool,
    wire_dtype: Any,
) -> None:
    """Make the ranks' parameters, buffers and optimizers equal, and install the hooks. Collective.

    It replaces earlier calls with this model, and with models that share a trained parameter.
    """
    together = strategy.num_replicas_in_sync > 1
    communicator = strategy.communicator if together else Communicator(alone())
    with PropagatedErrors(strategy.communicator, "distribute"):
        optimizers = checked(strategy, model, optimizer)
        if together:
            refuse_apart(model, weighted=weighted)
        description = _description(model, optimizers)
    earlier = _earlier(model)
    with replaced([each.reducer for each in earlier]):
        with PropagatedErrors(strategy.communicator, "distribute"):
            reducer = GradientReducer(
                communicator,
                model.named_parameters(),
                unused=unused,
                weighted=weighted,
                wire_dtype=wire_dtype,
                sparse=_sparse_parameters(model),
                compressed=strategy.compressed if together else None,
            )
        if not strategy.trains_alone:
            try:
                _mirror(strategy, model, optimizers, description)
            except BaseException:
                # The next call would find the parameters taken.
                reducer.close()
                raise
    for each in earlier:
        each.close()
    reducer.renewal = "call distribute again"
    before_step = _before_step(reducer, first_counts=unused == "zeros")
    hooks = [hook for each in optimizers for hook in step_hooks(each, before_step)]
    if together:
        _other_optimizers.note(optimizers)
    _trainings.append(_Training(strategy, model, optimizers, reducer, hooks))
    permit([*model.modules(), *model.parameters(), *optimizers], strategy)


def _mirror(strategy: Replication, model: Any, optimizers: Sequence[Any], description: str) -> None:
    """Give all ranks the chief's values; optimizers that step together must be described alike."""
    together = strategy.num_replicas_in_sync > 1
    if together:
        refuse_differences(
            strategy.communicator,
            "distribute: the ranks' optimizers differ",
            description,
            call="distribute, a call for every rank",
        )
    mirror_model(strategy, model)
    if together:
        mirror_optimizers(strategy.communicator, optimizers)


def _before_step(reducer: GradientReducer, *, first_counts: bool) -> Callable[..., Any]:
    """The hook before an optimizer's step: it waits for the gradients, or a closure does."""

    def before_step(stepping: Any, arguments: Any, named: Any) -> Any:
        parameters = parameters_of(stepping)
        if not reducer.has_all(parameters):
            raise unknown_parameter(
                next(each for each in parameters if not reducer.has_all([each]))
            )
        closure = closure_of(arguments, named)
        # Backward runs in a closure later.
        reducer.before_step(None if closure else stepping)
        if closure is None:
            return None
        reduced = then_reduced(closure, reducer.before_step, stepping, first_counts=first_counts)
        folded = over_ranks(reduced, reducer.fold_number)
        options = {key: folded if each is closure else each for key, each in named.items()}
        return tuple(folded if each is closure else each for each in arguments), options

    return before_step


def _description(model: Any, optimizers: Sequence[Any]) -> str:
    """Classes, settings and parameters, which decide on a step of equal gradients.

    The text is the same if they are.
    """
    positions = {id(each): position for position, each in enumerate(model.parameters())}
    texts = []
    for optimizer in optimizers:
        trained = [
            [positions[id(each)] for each in group["params"]] for group in optimizer.param_groups
        ]
        members = str(trained)
        if len(members) > _SHOWN:
            members = f"{crc32(members.encode()):08x}"
        texts.append(f"{settings_of(optimizer)} of parameters {members}")
    return ", ".join(texts)


def refuse_apart(model: Any, *, weighted: bool) -> None:
    """ValueError for layers with which the ranks would train apart, or not as one process does."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and hasattr(module, "embedding_dim"):
            raise ValueError(
                f"distribute: {name or type(module).__name__} has max_norm={module.max_norm}, by"
                " which forward changes the rows that this rank looks up: must be None"
            )
        if weighted and "SyncBatchNorm" in type(module).__name__:
            raise ValueError(
                f"distribute: weighted=True, and {name or 'the model'} is a"
                f" {type(module).__name__}, of which gradients pass between ranks before they are"
                " weighted: leave weighted out, and multiply each loss by this rank's rows, divided"
                " by their mean over the ranks"
            )


def _earlier(model: Any) -> list[_Training]:
    """What trains the model, or shares a trained parameter with it."""
    trained = [each for each in model.parameters() if each.requires_grad]
    every = list(_trainings)
    return [each for each in every if each.model() is model or each.reducer.reduces(trained)]


def gradients_of(strategy: Replication, model: Any) -> GradientReducer:
    """The reducer of a distributed model. ValueError for any other object."""
    found = (each for each in list(_trainings) if each.model() is model)
    training = None if model is None else next(found, None)
    if training is None or training.strategy is not strategy:
        raise ValueError(
            f"{type(model).__name__}: must be a model that was given to distribute of {strategy}"
        )
    return training.reducer


def checked(strategy: Replication, model: Any, optimizer: Any) -> Sequence[Any]:
    """The optimizers; TypeError or ValueError for this rank's arguments."""
    optimizers = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    framework = framework_of(model)
    if framework is None or framework.name != "torch" or not isinstance(model, torch.nn.Module):
        raise TypeError(f"distribute: model is a {type(model).__name__}: must be a torch module")
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            kind = type(each).__name__
            raise TypeError(f"distribute: optimizer is a {kind}: must be a torch optimizer")
    kinds = {kind.__name__ for kind in type(model).__mro__}
    wrapper = next((name for name in _WRAPPERS if name in kinds), None)
    if wrapper is not None:
        raise TypeError(
            f"distribute: model is a {wrapper}, which reduces gradients itself: give the module"
            " that it wraps, or train without distribute"
        )
    if not strategy.reduces_plainly and not strategy.compresses:
        raise ValueError(
            "distribute: gradients of torch are reduced as collectives chooses: the strategy must"
            " have no cross_device_ops, no all_reduce_arrays of its own, and no communication"
            " options without a compression"
        )
    devices = {each.device.type for each in model.parameters()} - {"cpu"}
    if strategy.compresses and devices:
        raise TypeError(
            f"distribute: the model has parameters on {', '.join(sorted(devices))}: gradients are"
            " compressed on the CPU"
        )
    known = {id(each) for each in model.parameters()}
    for each in optimizers:
        for parameter in parameters_of(each):
            if id(parameter) not in known:
                raise unknown_parameter(parameter)
    return optimizers


def unknown_parameter(parameter: Any) -> ValueError:
    """The error for an optimizer's parameter that the model does not have."""
    return ValueError(
        f"the optimizer has a parameter of shape {tuple(parameter.shape)} that the model did not"
        " have in distribute: give the optimizer of this model, and call distribute once the model"
        " is complete, or again"
    )


def _sparse_parameters(model: Any) -> list[str]:
    """The names of parameters whose gradients are sparse."""
    embeddings = torch.nn.Embedding, torch.nn.EmbeddingBag
    return [
        f"{name}.weight".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, embeddings) and module.sparse and module.weight.requires_grad
    ]
