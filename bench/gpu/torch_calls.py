"""The host's time of torch's collectives on a GPU: `python -m bench.gpu.torch_calls`.

A group of this package and torch's own NCCL group make the same calls in turn, on one rank. The
host waits for no call: the time is that of enqueueing it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import collectives.torch  # noqa: F401  registers the backend
from bench.timing import enqueue_seconds, medians

_ELEMENTS = 1 << 18
_BATCH, _REPEATS = 50, 40
_WHAT = "host's time of a call of 1 MiB, µs"


def main() -> int:
    """Print a table; 1 where there is no GPU."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    if not torch.cuda.is_available():
        print("bench.gpu.torch_calls: torch finds no GPU", file=sys.stderr)
        return 1
    dist.init_process_group("collectives", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.set_device(0)
    theirs = dist.new_group([0], backend="nccl")
    # Alone, a rank needs no NCCL, and copies.
    ours = _over_nccl(dist.group.WORLD)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print(f"{_WHAT:40} {'torch':>8} {'ours':>8}")

    pairs = zip(_calls(torch, dist, theirs), _calls(torch, dist, ours), strict=True)
    for (name, their_call), (_, our_call) in pairs:
        seconds = medians(
            [their_call, our_call],
            MPI.COMM_WORLD,
            batch=_BATCH,
            repeats=_REPEATS,
            warmup=2 * _BATCH,
            stopwatch=enqueue_seconds(torch.cuda.synchronize),
        )
        print(f"{name:40} {seconds[0] * 1e6:8.1f} {seconds[1] * 1e6:8.1f}", flush=True)
    dist.destroy_process_group()
    return 0


def _over_nccl(group: Any) -> Any:
    devices = group._comm._devices
    devices.backend = "nccl"
    devices.start()
    return group


def _calls(torch: Any, dist: Any, group: Any) -> list[tuple[str, Callable[[], Any]]]:
    tensor, out = (torch.zeros(_ELEMENTS, device="cuda") for _ in range(2))

    def later() -> None:
        dist.all_reduce(tensor, group=group, async_op=True).wait()

    def on_a_stream() -> None:
        with torch.cuda.stream(stream):
            dist.all_reduce(tensor, group=group)

    stream = torch.cuda.Stream()
    return [
        ("all_reduce", partial(dist.all_reduce, tensor, group=group)),
        ("all_reduce, asynchronous, and its wait", later),
        ("all_reduce on another stream", on_a_stream),
        ("broadcast", partial(dist.broadcast, tensor, 0, group=group)),
        ("all_gather_into_tensor", partial(dist.all_gather_into_tensor, out, tensor, group=group)),
        ("reduce_scatter_tensor", partial(dist.reduce_scatter_tensor, out, tensor, group=group)),
    ]


if __name__ == "__main__":
    sys.exit(main())
