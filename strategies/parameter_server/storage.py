"""Variables on servers: in one shard on one server, or in several by rows."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.messaging.buffers import ReusedArray
from strategies.core.indexed_slices import Gradient, IndexedSlices
from strategies.core.storage import Change, Storage, assign, assign_add
from strategies.core.values import Array
from strategies.parameter_server.client import Client, Pull
from strategies.parameter_server.requests import ShardInfo, VariableInfo
from strategies.variables import scatter
from strategies.variables.variable import Variable

if TYPE_CHECKING:
    from strategies.optimizers import Optimizer

_BY_ROWS = frozenset(
    function for name, function in vars(scatter).items() if name.startswith("scatter_")
)
"""Changes whose operands are row numbers and rows; those of all others are whole arrays."""


class ServedStorage(Storage):
    """A value on a parameter server, in one shard."""

    def __init__(self, client: Client, info: VariableInfo) -> None:
        self.client, self.info = client, info
        self.shape, self.dtype = info.shape, info.dtype
        self._buffer: ReusedArray | None = None

    def view(self) -> Array:
        """The present value, as `read`."""
        return self.read()

    def read(self) -> Array:
        """Pull the value. Its memory is used by the next pull, unless it is still referenced."""
        if self._buffer is None:
            self._buffer = ReusedArray(self.shape, self.dtype)
        out = self._buffer.take()
        self.client.pull(self.pulls_into(out))
        return out

    def pulls_into(self, out: Array) -> list[Pull]:
        """What a pull of the whole value into an array consists of."""
        parts = zip(self.info.shards, self.parts_of(out), strict=True)
        return [(shard, part, None) for shard, part in parts]

    def rows(self, indices: Array) -> Array:
        """Pull these rows, and no others: an array of shape (*indices.shape, *row shape)."""
        flat = np.asarray(indices, np.int64).reshape(-1)
        out = np.empty((len(flat), *self.shape[1:]), self.dtype)
        self._pull_rows(flat, out)
        return out.reshape(*np.shape(indices), *self.shape[1:])

    def _pull_rows(self, rows: Array, out: Array) -> None:
        self.client.pull([(self.info.shards[0], out, rows)])

    def parts_of(self, array: Array) -> list[Array]:
        """An array of the value's shape, cut as the shards are."""
        return [array]

    def slices_of(self, slices: IndexedSlices) -> list[IndexedSlices]:
        """The slices of each shard, numbered from its first row; empty where it has none."""
        return [slices]

    def gradients_of(self, gradient: Gradient) -> list[tuple[ShardInfo, Gradient]]:
        """Each shard with its part, be it empty: a rule may change all rows."""
        parts: Sequence[Gradient] = (
            self.slices_of(gradient)
            if isinstance(gradient, IndexedSlices)
            else self.parts_of(gradient)
        )
        return list(zip(self.info.shards, parts, strict=True))

    def change(self, change: Change, *operands: Any) -> None:
        """Push the change to the servers."""
        if change in _BY_ROWS:
            indices, values = operands
            slices = self.slices_of(IndexedSlices(values, indices))
            rows = [[part.indices, part.values] if len(part.indices) else [] for part in slices]
            parts = [(shard, own) for shard, own in zip(self.info.shards, rows, strict=True) if own]
        else:
            whole = [np.broadcast_to(np.asarray(each), self.shape) for each in operands]
            split = [self.parts_of(array) for array in whole]
            parts = [(shard, own) for shard, *own in zip(self.info.shards, *split, strict=True)]
        self.client.change(change, parts)

    def push_difference(self, array: Array, old: Array) -> None:
        """Push what a worker has added to the old value, so that others' additions remain.

        Nothing that is added to an infinite element, or to NaN, gives a finite one: it is assigned,
        as where the difference is too large for the dtype.
        """
        if (array == old).all():
            return
        if array.dtype == np.bool_:
            self.change(assign, array)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            difference = np.subtract(array, old)
        if not (finite := np.isfinite(difference)).all():
            # NaN differs from itself; the difference of equal infinite elements is NaN.
            changed = (array != old) & ((array == array) | (old == old))
            if (changed & (~np.isfinite(old) | (np.isfinite(array) & ~finite))).any():
                self.change(assign, array)
                return
            difference = np.where(changed, difference, np.zeros_like(difference))
        self.change(assign_add, difference)

    def slot(self, optimizer: Optimizer, name: str, initial: Array | None) -> ServedSlot:
        """An optimizer's array, which the servers keep beside the value.

        It begins with `initial` unless another worker set it before.
        """
        made = ServedSlot(self, optimizer, name)
        if initial is not None:
            made.write(initial, keep=True)
        return made

    def updates_by(self, optimizer: Optimizer) -> int:
        """How many steps the optimizer has taken, of all workers."""
        number = self.client.number_of(optimizer)
        states = self.client.read_slots(self.info.shards, number)
        return max(iteration for _, iteration in states)


