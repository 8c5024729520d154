"""The base of cross-device ops, as `tf.distribute.CrossDeviceOps`.

One process is one replica: each rank gives its own replica's value and gets the result, whatever
the destinations, since every replica keeps a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from collectives import Communicator
from strategies.core import values
from strategies.core.options import CommunicationOptions, ReduceOp, as_reduce_op
from strategies.replication.contexts import get_strategy

if TYPE_CHECKING:
    from typing import Self

Pairs: TypeAlias = Sequence[tuple[Any, Any]]
"""Values, each with its destinations."""


_REDUCING = ("reduce", "batch_reduce", "reduce_implementation", "batch_reduce_implementation")


class CrossDeviceOps:
    """Base of cross-device ops. To write one, define one of four methods in a subclass.

    `reduce_implementation` reduces one array and `batch_reduce_implementation` many; each is made
    from the other where only one is defined, and so are `reduce` and `batch_reduce`. A value is
    this replica's array; `self.communicator` reaches the other replicas. Every replica makes the
    same calls in the same order, and all must get the same result, of the value's shape. The
    strategy calls `batch_reduce` for gradients and `ReplicaContext.all_reduce`, and `reduce` or
    `batch_reduce` for `Strategy.reduce` and variables. Raises TypeError where none is defined.

        class MyAllReduce(CrossDeviceOps):
            def reduce_implementation(self, reduce_op, value, destinations, options):
                return self.communicator.all_reduce(value, reduce_op.value)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """TypeError for a class that defines no way to reduce, as this one."""
        if all(getattr(cls, name) is getattr(CrossDeviceOps, name) for name in _REDUCING):
            raise TypeError(f"{cls.__name__} reduces nothing: define one of {', '.join(_REDUCING)}")
        return super().__new__(cls)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the strategy in force, which is the one that reduces."""
        return get_strategy().communicator

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """The replicas' arrays, of equal shape and dtype, folded into one, for all. Collective.

        `destinations` may be a variable, an array or the name of a device, and is where the result
        is wanted. Raises ValueError for an op that is neither SUM nor MEAN.
        """
        return self.reduce_implementation(
            as_reduce_op(reduce_op),
            values.local(per_replica_value),
            destinations,
            options or CommunicationOptions(),
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """As `reduce`, of many arrays; the results in their order. Collective."""
        pairs = [(values.local(value), place) for value, place in value_destination_pairs]
        return list(
            self.batch_reduce_implementation(
                as_reduce_op(reduce_op), pairs, options or CommunicationOptions()
            )
        )

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """The first replica's array, for all. Collective."""
        return self.broadcast_implementation(values.local(tensor), destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """What `reduce` does, its arguments being checked."""
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> Sequence[Any]:
        """What `batch_reduce` does, its arguments being checked."""
        return [
            self.reduce(reduce_op, value, place, options)
            for value, place in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """What `broadcast` does."""
        return self.communicator.broadcast(np.array(tensor))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"


def reduce_by(
    ops: CrossDeviceOps,
    op: ReduceOp,
    arrays: Sequence[Any],
    options: CommunicationOptions,
    *,
    batch: bool,
) -> list[Any]:
    """The arrays reduced by `ops`, by one call or by one for each, in memory of their own.

    Raises ValueError where the ops don't return one result of the array's shape for each array.
    """
    if batch:
        results = ops.batch_reduce(op, [(array, array) for array in arrays], options)
    else:
        results = [ops.reduce(op, array, array, options) for array in arrays]
    shapes = [np.shape(array) for array in arrays]
    results = [values.local(result) for result in results]
    returned = [np.shape(result) for result in results]
    if shapes != returned:
        raise ValueError(f"{ops!r} returned arrays of shapes {returned} for those of {shapes}")
    return [_apart(*pair) for pair in zip(results, arrays, strict=True)]


def _apart(result: Any, array: Any) -> Any:
    if not isinstance(result, np.ndarray):
        return result
    lent = isinstance(array, np.ndarray) and np.may_share_memory(result, array)
    return result.copy() if lent or not result.flags.writeable else result
