"""Buckets of gradients, each reduced as a whole, and their calls.

A dense bucket is one registered array, of which the gradients are views, so that no call copies
them. Every rank makes the calls of all buckets in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from collectives.arrays.tensors import from_torch, to_torch
from collectives.communicator import Communicator

Finish = Callable[[], None]

# A smaller copy costs more as a call of its own than it takes once the gradient has left the cache.
_LARGE_BYTES = 64 << 10


class UnusableGradientError(ValueError):
    """This rank can't reduce a gradient; no call was made, and no gradient changed."""


class Member(NamedTuple):
    """A parameter and its name, equal on all ranks."""

    name: str
    parameter: Any


class Accumulated:
    """Gradients of earlier backwards that no round has reduced yet."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        """The ids of parameters with such gradients."""
        self.weights: list[Any] = []
        """The weights that were set for these backwards, one after the other."""

    def add(self, key: int, weight: Any) -> None:
        """Note the gradient of a parameter."""
        self.keys.add(key)
        if weight is not None and not (self.weights and self.weights[-1] is weight):
            self.weights.append(weight)

    def clear(self) -> None:
        """Note that all are reduced, or none will be."""
        self.keys.clear()
        self.weights.clear()


class Bucket(Protocol):
    """Parameters whose gradients are reduced together."""

    members: Sequence[Member]
    """The parameters."""

    calls: int
    """How many collective calls `start` makes."""

    on_gpu: bool
    """Whether they are made in the order of blocking calls, asynchronous or not."""

    def start(self, op: str, scale: float | None, *, overlap: bool) -> Finish:
        """Reduce the gradients, or start to; the result is complete after the returned function.

        With `scale`, it is the sum of the ranks' gradients times their scales; 0 discards even NaN.
        UnusableGradientError for one whose parameter has another dtype, shape or strides now.
        """

    def holds(self, parameter: Any) -> bool:
        """Whether the parameter's gradient may still be the result of a reduction."""

    def leaves_out(self) -> bool:
        """Whether a reduction leaves something out, which `commit` adds to the next one."""
        return False

    def commit(self, absent: Collection[int]) -> None:
        """Keep what the reduction has left out, except of parameters of these ids."""
        return

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """A reduction of all these buckets begins, with the first gradient that arrives."""
        return

    def contains(self, gradient: Any) -> bool:
        """Whether a dense gradient lies in memory of the bucket."""
        return False

    def take_large(self, key: int, parameter: Any) -> None:
        """Move the gradient of the parameter, of that id, into the bucket now if that is faster."""
        return