class SplitStorage(ServedStorage):
    """A value in several shards, each of some rows."""

    def __init__(self, client: Client, info: VariableInfo) -> None:
        super().__init__(client, info)
        lengths = [shard.shape[0] for shard in info.shards]
        self.bounds: list[int] = np.cumsum([0, *lengths]).tolist()
        """Shard i has the rows from bounds[i] to bounds[i + 1]."""

    def parts_of(self, array: Array) -> list[Array]:
        """Views of its rows."""
        ends = zip(self.bounds[:-1], self.bounds[1:], strict=True)
        return [array[first:last] for first, last in ends]

    def slices_of(self, slices: IndexedSlices) -> list[IndexedSlices]:
        """Those of each shard, in the order in which they were given."""
        return [
            IndexedSlices(slices.values[places], slices.indices[places] - first)
            for first, places in self._owners(slices.indices)
        ]

    def _owners(self, rows: Array) -> list[tuple[int, Array]]:
        """For each shard: its first row, and the positions of its rows in `rows`."""
        owner = np.searchsorted(self.bounds, rows, side="right") - 1
        return [
            (first, np.flatnonzero(owner == number))
            for number, first in enumerate(self.bounds[:-1])
        ]

    def _pull_rows(self, rows: Array, out: Array) -> None:
        wanted: list[Pull] = []
        goals: list[Array] = []
        for shard, (first, places) in zip(self.info.shards, self._owners(rows), strict=True):
            if len(places):
                part = np.empty((len(places), *self.shape[1:]), self.dtype)
                wanted.append((shard, part, rows[places] - first))
                goals.append(places)
        self.client.pull(wanted)
        for (_, part, _), places in zip(wanted, goals, strict=True):
            out[places] = part


def stored(client: Client, info: VariableInfo) -> ServedStorage:
    """The storage of a variable, or of a part of one."""
    return (SplitStorage if info.split else ServedStorage)(client, info)


class ServedSlot(Storage):
    """An optimizer's array beside a value on parameter servers; zeros before the first update."""

    def __init__(self, value: ServedStorage, optimizer: Optimizer, name: str) -> None:
        self._value, self._optimizer, self._name = value, optimizer, name
        self._number = value.client.number_of(optimizer)
        self.shape, self.dtype = value.shape, value.dtype

    def view(self) -> Array:
        """As the servers have it now."""
        out = np.zeros(self.shape, self.dtype)
        states = self._value.client.read_slots(self._value.info.shards, self._number)
        for part, (slots, _) in zip(self._value.parts_of(out), states, strict=True):
            if self._name in slots:
                part[...] = slots[self._name]
        return out

    def read(self) -> Array:
        """As `view`: it is an array of the caller's own."""
        return self.view()

    def change(self, change: Change, *operands: Any) -> None:
        """Change the array, as the chief; what other workers restore is the same, and left out."""
        if self._value.client.is_chief:
            array = self.view()
            change(array, *operands)
            self.write(array, keep=False)

    def write(self, array: Array, *, keep: bool) -> None:
        """Set the array and the count of steps, or leave those that are there if `keep`."""
        slots = [{self._name: part} for part in self._value.parts_of(array)]
        parts = list(zip(self._value.info.shards, slots, strict=True))
        iteration = self._optimizer.iterations
        self._value.client.write_slots(self._number, parts, iteration, keep=keep)


class ShardedVariable(Variable):
    """What a variable becomes that a partitioner splits by rows over parameter servers.

    As TensorFlow's `ShardedVariable`: it reads, assigns and computes as a whole; `variables` are
    its parts. Programs don't make one themselves (TypeError): they make a `Variable` in the scope
    of a strategy that has a partitioner.
    """

    def __init__(self, *variables: Any, **named: Any) -> None:
        raise TypeError(
            "a ShardedVariable isn't made of variables: make a Variable in the scope of a"
            " ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(2)), which splits"
            " it"
        )

    _parts: list[Variable] | None = None

    @property
    def variables(self) -> list[Variable]:
        """The parts in the order of their rows, each a variable of its own."""
        if self._parts is None:
            shards = self._split.info.shards
            self._parts = [self._part(number, info) for number, info in enumerate(shards)]
        return self._parts

    @property
    def _split(self) -> SplitStorage:
        assert isinstance(self.storage, SplitStorage)
        return self.storage

    def _part(self, number: int, info: ShardInfo) -> Variable:
        part = Variable.__new__(Variable)
        part.__dict__.update(self.__dict__)
        part.name = f"{self.name or 'Variable'}/part_{number}"
        whole = VariableInfo(part.name, info.shape, info.dtype, (info,), split=False)
        part.storage = ServedStorage(self._split.client, whole)
        return part

    def __getitem__(self, index: Any) -> Any:
        """As of an array; of rows given by a number or a slice no others are moved."""
        first, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if isinstance(first, slice):
            rows = np.arange(*first.indices(self.shape[0]))
            return self.storage.rows(rows)[(slice(None), *rest)]
        if hasattr(first, "__index__") and not isinstance(first, bool | np.bool_ | np.ndarray):
            number = operator.index(first)
            if not -self.shape[0] <= number < self.shape[0]:
                raise IndexError(f"row {number}: {self} has rows 0 to {self.shape[0] - 1}")
            return self.storage.rows(np.array([number % self.shape[0]]))[(0, *rest)]
        return super().__getitem__(index)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        shards = len(self._split.info.shards)
        return f"<ShardedVariable{name} {self.dtype}{list(self.shape)} in {shards} parts>"
