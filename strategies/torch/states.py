"""The state of torch modules, optimizers and schedulers as named arrays, without pickle.

Tensors keep their names; everything else in a `state_dict` (numbers, strings, nested lists and
dictionaries) is JSON, stored as the bytes of one array. A module without such things has no JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from collectives.arrays.tensors import from_torch, to_torch
from strategies.core.values import Array
from strategies.foreign.distributed import strategy_of

_JSON = "json"


class TorchState:
    """A torch object with `state_dict` and `load_state_dict`, as a checkpoint saves it."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.strategy = strategy_of(owner) or strategy_of(getattr(owner, "optimizer", None))
        """The strategy that trains it; None if it is unknown."""

    def saved_tensors(self) -> dict[str, Array]:
        """Copies of the tensors by name, and the rest. TypeError for what JSON can't hold."""
        tensors: dict[str, Array] = {}
        rest = _encode(self.owner.state_dict(), "", tensors)
        if not _is_flat(rest):
            tensors[_JSON] = np.frombuffer(json.dumps(rest).encode(), np.uint8)
        return tensors

    def check_tensors(self, tensors: Mapping[str, Array]) -> None:
        """ValueError, with a line for each tensor that doesn't fit."""
        problems = []
        if isinstance(self.owner, torch.optim.Optimizer):
            problems = self._problems_of_optimizer(tensors)
        elif isinstance(self.owner, torch.nn.Module):
            own = self.saved_tensors()
            wanted = {name: own[name] for name in own if name != _JSON}
            for name in sorted((wanted.keys() | tensors.keys()) - {_JSON}):
                kinds = [_kind(each.get(name)) for each in (tensors, wanted)]
                if kinds[0] != kinds[1]:
                    problems.append(f"{name}: {kinds[0]}, wanted {kinds[1]}")
        elif _JSON not in tensors:
            problems = [f"{_JSON}: is missing"]
        if problems:
            raise ValueError("; ".join(problems))

    def _problems_of_optimizer(self, tensors: Mapping[str, Array]) -> list[str]:
        if _JSON not in tensors:
            return [f"{_JSON}: is missing"]
        saved = _decode(json.loads(tensors[_JSON].tobytes()), tensors)
        sizes = [
            [len(group["params"]) for group in groups]
            for groups in (saved["param_groups"], self.owner.param_groups)
        ]
        if sizes[0] != sizes[1]:
            return [f"groups of {sizes[0]} parameters, wanted {sizes[1]}"]
        parameters = [each for group in self.owner.param_groups for each in group["params"]]
        problems = []
        for number, values in saved["state"].items():
            parameter = parameters[number]
            for name, value in values.items():
                present = self.owner.state.get(parameter, {}).get(name, parameter)
                if not isinstance(value, torch.Tensor) or value.dim() != present.dim():
                    continue
                if value.shape != present.shape:
                    shapes = tuple(value.shape), tuple(present.shape)
                    problems.append(f"state/{number}/{name}: {shapes[0]}, wanted {shapes[1]}")
        return problems

    def restore_tensors(self, tensors: Mapping[str, Array]) -> None:
        """Load them; a module's parameters stay in their memory."""
        if _JSON in tensors:
            state = _decode(json.loads(tensors[_JSON].tobytes()), tensors)
        else:
            state = {name: _tensor(array) for name, array in tensors.items()}
        self.owner.load_state_dict(state)
        if self.strategy is not None:
            self.strategy.restored(self.owner)


def _encode(value: Any, path: str, tensors: dict[str, Array]) -> Any:
    """The value as JSON; tensors are put aside by path."""

    def inside(key: Any, each: Any) -> Any:
        return _encode(each, f"{path}/{key}" if path else str(key), tensors)

    if isinstance(value, torch.Tensor):
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
