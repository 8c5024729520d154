"""The state of torch modules, optimizers and schedulers as named arrays, without pickle.

Tensors keep their names; everything else in a `state_dict` (numbers, strings, nested lists and
dictionaries) is JSON, stored as the bytes of one array. A module without such things has no JSON.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from collectives.arrays.tensors import from_torch, to_torch
from collectives.torch.parameters import is_reduced
from strategies.core.values import Array
from strategies.foreign.distributed import strategy_of
from strategies.foreign.registry import framework_of
from strategies.torch.mirroring import laid_out_as
from strategies.torch.steps import parameters_of

_JSON = "json"
_OPTIMIZER = "optimizer"
_SCHEDULER = "scheduler"
# No tensor has this name: that of a module isn't empty.
_VERSIONS = ".versions"


class TorchState:
    """A torch object with `state_dict` and `load_state_dict`, as a checkpoint saves it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        # A module that contains distributed ones was not given to distribute itself.
        reached = [owner, getattr(owner, "optimizer", None), *self._parameters()]
        self.strategy = next(filter(None, map(strategy_of, reached)), None)
        """The strategy that trains it; None if it is unknown."""

    @property
    def trained_apart(self) -> bool:
        """Whether each rank trains it by itself, as far as can be known."""
        framework = framework_of(self.owner)
        if self.strategy is not None or framework is None or not framework.trains(self.owner):
            return False
        trained = self._parameters()
        if isinstance(self.owner, torch.optim.Optimizer):
            trained = parameters_of(self.owner)
        if is_reduced(trained) or any(strategy_of(each) is not None for each in trained):
            return False
        # A process group may train it: not every parameter of DDP and FSDP can be recognized.
        return not (torch.distributed.is_available() and torch.distributed.is_initialized())

    def saved_tensors(self) -> dict[str, Array]:
        """Copies of the tensors by name, and the rest.

        TypeError for what JSON can't hold; ValueError for two tensors of one name, and for a lazy
        one.
        """
        tensors: dict[str, Array] = {}
        state = {**self.owner.state_dict(), **_added(self.owner)}
        rest = _encode(state, "", tensors)
        if not (isinstance(self.owner, torch.nn.Module) and _is_flat(rest)):
            tensors[_JSON] = np.frombuffer(json.dumps(rest).encode(), np.uint8)
        return tensors

    def check_tensors(self, tensors: Mapping[str, Array]) -> None:
        """ValueError, with a line for each tensor that doesn't fit."""
        problems = []
        if isinstance(self.owner, torch.nn.Module):
            own = self.saved_tensors()
            wanted = {name: own[name] for name in own if name != _JSON}
            for name in sorted((wanted.keys() | tensors.keys()) - {_JSON}):
                kinds = [_kind(each.get(name)) for each in (tensors, wanted)]
                if kinds[0] != kinds[1]:
                    problems.append(f"{name}: {kinds[0]}, wanted {kinds[1]}")
            if _JSON in tensors.keys() | own.keys():
                # As of `set_extra_state`.
                given = wanted.keys() | {_VERSIONS}
                names = [_state(each).keys() - given for each in (tensors, own)]
                kinds = [
                    ", ".join(sorted(each)) or "no state that isn't a tensor" for each in names
                ]
                if kinds[0] != kinds[1] and not problems:
                    problems = [f"{kinds[0]}, wanted {kinds[1]}"]
        elif _JSON not in tensors:
            problems = [f"{_JSON}: is missing"]
        elif isinstance(self.owner, torch.optim.Optimizer):
            problems = self._problems_of_optimizer(_state(tensors))
        elif not _state(tensors) and self.owner.state_dict():
            # As of a disabled GradScaler.
            problems = [f"has no state, wanted that of a {type(self.owner).__name__}"]
        else:
            problems = self._problems_of_others(_state(tensors))
        if problems:
            raise ValueError("; ".join(problems))

    def _problems_of_optimizer(self, saved: dict[str, Any]) -> list[str]:
        if _OPTIMIZER not in saved:
            return [f"{_OPTIMIZER}: is missing"]
        was, own = saved[_OPTIMIZER], _description(self.owner)
        # Classes with the same settings can share state; releases of torch add settings to a class.
        if was["class"] != own["class"] and was["settings"] != own["settings"]:
            kinds = [f"{each['class']} ({', '.join(each['settings'])})" for each in (was, own)]
            return [f"is the state of {kinds[0]}, wanted {kinds[1]}"]
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (saved["param_groups"], self.owner.param_groups)
        ]
        if sizes[0] != sizes[1]:
            return [f"groups of {sizes[0]} parameters, wanted {sizes[1]}"]
        wanted = [tuple(each.shape) for each in parameters_of(self.owner)]
        return [
            f"state of parameter {number} of shape {shape}, wanted {wanted[number]}"
            for number, shape in was["shapes"].items()
            if shape != wanted[number]
        ]

    def _problems_of_others(self, saved: dict[str, Any]) -> list[str]:
        own = _added(self.owner).get(_SCHEDULER)
        was = saved.pop(_SCHEDULER, own)
        # Classes with the same state can share it; releases of torch change that of a class.
        if was == own or saved.keys() == self.owner.state_dict().keys():
            return []
        return [f"is the state of a {was}, wanted that of a {type(self.owner).__name__}"]

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Load them; a module's parameters stay in their memory."""
        state = _state(tensors)
        if isinstance(self.owner, torch.nn.Module):
            state = _with_versions(self.owner, state)
        else:
            for name in _added(self.owner):
                state.pop(name, None)
        # An enabled GradScaler refuses an empty state, which is that of a disabled one.
        if state or isinstance(self.owner, torch.nn.Module):
            self.owner.load_state_dict(state)
        if isinstance(self.owner, torch.optim.Optimizer):
            # A state may also have keys that are no parameters.
            for parameter in parameters_of(self.owner):
                if parameter in self.owner.state:
                    own = self.owner.state[parameter]
                    self.owner.state[parameter] = laid_out_as(parameter, own)
        if self.strategy is not None:
            self.strategy.restored(self._parameters())

    def _parameters(self) -> list[Any]:
        """Those of a module; an optimizer's state has no values of its parameters."""
        return list(self.owner.parameters()) if isinstance(self.owner, torch.nn.Module) else []


