"""Registration of the backend "collectives" with torch, which `import torch` calls.

It lies outside of the package `collectives`, which is imported when a process group is made: a
program that uses torch alone neither waits for its import nor fails with it. torch is imported
within the function, because torch itself calls it before it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

_NAME = "collectives"
_ATTACH = "_maybe_attach_flight_recorder"
# init_method="mpi://" reads ranks and addresses from MPI alone.
_SCHEME = "mpi"
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Register the backend, and mpirun as a launcher. A second call does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or _NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    handlers = dist.rendezvous.__globals__["_rendezvous_handlers"]
    if _SCHEME not in handlers:
        dist.register_rendezvous_handler(_SCHEME, _rendezvous)
    handlers["env"] = _under_mpirun_or(handlers["env"])
    module = dist.distributed_c10d
    if hasattr(module, _ATTACH):
        setattr(module, _ATTACH, _to_other_groups(getattr(module, _ATTACH)))


def _to_other_groups(attach: Callable[..., None]) -> Callable[..., None]:
    """The recorder of torch 2.15, which raises for groups without a backend written in C++."""

    def attach_to_others(group: Any, *arguments: Any) -> None:
        if not getattr(group, "records_itself", False):
            attach(group, *arguments)

    return attach_to_others


def _create(options: Any, backend_options: Any = None) -> Any:
    """The process group."""
    from collectives.torch.groups import create

    return create(_NAME, options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    from collectives.torch.rendezvous import rendezvous

    return rendezvous(url, **options)


def _under_mpirun_or(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The handler of env://, the default, where none of torch's variables is set under mpirun.

    torch has no way to register a second handler of a scheme.
    """

    def choose(url: str, **options: Any) -> Any:
        if any(name in os.environ for name in _TORCH):
            return handler(url, **options)
        from collectives.launching.launcher import started_by_mpi

        return (_rendezvous if started_by_mpi(os.environ) else handler)(url, **options)

    return choose
