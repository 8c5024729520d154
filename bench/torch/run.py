"""A run under mpirun: tables of calls and of training steps, as Markdown. Rank 0 prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from bench.reports.training import add_output, check_output, finish, head
from bench.sizes import parse_count, parse_sizes, shown
from bench.timing import batch_of, medians
from bench.training_table import HEAD, rows

OURS, PEER = "collectives", "gloo"
_STEPS = 10

Step = Callable[[], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 1 if results differ, or 2 without torch."""
    options = _parser().parse_args(arguments)
    if find_spec("torch") is None:
        print("bench.torch: torch isn't installed: `pip install torch`", file=sys.stderr)
        return 2
    return _measure(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.torch", description=__doc__)
    parser.add_argument("--sizes", type=parse_sizes, help="bytes, such as 8,64K (default: all)")
    parser.add_argument("--only", choices=("calls", "training"), help="one table")
    parser.add_argument(
        "--repeats", type=parse_count, default=15, help="of each call (default: 15)"
    )
    add_output(parser)
    return parser


def _measure(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    import collectives.torch  # noqa: F401 (registers the backend)

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(OURS)
    world, ours = MPI.COMM_WORLD.Dup(), dist.group.WORLD
    check_output(world, options)
    groups = {OURS: ours, PEER: dist.new_group(backend=PEER)}
    lines = head("bench.torch", world, torch=torch.__version__)
    wrong = 0
    if options.only != "training":
        for line, differs in _calls(groups, options, world):
            lines.append(line)
            wrong += differs
    if options.only != "calls":
        lines += _training(groups, options.repeats, world)
    finish("torch.distributed", lines, world, options.output)
    dist.destroy_process_group()
    return int(wrong > 0)


def _calls(
    groups: dict[str, Any], options: argparse.Namespace, world: Any
) -> Iterator[tuple[str, bool]]:
    """The lines of the table, and whether the backends' results differ."""
    import torch

    from bench.torch.operations import OPERATIONS, in_blocks, make

    yield "", False
    yield f"| call | bytes | {OURS} µs | {PEER} µs | ratio |", False
    yield "|---|---:|---:|---:|---:|", False
    for name, (_, usual) in OPERATIONS.items():
        for nbytes in [in_blocks(size, world.size) for size in options.sizes or usual]:
            made = [make(name, nbytes, group) for group in groups.values()]
            for call, _ in made:
                call()
            differs = any(world.allgather(not torch.equal(made[0][1], made[1][1])))
            for _, tensor in made:
                tensor.zero_()  # a repeated sum in place would overflow
            calls, batch = [call for call, _ in made], batch_of(nbytes)
            ours, peer = medians(calls, world, batch=batch, repeats=options.repeats)
            note = " WRONG" if differs else ""
            times = f"{1e6 * ours:.1f} | {1e6 * peer:.1f} | {peer / ours:.2f}"
            yield f"| {name}{note} | {shown(nbytes)} | {times} |", differs


def _training(groups: dict[str, Any], repeats: int, world: Any) -> list[str]:
    import torch.distributed as dist

    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    groups = groups | {"one rank": alone}
    lines: list[str] = []
    for make, batch in ((_small_steps, _STEPS), (_large_steps, 1)):
        lines += ["", HEAD, *rows(partial(make, groups), world, batch=batch, repeats=repeats)]
    return lines


def _small_steps(groups: dict[str, Any]) -> dict[str, Step]:
    from bench.in_step import IN_STEP, with_barrier
    from bench.torch import training

    ours, peer, alone = groups.values()
    return {
        "apart": training.apart(),
        IN_STEP: with_barrier(training.apart()),
        "DDP of one rank": training.data_parallel(alone),
        f"DDP, {PEER}": training.data_parallel(peer),
        f"DDP, {OURS}": training.data_parallel(ours),
        f"DDP, {PEER}, views": training.data_parallel(peer, gradient_as_bucket_view=True),
        f"DDP, {OURS}, views": training.data_parallel(ours, gradient_as_bucket_view=True),
        "strategy.distribute": training.distributed(),
    }


def _large_steps(groups: dict[str, Any]) -> dict[str, Step]:
    from bench.torch import training

    ours, peer, _ = groups.values()
    return {
        f"FSDP2, {PEER}": training.fully_sharded(peer),
        f"FSDP2, {OURS}": training.fully_sharded(ours),
        f"FSDP2, {OURS}, registered": training.fully_sharded(ours, register=True),
    }
