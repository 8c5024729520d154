"""`strategy.extended`: methods for authors of libraries, as `tf.distribute.StrategyExtended`.

One process is one replica: what TensorFlow does for each device of a process is done once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from strategies.base.cross_replica import reduce_nest
from strategies.core import values
from strategies.core.options import CommunicationOptions, ReduceOp
from strategies.core.same_error import PropagatedErrors
from strategies.replication import contexts


class StrategyExtended:
    """One strategy's further methods.

    Those that communicate or update need a cross-replica context: RuntimeError inside `run` and
    inside the scope of another strategy. `destinations` are a variable, an array or the name of a
    device, as in TensorFlow; results are on every replica.
    """

    def __init__(self, strategy: Any) -> None:
        """`strategy` is a `Strategy`, whose module imports this one."""
        self._strategy = strategy

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As `Strategy.run`."""
        return self._strategy.run(fn, args, kwargs)

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """The replicas' arrays, or nests of them, folded element by element. Collective.

        Raises as `Strategy.reduce` without an axis, on every rank alike.
        """
        self._require("reduce_to")
        return reduce_nest(self._strategy, reduce_op, value, None, options)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """As `reduce_to`, of many values in few messages; the results in their order."""
        self._require("batch_reduce_to")
        with PropagatedErrors(self._strategy.communicator, "batch_reduce_to"):
            given = [values.local(value) for value, _ in value_destination_pairs]
        reduced: list[Any] = reduce_nest(
            self._strategy, reduce_op, given, None, options, batch=True
        )
        return reduced

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """The first replica's array, of equal shape and dtype on all, for all. Collective."""
        self._require("broadcast_to")
        with PropagatedErrors(self._strategy.communicator, "broadcast_to"):
            return self._strategy.broadcast_first(values.as_array(values.local(tensor), "tensor"))

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` to update this replica's copy; return its result.

        `fn` runs in cross-replica context, and every replica must do the same to its copy. With
        group=False the result is a tuple of one. ValueError for a variable of another strategy.
        """
        self._require("update")
        self._check_created_here(var)
        return self.update_non_slot(var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """As `update`, of `colocate_with` whatever it is."""
        self._require("update_non_slot")
        with contexts.entered(self._strategy, None):
            result = fn(colocate_with, *values.local(args), **values.local(kwargs or {}))
        return result if group else (result,)

    def value_container(self, value: Any) -> Any:
        """The container of a replica's value: the value itself, since a process is one replica."""
        return value

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether the variable was created while the strategy was in force."""
        return getattr(v, "strategy", None) is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Create variables where the given one is stored: in this process, or on its server.

        Raises ValueError for a variable of another strategy.
        """
        self._check_created_here(colocate_with_variable)
        with self._strategy.scope(), self._strategy.colocate_with(colocate_with_variable):
            yield

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices of this process's replicas: one."""
        return (self._strategy.device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of the devices that hold this process's copies of variables: one."""
        return (self._strategy.device,)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """The devices for an optimizer's own numbers."""
        return self.parameter_devices

    @property
    def experimental_between_graph(self) -> bool:
        """Whether every process runs the program by itself: always."""
        return True

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes may not change from call to call: they may."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process gives its variables their values: always."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: the chief does."""
        return bool(self._strategy.is_chief)

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: the chief does."""
        return bool(self._strategy.is_chief)

    def _require(self, method: str) -> None:
        contexts.require_cross_replica(f"StrategyExtended.{method}", self._strategy)

    def _check_created_here(self, variable: Any) -> None:
        if not self.variable_created_in_scope(variable):
            raise ValueError(f"{variable!r} was not created in the scope of {self._strategy}")
