"""Strategies of one replica: the default one, and one on a named device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from collectives import BackendUnavailableError, Communicator
from collectives.transports.local import alone
from strategies.base.strategy import Strategy
from strategies.core import values
from strategies.core.options import ReduceOp, as_reduce_op
from strategies.core.world import gpu_problem, parse_device, use_gpu, world_of
from strategies.input import InputContext, InputOptions
from strategies.replication import contexts


class DefaultStrategy(Strategy):
    """As TensorFlow's default strategy: a program written for a strategy runs unchanged."""

    def scope(self) -> AbstractContextManager[None]:
        """Change nothing; RuntimeError inside another strategy's scope."""
        if contexts.has_strategy():
            raise RuntimeError("Must not nest strategy scopes: the default strategy's is outermost")
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


class OneDeviceStrategy(Strategy):
    """One replica, on the device named, such as "/cpu:0". Variables are plain arrays.

    As `tf.distribute.OneDeviceStrategy`. It needs no MPI: under `mpirun` with several ranks, each
    rank is alone and trains by itself; a `communicator` is taken as by every strategy, and not
    used. A GPU becomes the current one. Raises ValueError for anything else than a device's name,
    BackendUnavailableError for a GPU where there is none.
    """

    mirrors_variables = False

    def __init__(self, device: str, *, communicator: Communicator | None = None) -> None:
        kind, number = parse_device(device)
        if kind == "GPU":
            problem = gpu_problem(number)
            if problem is not None:
                raise BackendUnavailableError(f"OneDeviceStrategy({device!r}): {problem}")
            use_gpu(number)
        if communicator is not None:
            world_of(communicator)
        super().__init__(Communicator(alone()))
        self.device = f"/device:{kind}:{number}"