class DenseBucket(Bucket):
    """Parameters of one dtype and device."""

    calls = 1

    def __init__(self, comm: Communicator, members: Sequence[Member], wire: Any, what: str) -> None:
        """`wire` is a narrower dtype for the messages, or None. Collective.

        `what` is the text of blocking calls on the CPU, by which models of equal shapes differ.
        """
        self._comm, self.members = comm, members
        length = sum(each.parameter.numel() for each in members)
        first = members[0].parameter
        self.on_gpu = first.is_cuda
        # A call on a GPU that has a text isn't bound.
        self._what = None if self.on_gpu else what
        narrow = wire is not None and first.is_floating_point() and first.itemsize > wire.itemsize
        dtype = wire if narrow else first.dtype
        if first.device.type == "cpu":
            self._array: Any = _zeros(comm, length, dtype)
            self._sent = to_torch(self._array)
        else:
            self._array = self._sent = torch.zeros(length, dtype=dtype, device=first.device)
        self._flat = torch.zeros_like(self._sent, dtype=first.dtype) if narrow else self._sent
        self._addresses = self._find_addresses()
        self._indices = {id(each.parameter): index for index, each in enumerate(members)}
        self._large = {id(each) for _, each in members if each.nbytes >= _LARGE_BYTES}
        self._missing: set[int] = set()
        self._taken: set[int] = set()
        self._places = self._cut()
        self._views = [place.detach() for place in self._places]
        self._kinds = [kind_of(each.parameter) for each in members]

    def _cut(self) -> list[Any]:
        """The parts of the bucket, one for each parameter."""
        places, start = [], 0
        for _, parameter in self.members:
            # Dense, in the order in which the parameter lies in memory.
            strides = torch.empty_like(parameter, device="meta").stride()
            places.append(self._flat.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return places

    def _find_addresses(self) -> range:
        """Those of the bucket's bytes."""
        first = self._flat.data_ptr()
        return range(first, first + self._flat.nbytes)

    def start(self, op: str, scale: float | None, *, overlap: bool) -> Finish:
        """Move gradients that lie elsewhere into the bucket, and reduce it."""
        narrowed = self._sent is not self._flat
        narrow_range = narrowed or self._flat.dtype is torch.float16
        if narrow_range and op == "mean" and scale is None:
            # Else the sum could overflow.
            scale = 1 / self._comm.size
        if scale is not None:
            op = "sum"
        refuse_changed(self.members, self._kinds)
        with torch.no_grad():
            self._collect()
            if scale == 0:
                self._flat.zero_()
            elif scale is not None:
                self._flat.mul_(scale)
            if narrowed:
                self._sent.copy_(self._flat)
        self._taken.clear()
        return self._reduce(op, overlap)

    def _reduce(self, op: str, overlap: bool) -> Finish:
        if not overlap:
            self._comm.all_reduce(self._array, op, out=self._array, what=self._what)
            return self._finish
        handle = self._comm.all_reduce_async(self._array, op, out=self._array)

        def finish() -> None:
            handle.wait()
            self._finish()

        return finish

    def holds(self, parameter: Any) -> bool:
        """Whether the gradient is a view of the bucket, or was one."""
        index, gradient = self._indices[id(parameter)], parameter.grad
        if id(parameter) in self._taken:
            return False
        if gradient is self._views[index]:
            return True
        return not gradient.is_sparse and gradient.is_set_to(self._places[index])

    def _collect(self) -> None:
        """Make each gradient a view of the bucket; one that is missing is zero.

        Memory is compared: an assignment to `gradient.data` moves a view out of the bucket.
        """
        if self._flat is self._sent and self._flat.data_ptr() != self._addresses.start:
            # `share_memory_` of a view has moved the storage.
            self._sent = self._flat = to_torch(self._array)
            self._places, self._addresses = self._cut(), self._find_addresses()
        missing, outside, gradients = [], [], []
        for index, (_, parameter) in enumerate(self.members):
            gradient, place = parameter.grad, self._places[index]
            if gradient is None:
                missing.append(place)
            elif gradient.is_sparse:
                outside.append(place)
                gradients.append(gradient.to_dense())
            elif gradient.is_set_to(place):
                continue
            else:
                # A hook may have exchanged gradients since the reduction began.
                outside.append(place)
                gradients.append(gradient.clone() if self.contains(gradient) else gradient)
            parameter.grad = self._view(index)
        if missing:
            torch._foreach_zero_(missing)
        if outside:
            torch._foreach_copy_(outside, gradients)

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Note which large gradients autograd is going to make; copy those in others' places."""
        self._missing.clear()
        for index, (_, parameter) in enumerate(self.members):
            gradient = parameter.grad
            if gradient is None:
                if id(parameter) in self._large:
                    self._missing.add(id(parameter))
            elif gradient is not self._views[index] and not gradient.is_sparse:
                own = gradient.is_set_to(self._places[index])
                if not own and any(each.contains(gradient) for each in buckets):
                    parameter.grad = gradient.clone()

    def contains(self, gradient: Any) -> bool:
        """Whether it begins in the bucket."""
        return gradient.data_ptr() in self._addresses

    def take_large(self, key: int, parameter: Any) -> None:
        """Copy a large gradient while it is in the core's cache; `start` moves the others.

        One that autograd has made: any other may be another parameter's, too, and still change.
        """
        if key not in self._missing:
            return
        index, gradient = self._indices[key], parameter.grad
        place = self._places[index]
        if gradient is None or gradient.is_sparse:
            return
        if (gradient.dtype, gradient.shape) == (place.dtype, place.shape):
            place.copy_(gradient)
            parameter.grad = self._view(index)
            self._taken.add(key)

    def _view(self, index: int) -> Any:
        """What the gradient of a parameter becomes."""
        place = self._places[index]
        if not self._views[index].is_set_to(place):
            self._views[index] = place.detach()
        return self._views[index]

    def _finish(self) -> None:
        if self._sent is not self._flat:
            self._flat.copy_(self._sent)


def kind_of(parameter: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """What a gradient must fit: dtype, shape, and strides, which fused optimizers don't compare."""
    return parameter.dtype, parameter.shape, parameter.stride()


def refuse_changed(members: Sequence[Member], kinds: Sequence[Any]) -> None:
    """UnusableGradientError, whose text lacks the remedy, for a parameter of another kind now."""
    for (name, each), kind in zip(members, kinds, strict=True):
        if kind_of(each) != kind:
            raise UnusableGradientError(f"{name}: it was {kind} at first, is {kind_of(each)} now: ")


def _zeros(comm: Communicator, length: int, dtype: Any) -> Any:
    """Registered memory, unless the communicator registers memory of GPUs."""
    array = comm.zeros(length, str(dtype).removeprefix("torch."))
    if isinstance(array, np.ndarray):
        return array
    return from_torch(torch.zeros(length, dtype=dtype), "gradients").copy()
