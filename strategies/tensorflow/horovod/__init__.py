"""Horovod's interface for TensorFlow and Keras 3, over `collectives`.

A script for Horovod changes its import, `import strategies.tensorflow.horovod as hvd`, from
`horovod.tensorflow`, `horovod.tensorflow.keras` or `horovod.keras`, and is started by
`mpirun -n 4 python train.py`. Names, arguments and defaults are Horovod's 0.28, which has no type
annotations of its own. All ranks must make the same calls in the same order: no rank negotiates it
in the background, and a difference raises a MismatchError on every rank. In a `tf.function` calls
run in the order of the program. The arguments `name`, by which Horovod matches calls, are compared
in calls of tensors; those of devices are ignored.

Source: https://horovod.readthedocs.io/en/stable/api.html#module-horovod.tensorflow
"""

from __future__ import annotations

from typing import Any

from collectives import CollectiveError, ReduceOp
from collectives.horovod.absent import absent
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
from strategies.tensorflow.horovod import callbacks
from strategies.tensorflow.horovod.batch_normalization import SyncBatchNormalization
from strategies.tensorflow.horovod.compression import Compression
from strategies.tensorflow.horovod.gradients import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
)
from strategies.tensorflow.horovod.movements import (
    allgather,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_variables,
    grouped_allgather,
    join,
)
from strategies.tensorflow.horovod.objects import allgather_object, broadcast_object
from strategies.tensorflow.horovod.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from strategies.tensorflow.horovod.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

HorovodInternalError = CollectiveError
Average, Sum = ReduceOp.MEAN, ReduceOp.SUM
Min, Max, Product = ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
]

_ADVICE = {
    "broadcast_global_variables": "give the variables to `broadcast_variables`",
    "broadcast_object_fn": "use broadcast_object",
    "BroadcastGlobalVariablesHook": "give the variables to `broadcast_variables`",
    "rank_op": "the number of a rank doesn't change: use rank()",
    "local_rank_op": "the number of a rank doesn't change: use local_rank()",
    "size_op": "the number of ranks doesn't change: use size()",
    "local_size_op": "the number of ranks doesn't change: use local_size()",
}


def __getattr__(name: str) -> Any:
    raise absent(__name__, name, _ADVICE)
