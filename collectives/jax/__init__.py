"""Collectives inside `jax.jit`, on the CPU, without a compiler.

    gradients = collectives.jax.all_reduce(gradients, "mean")

Imports JAX; `import collectives` doesn't import this package.
"""

from collectives.jax.host_calls import original_errors, uses_ffi
from collectives.jax.reductions import all_reduce

__all__ = ["all_reduce", "original_errors", "uses_ffi"]
