"""A torch model whose parameters lie on parameter servers.

A worker steps with its own optimizer, which keeps its own state. It pushes what the step has added
to each parameter, which the servers add to theirs in the order of arrival, and pulls the sums of
all workers' steps. So any optimizer, scheduler and gradient scaler works. For SGD without momentum
it is the same as pushing gradients (Downpour SGD; Dean et al., NIPS 2012).
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from collectives.arrays.tensors import from_torch
from strategies.core.storage import assign_add
from strategies.core.values import Array
from strategies.foreign.distributed import permit
from strategies.parameter_server.storage import ServedStorage
from strategies.parameter_server.worker import Worker
from strategies.replication.replication import Replication
from strategies.torch.distribution import checked, unknown_parameter


class _Served(NamedTuple):
    """A parameter's memory, and its value on the servers."""

    parameter: Any
    array: Array
    storage: ServedStorage


class _Model(NamedTuple):
    worker: Worker
    served: dict[int, _Served]
    hooks: list[Any]


_models: weakref.WeakKeyDictionary[Any, _Model] = weakref.WeakKeyDictionary()


def distribute(
    strategy: Replication, worker: Worker, model: Any, optimizer: Any, *, counts: bool
) -> None:
    """Put the parameters onto the servers, and install the hooks. The chief's values count.

    `counts`: the servers count each step, and let it wait for the slowest worker. Not collective,
    but all workers call it for the same models in the same order. A second call keeps the
    parameters that are there.
    """
    optimizers = checked(strategy, model, optimizer)
    earlier = _models.pop(model, None)
    known = {} if earlier is None or earlier.worker is not worker else earlier.served
    for hook in [] if earlier is None else earlier.hooks:
        hook.remove()
    served = {
        id(parameter): known.get(id(parameter)) or _serve(worker, name, parameter)
        for name, parameter in model.named_parameters()
    }
    _copy_buffers(worker, model)
    _pull(worker, list(served.values()))
    hooks = [hook for each in optimizers for hook in _install(worker, served, each, counts=counts)]
    _models[model] = _Model(worker, served, hooks)
    permit([*model.modules(), *model.parameters(), *optimizers], strategy)


def _serve(worker: Worker, name: str, parameter: Any) -> _Served:
    array = from_torch(parameter, name)
    return _Served(parameter, array, worker.store(array, f"distribute: {name}"))


def _copy_buffers(worker: Worker, model: Any) -> None:
    """Buffers begin as the chief's, and are each worker's own from then on."""
    buffers = [from_torch(each, name) for name, each in model.named_buffers()]
    if buffers:
        for own, given in zip(buffers, worker.chief_first(lambda: buffers), strict=True):
            own[...] = given


def _pull(worker: Worker, served: list[_Served]) -> None:
    """Replace the parameters by the servers' values."""
    worker.client.pull(
        [
            (shard, part, None)
            for _, array, storage in served
            for shard, part in zip(storage.info.shards, storage.parts_of(array), strict=True)
        ]
    )


def _install(
    worker: Worker, served: dict[int, _Served], optimizer: Any, *, counts: bool
) -> list[Any]:
    """The hooks of an optimizer's steps."""
    before: list[tuple[_Served, Array]] = []

    def before_step(stepping: Any, *_: Any) -> None:
        trained = [each for group in stepping.param_groups for each in group["params"]]
        for parameter in trained:
            if id(parameter) not in served:
                raise unknown_parameter(parameter)
        found = [served[id(each)] for each in trained if each.requires_grad]
        before[:] = [(each, each.array.copy()) for each in found]

    def after_step(*_: Any) -> None:
        for each, old in before:
            # A parameter without a gradient has not changed.
            if each.parameter.grad is not None:
                each.storage.change(assign_add, each.array - old)
        if counts:
            worker.client.end_step()
        _pull(worker, [each for each, _ in before])
        before.clear()

    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
    ]
