"""Horovod's interface for PyTorch, over `collectives`.

A script for Horovod changes its import, `import collectives.torch.horovod as hvd`, and is started
by `mpirun -n 4 python train.py`. Names, arguments and defaults are Horovod's 0.28, which has no
type annotations of its own. All ranks must make the same calls in the same order: no rank
negotiates it in the background, and a difference raises a MismatchError on every rank. The
arguments `name`, by which Horovod matches calls, are compared in calls of tensors.

Source: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.torch
"""

from __future__ import annotations

from typing import Any

from collectives.errors import CollectiveError
from collectives.horovod.absent import absent
from collectives.horovod.joining import join
from collectives.horovod.objects import allgather_object, broadcast_object
from collectives.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from collectives.horovod.queries import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from collectives.reductions.reduction import ReduceOp
from collectives.torch.horovod.asynchronous import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from collectives.torch.horovod.broadcasts import broadcast_optimizer_state, broadcast_parameters
from collectives.torch.horovod.compression import Compression
from collectives.torch.horovod.operations import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from collectives.torch.horovod.optimizer import DistributedOptimizer
from collectives.torch.sync_batch_norm import SyncBatchNorm

HorovodInternalError = CollectiveError
Average, Sum = ReduceOp.MEAN, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    raise absent(__name__, name)
