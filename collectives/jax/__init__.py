"""Collectives inside `jax.jit`, on the CPU, without a compiler.

    gradients = collectives.jax.all_reduce(gradients, "mean")

Imports JAX; `import collectives` doesn't import this package.
"""

from collectives.jax.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    pvary,
    recv,
    reduce,
    reduce_scatter,
    scan,
    send,
    sendrecv,
)
from collectives.jax.host_calls import original_errors, uses_ffi

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "original_errors",
    "pvary",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "send",
    "sendrecv",
    "uses_ffi",
]
