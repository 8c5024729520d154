"""Registration of the backend and of its rendezvous with torch.

torch is imported within the function: `import torch` itself calls it, through the entry point, and
must not find this module half imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from collectives.launching.launcher import started_by_mpi

NAME = "collectives"
SCHEME = "mpi"
"""init_method="mpi://" reads ranks and addresses from MPI alone."""

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Register the backend, and mpirun as a launcher. A second call does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers = dist.rendezvous.__globals__["_rendezvous_handlers"]
    if SCHEME not in handlers:
        dist.register_rendezvous_handler(SCHEME, _rendezvous)
    handlers["env"] = _under_mpirun_or(handlers["env"])


def _create(options: Any, backend_options: Any = None) -> Any:
    """The process group; its module is imported by its first use, because it is large."""
    from collectives.torch.groups import create

    return create(NAME, options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from collectives.torch.rendezvous import rendezvous

    return rendezvous(url, **options)


def _under_mpirun_or(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of env://, the default, where none of torch's variables is set under mpirun.

    torch has no way to register a second handler of a scheme.
    """

    def choose(url: str, **options: Any) -> Any:
        if started_by_mpi(os.environ) and not any(name in os.environ for name in _TORCH):
            return _rendezvous(url, **options)
        return handler(url, **options)

    return choose
