"""Equal parameters and optimizers on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from collectives.consistency.signature import shortened
from collectives.horovod.joining import Request, notice_joined, with_joined
from collectives.horovod.objects import broadcast_object
from collectives.horovod.process_sets import ProcessSet, ranks, ranks_of, root_of


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet | None = None,
) -> None:
    """Copy the root's tensors into the other ranks', of equal shapes and dtypes.

    Args:
        params: `model.state_dict()`, whose keys are taken in order; `model.named_parameters()`, or
            tensors. Entries other than tensors are left alone.
        root_rank: the rank whose tensors are sent, its number among all ranks.
        process_set: the ranks that take part; all by default.

    Raises:
        MismatchError: the ranks' tensors differ in number, name, shape or dtype; on every rank.

    """
    comm, root = ranks_of(process_set), root_of(process_set, root_rank)
    if isinstance(params, torch.nn.Module):
        raise TypeError("params is a Module: must be `model.state_dict()`, or named parameters")
    given = sorted(params.items()) if isinstance(params, Mapping) else params
    pairs = [each if isinstance(each, tuple) else ("", each) for each in given]
    tensors = [(name, each) for name, each in pairs if isinstance(each, torch.Tensor)]
    request = Request("broadcast_parameters")
    names = shortened([str(name) for name, _ in tensors])
    notice_joined(comm, request._replace(what=f"{len(tensors)} tensors: {names}"))
    with torch.no_grad():
        for _, tensor in tensors:
            with_joined(comm, request, partial(comm.broadcast, tensor, root=root))


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Load the state of the root's optimizer, its options included, on the other ranks.

    It is sent pickled. `model` is ignored: the state need not exist on the other ranks. Raises
    MismatchError on every rank where the optimizers' classes or groups differ.
    """
    groups = [len(group["params"]) for group in optimizer.param_groups]
    what = f"{type(optimizer).__name__} with groups of {groups} parameters"
    notice_joined(ranks(), Request("broadcast_optimizer_state", what=what))
    state = broadcast_object(
        optimizer.state_dict() if ranks().rank == root_rank else None, root_rank
    )
    if ranks().rank != root_rank:
        optimizer.load_state_dict(state)
