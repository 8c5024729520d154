"""`Strategy.value_and_grad`: derivatives of pytrees, averaged over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from collectives.jax import all_reduce
from strategies.replication.replication import Replication


def value_and_grad(
    strategy: Replication,
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `Strategy.value_and_grad`."""
    if not strategy.reduces_plainly:
        raise ValueError(
            "value_and_grad: gradients of JAX are reduced as collectives chooses: the strategy must"
            " have neither cross_device_ops nor communication options of its own"
        )
    differentiated = jax.value_and_grad(function, argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        if strategy.num_replicas_in_sync == 1:
            return value, gradients
        comm = strategy.communicator
        if has_aux:
            own, aux = value
            mean, gradients = all_reduce((own, gradients), "mean", comm=comm)
            return (mean, aux), gradients
        return all_reduce((value, gradients), "mean", comm=comm)

    return averaged