def _added(owner: Any) -> dict[str, Any]:
    """What a checkpoint has beside the `state_dict`."""
    if isinstance(owner, torch.optim.Optimizer):
        return {_OPTIMIZER: _description(owner)}
    if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
        return {_SCHEDULER: type(owner).__name__}
    if isinstance(owner, torch.nn.Module):
        versions = {path: each._version for path, each in _modules(owner) if each._version != 1}
        return {_VERSIONS: versions} if versions else {}
    return {}


def _modules(owner: Any) -> Iterator[tuple[str, Any]]:
    found: Iterator[tuple[str, Any]] = owner.named_modules(remove_duplicate=False)
    return found


def _with_versions(owner: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state as a module's own: each part says by which version of its class it was written."""
    versions = state.pop(_VERSIONS, {})
    own = OrderedDict(state)
    own._metadata = {  # type: ignore[attr-defined]  # torch's attribute
        path: {"version": versions.get(path, 1)} for path, _ in _modules(owner)
    }
    return own


def _description(optimizer: Any) -> dict[str, Any]:
    """What a state must fit: the settings' names, and the shapes of parameters that have state."""
    shapes = {
        number: tuple(each.shape)
        for number, each in enumerate(parameters_of(optimizer))
        if each in optimizer.state
    }
    settings = sorted(optimizer.defaults)
    return {"class": type(optimizer).__name__, "settings": settings, "shapes": shapes}


def _state(tensors: Mapping[str, Array]) -> dict[str, Any]:
    if _JSON not in tensors:
        return {name: _tensor(array) for name, array in tensors.items()}
    state: dict[str, Any] = _decode(json.loads(tensors[_JSON].tobytes()), tensors)
    return state


def _encode(value: Any, path: str, tensors: dict[str, Array]) -> Any:
    """The value as JSON; tensors are put aside by path."""

    def inside(key: Any, each: Any) -> Any:
        return _encode(each, f"{path}/{key}" if path else str(key), tensors)

    if isinstance(value, torch.Tensor):
        if path in tensors or path == _JSON:
            raise ValueError(f"{path}: is the name of two entries: must be of one in a checkpoint")
        if torch.nn.parameter.is_lazy(value):
            raise ValueError(f"{path}: is lazy: run the model once before a checkpoint")
        tensors[path] = from_torch(value.detach().cpu(), path).copy()
        return {"tensor": path}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[inside("key", key), inside(key, each)] for key, each in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [inside(key, each) for key, each in enumerate(value)]}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{path} is a {type(value).__name__}: a checkpoint holds tensors, numbers, strings, lists"
        " and dictionaries"
    )


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "counter": lambda pairs: Counter(dict(pairs)),
    "list": list,
    "tuple": tuple,
}


def _decode(value: Any, tensors: Mapping[str, Array]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return _tensor(tensors[content])
    if kind in ("dict", "counter"):
        content = [[_decode(part, tensors) for part in pair] for pair in content]
    else:
        content = [_decode(each, tensors) for each in content]
    return _CONTAINERS[kind](content)


def _tensor(array: Array) -> Any:
    return to_torch(array.copy())


def _is_flat(rest: Any) -> bool:
    """Whether the names of the tensors say everything."""
    pairs = rest.get("dict", [[None, None]])
    return all(isinstance(each, dict) and each.get("tensor") == key for key, each in pairs)


def _kind(array: Array | None) -> str:
    return "nothing" if array is None else f"{array.dtype} of shape {array.shape}"
