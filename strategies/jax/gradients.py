"""`Strategy.value_and_grad`: derivatives of pytrees, averaged over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from collectives import Communicator
from collectives.compression import CompressedReducer, ListName
from collectives.jax.functions import common_mean, mean_by
from collectives.jax.host_calls import HostFunction
from strategies.replication.replication import Replication

Averages = Callable[[Any, Any, Communicator], tuple[Any, Any]]
"""The means of a value and of its gradients."""


def value_and_grad(
    strategy: Replication,
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """As `Strategy.value_and_grad`."""
    refuse_servers(strategy, "value_and_grad")
    if not strategy.reduces_plainly and not strategy.compresses:
        raise ValueError(
            "value_and_grad: gradients of JAX are reduced as collectives chooses: the strategy must"
            " have no cross_device_ops, no all_reduce_arrays of its own, and no communication"
            " options without a compression"
        )
    what = f"value_and_grad of argnums {argnums}"
    averages: Averages = partial(_exactly, what)
    if strategy.compresses and strategy.num_replicas_in_sync > 1:
        assert strategy.compressed is not None
        number = next(strategy.derivative_numbers)
        averages = _Compressed(strategy.compressed, number, what).averages
    differentiated = jax.value_and_grad(function, argnums, has_aux=has_aux)

    def averaged(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiated(*args, **kwargs)
        if strategy.num_replicas_in_sync == 1:
            return value, gradients
        own, aux = value if has_aux else (value, None)
        mean, gradients = averages(own, gradients, strategy.communicator)
        return ((mean, aux) if has_aux else mean), gradients

    return averaged


def refuse_servers(strategy: Replication, what: str) -> None:
    """TypeError where each worker would train arrays of its own."""
    if not strategy.aggregates:
        raise TypeError(
            f"{what}: under {type(strategy).__name__} arrays of JAX would be each worker's own:"
            " keep them in strategies.Variable, and give apply_gradients what jax.grad returns"
        )


def _exactly(what: str, value: Any, gradients: Any, comm: Communicator) -> tuple[Any, Any]:
    """The means of both, in one message, and so that they may be parts of another loss."""
    return common_mean((value, gradients), what, comm=comm)


class _Compressed:
    """The compressed gradients of one function. What is left out is kept for the process's life."""

    def __init__(self, reducer: CompressedReducer, number: int, what: str) -> None:
        self._reducer, self._number, self._what = reducer, number, what
        self._names: dict[str, ListName] = {}
        self._reduction: HostFunction = self._reduce_into

    def averages(self, value: Any, gradients: Any, comm: Communicator) -> tuple[Any, Any]:
        """The exact mean of the value, and the approximate one of the gradients."""
        mean = common_mean(value, self._what, comm=comm)
        return mean, mean_by(self._reduction, gradients, comm=comm)

    def _reduce_into(self, given: Sequence[Any], means: Sequence[Any]) -> None:
        # A program that is compiled again goes on with what its earlier form left out; `vmap`
        # reduces larger arrays than those of the trace.
        kinds = ", ".join(f"{each.dtype}{list(each.shape)}" for each in given)
        name = self._names.setdefault(kinds, ListName(f"gradients of function {self._number}"))
        for target, mean in zip(means, self._reducer.all_reduce_many(given, of=name), strict=True):
            target[...] = mean
