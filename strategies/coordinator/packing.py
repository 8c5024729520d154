"""Functions and values as bytes that another process can read: pickles by cloudpickle.

What belongs to a place, such as a variable, is packed as a name, which the reader resolves to its
own object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from strategies.base.strategy import Strategy
from strategies.coordinator.values import PerWorkerIterator, WorkerDatasets
from strategies.replication import contexts
from strategies.variables.variable import Variable

Packed: TypeAlias = list[NDArray[np.uint8]]
"""An object in arrays of bytes."""


NotifyWorkers: TypeAlias = Callable[[Any, Packed], None]
"""Sends every worker a notification, which precedes what is scheduled later."""


class StrategyName(NamedTuple):
    """The strategy itself."""


class IteratorName(NamedTuple):
    """An iterator that each worker has of its own."""

    dataset: int
    number: int


class References:
    """Objects that travel between the chief and its workers by name, since each rank has its own.

    The strategy does, and per-worker iterators. A strategy whose variables do, too, has a subclass.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        notify_workers: NotifyWorkers | None = None,
        datasets: WorkerDatasets | None = None,
    ) -> None:
        """The chief gives `notify_workers`, a worker its `datasets`."""
        self._strategy, self._notify_workers, self._datasets = strategy, notify_workers, datasets

    def name(self, thing: Any) -> Any:
        """A picklable name; None for an object that is packed itself.

        On the chief TypeError for a variable of another strategy.
        """
        if thing is self._strategy:
            return StrategyName()
        if isinstance(thing, PerWorkerIterator):
            return IteratorName(thing.dataset, thing.number)
        foreign = isinstance(thing, Variable) and thing.strategy is not self._strategy
        if foreign and self._notify_workers is not None:
            raise TypeError(
                f"{thing} belongs to {thing.strategy}: workers can't reach it; create it in the"
                f" scope of {self._strategy}, or schedule the function with its value"
            )
        return None

    def resolve(self, name: Any) -> Any:
        """This process's own object of that name; ValueError for an unknown one.

        An iterator begins here if it is new.
        """
        if isinstance(name, StrategyName):
            return self._strategy
        if isinstance(name, IteratorName) and self._datasets is not None:
            return self._datasets.iterator(*name)
        raise ValueError(f"{name!r}: no object of this name exists here")

    def uses(self) -> Any:
        """What a worker sends to the chief with a result."""

    def add_uses(self, uses: Any) -> None:
        """On the chief: keep it for `apply_uses`; called by any thread."""

    def apply_uses(self) -> None:
        """Apply it to the chief's own objects; called by the program's thread."""

    def keep(self, name: Any, thing: Any) -> None:
        """On a worker: keep what the chief has sent once."""

    def keep_error(self, name: Any, error: BaseException) -> None:
        """On a worker: as `keep`, of what can't be unpacked: what needs it fails by this error."""
        raise error

    def call(
        self,
        context: contexts.ReplicaContext,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """On a worker: call a scheduled function in its contexts."""
        return contexts.call_as_replica(context, fn, args, kwargs)

    def reduce(self, thing: Any) -> Any:
        """As `__reduce__` of an object; NotImplemented: as cloudpickle pickles it."""
        return NotImplemented


_NO_FILE = "<dynamic-code>"
"""In place of the file's name in code that cloudpickle copies."""


def _in_file(code: CodeType, name: str) -> CodeType:
    """Code with the file's name: AutoGraph reads the source, and tracebacks show it."""
    return code.replace(co_filename=name)


class _Packer(cloudpickle.Pickler):
    def __init__(self, file: Any, references: References, **options: Any) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, **options)
        self._references = references

    def persistent_id(self, thing: Any) -> Any:
        return self._references.name(thing)

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, CodeType) and thing.co_filename != _NO_FILE:
            return _in_file, (thing.replace(co_filename=_NO_FILE), thing.co_filename)
        reduced = self._references.reduce(thing)
        return super().reducer_override(thing) if reduced is NotImplemented else reduced


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: Any, references: References, **options: Any) -> None:
        super().__init__(file, **options)
        self._references = references

    def persistent_load(self, name: Any) -> Any:
        return self._references.resolve(name)


def pack(thing: Any, references: References) -> Packed:
    """What can be sent; after the first array follow the contiguous ones, uncopied.

    Raises what pickle raises, and TypeError for most of what can't be packed.
    """
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Packer(file, references, buffer_callback=buffers.append).dump(thing)
    return [
        np.frombuffer(part, np.uint8)
        for part in (file.getbuffer(), *(each.raw() for each in buffers))
    ]


def pack_copy(thing: Any, references: References) -> Packed:
    """As `pack`, with copies of all arrays: nothing that changes later changes them."""
    first, *arrays = pack(thing, references)
    return [first, *(array.copy() for array in arrays)]


def unpack(arrays: Packed, references: References) -> Any:
    """What was packed, in the memory of the arrays after the first one."""
    first, *buffers = arrays
    return _Unpacker(io.BytesIO(first.data), references, buffers=buffers).load()
