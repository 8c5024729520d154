"""Modules of torch whose parameters the replicas average, in the memory where torch keeps them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from collectives.arrays.tensors import from_torch
from strategies.core.values import Array
from strategies.synchronous.local_sgd.averaging import Averaging, ReplicaStorage
from strategies.torch.lifetime import Lifetime
from strategies.torch.steps import step_hooks

log = logging.getLogger("strategies")

_Member = tuple[str, Any, ReplicaStorage]


class AveragedModules:
    """The modules of one strategy."""

    def __init__(self, averaging: Averaging, end_step: Callable[[], None]) -> None:
        """`end_step` is called after each step."""
        self._averaging, self.end_step = averaging, end_step
        self._known: list[_Module] = []
        self._warned = False

    def add(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Average the parameters that require gradients, now or in a later step.

        A call replaces earlier ones of the model, and of those that share a parameter with it. The
        parameters that stay in their memory keep their outer momentum. Others of the model that
        have come in their place get their numbers in a checkpoint of it.
        """
        parameters = {id(each) for each in model.parameters() if each.requires_grad}
        earlier: list[_Member] = []
        replaced = [
            known for known in self._known if known.model() is model or known.has_any(parameters)
        ]
        for known in replaced:
            earlier += known.members("" if known.model() is model else f"{id(known)}/")
        kept = {id(parameter): value for _, parameter, value in earlier}
        module = _Module(model, optimizers, self, kept)
        # Only where nothing is refused.
        for known in replaced:
            self.forget(known)
        self._known.append(module)
        before, now = {id(value) for _, _, value in earlier}, set(map(id, module.values))
        added = [each for each in module.members() if id(each[2]) not in before]
        self._replace([each for each in earlier if id(each[2]) not in now], added)
        for _, _, value in added:
            self._averaging.add(value)

    def forget(self, module: _Module) -> None:
        """Neither average the module's parameters nor follow its optimizers any more."""
        if module in self._known:
            self._known.remove(module)
        module.release()

    def _replace(self, earlier: list[_Member], added: list[_Member]) -> None:
        """Earlier values pass their numbers on, to those of the same parameters or names."""
        by_name = {name: value for name, _, value in added}
        moved = {id(parameter): value for _, parameter, value in added}
        used = set()
        for name, parameter, value in earlier:
            new = moved.get(id(parameter), by_name.get(name))
            self._averaging.replace(value, None if new in used else new)
            used.add(new)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._known)

    def settle(self, parameters: Iterable[Any]) -> None:
        """The replicas have set these parameters, of one or several modules, to equal values."""
        restored = {id(each) for each in parameters}
        for module in list(self._known):
            module.settle(restored)

    def begin_step(self, module: _Module) -> None:
        """Before a step of one of the module's optimizers."""
        module.check_memory()
        self._averaging.begin_step(module.trained())

    def begin_averaging(self) -> None:
        """Log, once, a parameter that something else than a step of these optimizers changed.

        RuntimeError where a model has another parameter in place of one. Outer slots are numbered
        by the models' parameters, whichever are trained first.
        """
        known = list(self._known)
        for module in known:
            module.check_replaced()
            self._averaging.number(module.values)
        for module in known if not self._warned else ():
            if names := module.changed_by_others():
                self._warned = True
                log.warning(
                    "LocalSGDStrategy: %s was changed, but not by a step of an optimizer that was"
                    " given to distribute, and is not averaged: give another optimizer to"
                    " distribute, too, unless every rank has set the same value",
                    names[0],
                )

    def end_averaging(self) -> None:
        """After an averaging."""
        for module in list(self._known):
            module.note_versions()


class _Module:
    """One module's parameters as values to average, and the hooks of its optimizers."""

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        modules: AveragedModules,
        kept: Mapping[int, ReplicaStorage],
    ) -> None:
        """`kept`: the values of earlier modules, by the identities of their parameters."""
        self.model = weakref.ref(model)
        """The model may be a container that the program drops: the parameters are trained on."""
        self._parameters = [
            (name, each) for name, each in model.named_parameters() if _may_be_trained(each)
        ]
        self._at_first = [each.requires_grad for _, each in self._parameters]
        self.values = [
            _value_of(from_torch(each, name), kept.get(id(each))) for name, each in self._parameters
        ]
        self._addresses = [each.data_ptr() for _, each in self._parameters]
        self.note_versions()
        self._hooks = []
        for optimizer in optimizers:
            self._hooks += step_hooks(
                optimizer, lambda *_: modules.begin_step(self), lambda *_: modules.end_step()
            )
        self._lifetime = Lifetime(model, optimizers, lambda: modules.forget(self))

    def note_versions(self) -> None:
        """Note how often torch has changed each parameter."""
        self._versions = [each._version for _, each in self._parameters]

    def trained(self) -> list[ReplicaStorage]:
        """The values of parameters that require gradients, or did: momentum may move them."""
        every = zip(self._parameters, self.values, self._at_first, strict=True)
        return [value for (_, each), value, first in every if first or each.requires_grad]

    def changed_by_others(self) -> list[str]:
        """The names of parameters with gradients that were changed outside of steps."""
        every = zip(self._parameters, self.values, self._versions, strict=True)
        return [
            name
            for (name, each), value, version in every
            if each.grad is not None and not value.touched and each._version != version
        ]

    def check_memory(self) -> None:
        """RuntimeError where a parameter was moved, as by `model.double()`."""
        for (name, each), address in zip(self._parameters, self._addresses, strict=True):
            if each.requires_grad and each.data_ptr() != address:
                raise RuntimeError(
                    f"{name} has other memory than in distribute: call distribute again"
                )

    def check_replaced(self) -> None:
        """RuntimeError where the model has another parameter of a name, as after an assignment.

        Of a container that the program has dropped, this can't be known.
        """
        model = self.model()
        now = {} if model is None else dict(model.named_parameters())
        for name, each in self._parameters:
            if now.get(name, each) is not each:
                raise RuntimeError(f"{name} was replaced since distribute: call distribute again")

    def has_any(self, parameters: Set[int]) -> bool:
        """Whether any parameter that is trained has one of these identities."""
        trained = [each for _, each in self._parameters if each.requires_grad]
        return any(id(each) in parameters for each in trained)

    def settle(self, restored: Set[int]) -> None:
        """The replicas agree on the parameters with these identities."""
        for number, (_, each) in enumerate(self._parameters):
            if id(each) in restored:
                self.values[number].settle()
                self._versions[number] = each._version

    def members(self, prefix: str = "") -> list[_Member]:
        """Each parameter's name behind the prefix, the parameter, and its value."""
        every = zip(self._parameters, self.values, strict=True)
        return [(prefix + name, each, value) for (name, each), value in every]

    def release(self) -> None:
        """Remove the hooks."""
        self._lifetime.close()
        for hook in self._hooks:
            hook.remove()


def _value_of(array: Array, kept: ReplicaStorage | None) -> ReplicaStorage:
    """The value in the parameter's memory: the one that was kept, if it has not moved.

    The replicas agree on it.
    """
    if kept is None or kept.view().__array_interface__ != array.__array_interface__:
        return ReplicaStorage(array)
    kept.settle()
    return kept


def _may_be_trained(parameter: Any) -> bool:
    """Whether it requires gradients, or may do so later."""
    if parameter.requires_grad:
        return True
    numbers = parameter.is_floating_point() or parameter.is_complex()
    return bool(numbers and parameter.device.type == "cpu" and not parameter.is_inference())
