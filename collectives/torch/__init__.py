"""The torch.distributed backend "collectives", and collectives that autograd differentiates.

Importing this module registers the backend: `torch.distributed.init_process_group("collectives")`.
Versions of torch that read the entry points of the group "torch.backends" (2.5 and later) register
it themselves. The other names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectives_torch_entry import register

if TYPE_CHECKING:
    from collectives.torch.functions import (
        all_gather,
        all_reduce,
        all_to_all,
        broadcast,
        reduce_scatter,
    )
    from collectives.torch.gradients import GradientError
    from collectives.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "GradientError",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "register",
]

register()

_MODULES = {"SyncBatchNorm": "sync_batch_norm", "GradientError": "gradients"}
"""Of the names that `functions` lacks."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'functions')}"), name)
