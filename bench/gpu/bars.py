"""Measurements with a required value, the bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.cases import CASES
from bench.gpu.bare import Bare, transport_of
from bench.gpu.device import Device
from bench.gpu.measure import GpuBench
from bench.gpu.memory import buffer_sets
from bench.problem import Problem
from bench.task import Task
from bench.timing import Subject, enqueue_seconds, interleave, medians
from collectives import Communicator
from collectives.cuda.interface import Cuda
from collectives.gpu.buckets import BucketMemory
from collectives.reductions.reduction import ReduceOp

MOST_OVERHEAD = 10e-6
MOST_LAUNCHES, MOST_PACKING = 2, 60e-6
MOST_OF_BARE = 1.1
TENSORS = ELEMENTS = 1000
COPY_BOUND = (16 << 20, 64 << 20, 256 << 20)
_FLOAT32 = np.dtype("float32")
_BATCH, _REPEATS = 200, 50
_LIMIT = 64 << 20


@dataclass(frozen=True)
class Bar:
    """One measurement and its bar."""

    name: str
    found: str
    bar: str
    met: bool
    wrong: int = 0
    """Number of wrong elements of the results."""

    def __str__(self) -> str:
        return f"{self.name}: {self.found} (bar: {self.bar}: {'met' if self.met else 'MISSED'})"


def call_overhead(comm: Communicator, world: Any, cuda: Cuda, device: Device) -> Bar:
    """Difference between a whole call and the bare one, by the host's clock, with 4 bytes."""
    transport = transport_of(comm)
    name = "all_reduce of 4 bytes, the whole call over the bare one"
    if transport is None:
        return Bar(name, "not over NCCL", "10 µs", False)
    case, problem = CASES["all_reduce"], Problem(comm.size, 1, _FLOAT32)
    buffers = buffer_sets(case, problem, comm.rank, cuda, 1, 0)[0]
    task = Task(problem, comm.rank, buffers, in_place=False)
    bare = Bare(transport, cuda).call(case.name, task)
    assert bare is not None
    ours, theirs = medians(
        [case.call(comm, task, None), bare],
        world,
        batch=_BATCH,
        repeats=_REPEATS,
        warmup=5 * _BATCH,
        stopwatch=enqueue_seconds(device.synchronize),
    ).tolist()
    found = f"{_us(ours)} − {_us(theirs)} = {_us(ours - theirs)}"
    return Bar(name, found, _us(MOST_OVERHEAD), ours - theirs <= MOST_OVERHEAD)


def packing(world: Any, cuda: Cuda, device: Device) -> Bar:
    """Packing and unpacking, without the reduction; the tables exist already."""
    kinds = tuple(((ELEMENTS,), _FLOAT32) for _ in range(TENSORS))
    memory = BucketMemory(cuda)
    buckets = memory.set_for(kinds, _LIMIT, ReduceOp.SUM).buckets
    arrays, outs = ([cuda.empty(ELEMENTS, _FLOAT32) for _ in range(TENSORS)] for _ in range(2))
    tables = [
        (
            bucket,
            bucket.table(list(map(arrays.__getitem__, bucket.indices))),
            bucket.table(list(map(outs.__getitem__, bucket.indices))),
        )
        for bucket in buckets
    ]

    def pack_and_unpack() -> None:
        for bucket, given, wanted in tables:
            bucket.pack(given)
            bucket.unpack(wanted)

    seconds = interleave(
        [Subject([(pack_and_unpack, None)])],
        world,
        batch=20,
        warmup=100,
        repeats=_REPEATS,
        stopwatch=device.seconds,
    )
    taken, launches = float(np.median(seconds)), 2 * len(buckets)
    return Bar(
        f"pack and unpack of {TENSORS} tensors of {ELEMENTS} float32",
        f"{launches} launches, {_us(taken)}",
        f"{MOST_LAUNCHES} launches, {_us(MOST_PACKING)}",
        launches <= MOST_LAUNCHES and taken <= MOST_PACKING,
    )


def copy_bound(comm: Communicator, bench: GpuBench) -> list[Bar]:
    """all_reduce out of place, of sizes limited by the memory or the link."""
    bars = []
    for nbytes in COPY_BOUND:
        row = bench.row(CASES["all_reduce"], Problem(comm.size, nbytes // 4, _FLOAT32))
        form, name = row.out_of_place, f"all_reduce of {nbytes >> 20} MiB over the bare call"
        if form is None or form.peer is None:
            bars.append(Bar(name, "not over NCCL", str(MOST_OF_BARE), False))
            continue
        ratio = 1 / form.peer.ratio
        times = f"{_us(form.seconds.median)} / {_us(form.peer.seconds.median)}"
        found = f"{times} = {ratio:.3f}" + (f", {row.wrong} WRONG elements" if row.wrong else "")
        met = ratio <= MOST_OF_BARE and not row.wrong
        bars.append(Bar(name, found, str(MOST_OF_BARE), met, row.wrong))
    return bars


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} µs"
