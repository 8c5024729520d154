"""Parameters whose gradients are reduced: which are taken, and what must be equal on all ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any
from zlib import crc32

import numpy as np
import torch

from collectives.communicator import Communicator
from collectives.consistency.uncaught import raised_on_all
from collectives.torch.buckets import Member

_SHOWN = 5


def distinct(named_parameters: Iterable[tuple[str, Any]]) -> list[Member]:
    """Each parameter once. TypeError for one whose elements have no memory yet."""
    found: dict[int, Member] = {}
    for name, parameter in named_parameters:
        if torch.nn.parameter.is_lazy(parameter) or parameter.is_meta:
            raise TypeError(
                f"{name} has no elements yet, as it is lazy or on the meta device: initialize the"
                " model first"
            )
        found.setdefault(id(parameter), Member(name, parameter))
    return list(found.values())


def check_options(
    op: str, unused: str, weighted: bool, wire_dtype: Any, compression: str | None
) -> None:
    """ValueError for options of a reducer that don't exist, or not together."""
    if op not in ("mean", "sum") or unused not in ("error", "zeros"):
        raise ValueError(
            f"op={op!r}, unused={unused!r}: must be 'mean' or 'sum', and 'error' or 'zeros'"
        )
    if weighted and op != "mean":
        raise ValueError(f"op={op!r}: only a mean is weighted")
    if wire_dtype is not None and not isinstance(wire_dtype, torch.dtype):
        raise TypeError(f"wire_dtype={wire_dtype!r}: must be a torch.dtype, or None")
    if wire_dtype not in (None, torch.float16, torch.bfloat16):
        raise ValueError(f"wire_dtype={wire_dtype}: must be torch.float16, torch.bfloat16 or None")
    if compression is not None and wire_dtype is not None:
        raise ValueError(f"wire_dtype={wire_dtype}, compression={compression!r}: only one of them")


def describe(member: Member) -> str:
    """What must be equal on all ranks."""
    parameter = member.parameter
    strides = torch.empty_like(parameter, device="meta").stride()
    return f"{member.name}: {parameter.dtype} {tuple(parameter.shape)}, strides {strides}"


# Numbers that schedulers keep in groups, which decide on no step.
_OF_SCHEDULES = frozenset(
    ["initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"]
)


def settings_of(optimizer: Any) -> str:
    """An optimizer's class and settings, which decide on a step, also on its rounding."""
    groups = [_settings(group, optimizer.defaults) for group in optimizer.param_groups]
    more = f", {len(groups)} groups, {crc32(repr(groups).encode()):08x}" * (len(groups) > 1)
    return f"{type(optimizer).__name__}({groups[0]}{more})"


def _settings(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group, and further numbers such as a layer's scale of the rate."""
    settings = {name: _plain(group.get(name)) for name in defaults}
    for name in group.keys() - defaults.keys() - _OF_SCHEDULES - {"params"}:
        if isinstance(number := _plain(group[name]), float):
            settings[name] = number
    return dict(sorted(settings.items()))


def _plain(setting: Any) -> Any:
    """A setting as Python's own numbers, whatever it is kept in."""
    if isinstance(setting, torch.Tensor | np.generic) and math.prod(setting.shape) == 1:
        setting = setting.item()
    if isinstance(setting, tuple | list):
        return tuple(map(_plain, setting))
    if setting is None or isinstance(setting, bool | str):
        return setting
    return float(setting) if isinstance(setting, Real) else type(setting).__name__


def refuse_differences(comm: Communicator, described: Sequence[str]) -> None:
    """ValueError on every rank where the ranks' texts differ. Collective."""
    every = comm.all_gather_object(described)
    for index in range(max(map(len, every))):
        entries = [each[index] if index < len(each) else "nothing" for each in every]
        if len(set(entries)) > 1:
            lines = [f"  rank {rank}: {each}" for rank, each in enumerate(entries)]
            text = "\n".join(["gradients: the ranks' parameters or arguments differ", *lines])
            raise raised_on_all(ValueError(text), comm.rank)


def listed(members: Sequence[Member]) -> str:
    """The first names, and how many there are beside."""
    names = ", ".join(each.name for each in members[:_SHOWN])
    more = len(members) - _SHOWN
    return f"{names} and {more} others" if more > 0 else names


def without_gradient(members: Sequence[Member], renewal: str) -> str:
    """What is wrong where a backward gave no gradient to them, and what is to be done."""
    frozen = [each for each in members if not each.parameter.requires_grad]
    if frozen:
        return f"{listed(frozen)} required a gradient at first, and does not now: {renewal}"
    return (
        f"backward gave no gradient to {listed(members)}: pass unused='zeros', make the earlier of"
        " several backwards within no_sync(), or freeze them before"
    )


def unfrozen(members: Sequence[Member]) -> str:
    """What is wrong with parameters that were frozen, before what is to be done."""
    return f"{listed(members)} did not require a gradient at first, and does now: "


open_reducers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every `GradientReducer` that isn't closed."""


@contextmanager
def replaced(earlier: Sequence[Any]) -> Iterator[None]:
    """A context that makes a reducer in place of earlier ones, which stay where it fails."""
    for each in earlier:
        open_reducers.discard(each)
    try:
        yield
    except BaseException:
        open_reducers.update(earlier)
        raise
    for each in earlier:
        each.close()


def is_reduced(parameters: Iterable[Any]) -> bool:
    """Whether an open reducer reduces the gradient of one of these."""
    given = list(parameters)
    return any(reducer.reduces(given) for reducer in list(open_reducers))


def refuse_second(comm: Communicator, members: Sequence[Member]) -> None:
    """ValueError on every rank if any rank's parameters have a reducer already. Collective."""
    twice = [each.name for each in members if is_reduced([each.parameter])]
    for rank, found in enumerate(comm.all_gather_object(twice)):
        if found:
            text = f"gradients: another reducer has {found[0]} on rank {rank}: close it first"
            raise raised_on_all(ValueError(text), comm.rank, rank)
