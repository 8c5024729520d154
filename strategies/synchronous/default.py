"""The default strategy, in force outside of every scope: one replica, nothing to distribute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from collectives import Communicator
from collectives.transports.local import alone
from strategies.base.strategy import Strategy
from strategies.core import contexts, values
from strategies.core.reduce_op import ReduceOp, as_reduce_op
from strategies.core.same_error import wrong_context
from strategies.input import InputContext, InputOptions


class DefaultStrategy(Strategy):
    """As TensorFlow's default strategy: a program written for a strategy runs unchanged."""

    def scope(self) -> AbstractContextManager[None]:
        """Change nothing; RuntimeError inside another strategy's scope."""
        if contexts.has_strategy():
            raise wrong_context(
                "Must not nest strategy scopes: the default strategy's is outermost"
            )
        return nullcontext()

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None
    ) -> Any:
        """Call the function."""
        if not isinstance(args, list | tuple):
            raise ValueError(f"args={args!r}: must be a tuple or list of positional arguments")
        return fn(*values.local(args), **values.local(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """The value itself; summed over `axis`, or averaged, where one is given."""
        as_reduce_op(reduce_op)
        return values.local(value) if axis is None else super().reduce(reduce_op, value, axis)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> Iterable[Any]:
        """The dataset itself."""
        return dataset

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: InputOptions | None = None,
    ) -> Iterable[Any]:
        """The dataset that the function makes for the only pipeline."""
        return dataset_fn(InputContext())


@lru_cache(maxsize=1)
def default_strategy() -> DefaultStrategy:
    """The only instance. It needs no MPI."""
    return DefaultStrategy(Communicator(alone()))


contexts.provide_default(default_strategy)
