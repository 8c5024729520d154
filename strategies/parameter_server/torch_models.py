"""A torch model whose parameters lie on parameter servers.

A worker steps with its own optimizer, which keeps its own state. It pushes what the step has added
to each parameter, which the servers add to theirs in the order of arrival, and pulls the sums of
all workers' steps. So any optimizer, scheduler and gradient scaler works. For SGD without momentum
it is the same as pushing gradients (Downpour SGD; Dean et al., NIPS 2012).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_pre_hook

from collectives import MismatchError
from collectives.arrays.tensors import from_torch
from strategies.core.storage import assign
from strategies.core.values import Array
from strategies.foreign.distributed import permit
from strategies.parameter_server.requests import VariableInfo
from strategies.parameter_server.storage import ServedStorage
from strategies.parameter_server.worker import Worker
from strategies.replication.replication import Replication
from strategies.torch.distribution import checked, refuse_apart, unknown_parameter
from strategies.torch.lifetime import Lifetime
from strategies.torch.steps import parameters_of, step_hooks, stepping


class _Served(NamedTuple):
    """A parameter, and its value on the servers."""

    parameter: Any
    storage: ServedStorage

    def array(self) -> Array:
        """The parameter's memory, which may be another one than before."""
        return from_torch(self.parameter, "parameter")


class _Model:
    """The parameters of a distributed model on one worker."""

    def __init__(
        self, worker: Worker, served: dict[int, _Served], model: Any, optimizers: Sequence[Any]
    ) -> None:
        self.worker, self.served, self.model = worker, served, weakref.ref(model)
        self._lifetime = Lifetime(model, optimizers, self.close)

    def close(self) -> None:
        """Forget the parameters."""
        self._lifetime.close()
        if self in _models:
            _models.remove(self)


class _Hooks(NamedTuple):
    worker: Worker
    handles: list[Any]


_models: list[_Model] = []
_hooks: weakref.WeakKeyDictionary[Any, _Hooks] = weakref.WeakKeyDictionary()
"""The hooks of each optimizer. It may be given with several models: the last one counts."""


def distribute(
    strategy: Replication, worker: Worker, model: Any, optimizer: Any, *, counts: bool
) -> None:
    """Put the parameters onto the servers, and install the hooks. The chief's values count.

    `counts`: the servers count each step, and let it wait for the slowest worker. All workers call
    it for the same models in the same order. A second call makes the chief's present values count.
    """
    optimizers = checked(strategy, model, optimizer)
    refuse_apart(model, weighted=False)
    # A model may share parameters with others.
    known = {number: each for other in _models_of(worker) for number, each in other.served.items()}
    served = _begin_as_chief(worker, model, known)
    _pull(worker, list(served.values()))
    for each in optimizers:
        if each in _hooks:
            for hook in _hooks.pop(each).handles:
                hook.remove()
        _hooks[each] = _Hooks(worker, _install(worker, served, each, counts=counts))
    for earlier in _models_of(worker):
        if earlier.model() is model:
            earlier.close()
    _models.append(_Model(worker, served, model, optimizers))
    worker.settle, worker.restored = partial(_settle, worker), partial(_restored, worker)
    _watch_all_optimizers()
    permit([*model.modules(), *model.parameters(), *optimizers], strategy)


@cache
def _watch_all_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_others)


def _settle(worker: Worker) -> None:
    """Replace the parameters of all models by the servers' values, for a checkpoint."""
    for model in _models_of(worker):
        _pull(worker, list(model.served.values()))


def _restored(worker: Worker, parameters: Iterable[Any]) -> None:
    """Make the chief's values of restored parameters count; the other workers replace theirs."""
    wanted = {id(each) for each in parameters}
    found = {
        number: each
        for model in _models_of(worker)
        for number, each in model.served.items()
        if number in wanted
    }
    if not worker.client.is_chief:
        _pull(worker, list(found.values()))
        return
    for each in found.values():
        each.storage.change(assign, each.array().copy())


def _models_of(worker: Worker) -> list[_Model]:
    return [each for each in list(_models) if each.worker is worker]


def _refuse_others(optimizer: Any, *_: Any) -> None:
    """ValueError for the step of an optimizer that was not given: no other worker would see it."""
    given = _hooks.get(optimizer)
    for model in list(_models):
        if (given is not None and given.worker is model.worker) or model.worker.has_left:
            continue
        if any(id(each) in model.served for each in parameters_of(optimizer)):
            # One that was given may step others.
            if any(each in _hooks for each in stepping() if each is not optimizer):
                return
            raise ValueError(
                f"{type(optimizer).__name__} was not given to distribute with its model, whose"
                " parameters lie on parameter servers: call distribute again, with it"
            )


def _begin_as_chief(worker: Worker, model: Any, known: Mapping[int, _Served]) -> dict[int, _Served]:
    """The served parameters; the chief's values of them, and of the buffers, count.

    Buffers are each worker's own from then on. MismatchError where a worker's model has other
    parameters or buffers, which no later call then finds in place of its own.
    """
    served = {id(each): known[id(each)] for each in model.parameters() if id(each) in known}
    new = {name: each for name, each in model.named_parameters() if id(each) not in known}
    arrays = {name: from_torch(each, name) for name, each in new.items()}
    buffers = {name: from_torch(each, name) for name, each in model.named_buffers()}

    def act() -> tuple[list[VariableInfo], dict[str, Array]]:
        for each in served.values():
            each.storage.change(assign, each.array().copy())
        return [worker.create(array, name) for name, array in arrays.items()], buffers

    what = (
        f"distribute of a model of {len(new)} new parameters, {len(served)} others and"
        f" {len(buffers)} buffers"
    )
    made, values = worker.chief_first(act, what)
    for info, (name, array) in zip(made, arrays.items(), strict=True):
        storage = worker.storage_of(info, array, name)
        served[id(new[name])] = _Served(new[name], storage)
    kinds = [_kinds_of(each) for each in (values, buffers)]
    if kinds[0] != kinds[1]:
        raise MismatchError(f"distribute: the chief's buffers are {kinds[0]}, not {kinds[1]}")
    for name, array in buffers.items():
        array[...] = values[name]
    return served


def _kinds_of(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {each.dtype}{list(each.shape)}" for name, each in arrays.items())


def _pull(worker: Worker, served: list[_Served]) -> None:
    """Replace the parameters by the servers' values."""
    wanted = [pull for each in served for pull in each.storage.pulls_into(each.array())]
    worker.client.pull(wanted)


def _install(
    worker: Worker, served: dict[int, _Served], optimizer: Any, *, counts: bool
) -> list[Any]:
    """The hooks of an optimizer's steps."""
    before: list[tuple[_Served, Array]] = []

    def before_step(optimizer: Any, *_: Any) -> None:
        trained = parameters_of(optimizer)
        for parameter in trained:
            if id(parameter) not in served:
                raise unknown_parameter(parameter)
        # A step changes what has a gradient, though it may be frozen since.
        changed = [each for each in trained if each.requires_grad or each.grad is not None]
        found = [served[id(each)] for each in changed]
        before[:] = [(each, each.array().copy()) for each in found]

    def after_step(*_: Any) -> None:
        for each, old in before:
            each.storage.push_difference(each.array(), old)
        if counts:
            worker.client.end_step()
        _pull(worker, [each for each, _ in before])
        before.clear()

    return step_hooks(optimizer, before_step, after_step)
