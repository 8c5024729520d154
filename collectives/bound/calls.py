"""What the bound calls of one communicator have in common: they are found by op, dtype and shape.

Plain torch tensors are taken as their memory. Other arrays that a bound call can't take as they are
(of another library, strides or dtype than that of the fold) are converted first, and then passed to
the same bound call: all ranks take the same path, whatever arrays they pass.

Blocking calls, asynchronous ones and those with a forced algorithm are bound alike, on the engine
that makes them. Each has a function that checks its arguments and returns the `Operation`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from collectives.arrays.tensor_memory import TensorMemory
from collectives.arrays.tensors import to_torch
from collectives.calls import PASS, Operation
from collectives.consistency.signature import Signature
from collectives.cuda.interface import DeviceArray, is_torch
from collectives.cuda.runtime import cuda
from collectives.execution.engine import Engine
from collectives.reductions.reduction import Array, ReduceOp

Bound = Callable[..., Any]

_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
OPS = str, ReduceOp


def call(
    engine: Engine, key: Any, bind: Callable[[Engine], Bound], source: Any, target: Any
) -> Any:
    """Make the call of that key, which is bound where it isn't yet."""
    known = engine.bound_calls
    for _ in range(2):
        bound = known.get(key)
        if bound is None:
            bound = known.put(key, bind(engine))
        result = bound(source, target)
        # Bound before another thread made the first registered array: once more.
        if result is not PASS:
            return result
        known.pop(key, None)
    raise AssertionError(f"{key}: no call was made")


def bound_operation(
    signature: Signature,
    key: tuple[Any, ...],
    bind: Callable[[Engine], Bound],
    source: Any,
    target: Any,
    deliver: Callable[[Any], Any],
    algorithm: str | None = None,
) -> Operation:
    """The operation that makes the bound call, and returns what `deliver` makes of its result.

    `bind` binds it with the forced algorithm, if there is one.
    """
    kind = key if algorithm is None else _forced(key, algorithm)

    def run(engine: Engine) -> Any:
        return deliver(call(engine, kind, bind, source, target))

    return Operation(signature, run, checks=True)


def _forced(key: tuple[Any, ...], algorithm: str) -> tuple[Any, ...]:
    return "algorithm", algorithm, *key


def operation_on_gpu(
    signature: Signature, source: Any, target: Any, deliver: Callable[[], Any], **how: Any
) -> Operation:
    """A call on a GPU that isn't bound: the ranks' first one chooses the path of the later ones.

    `how`: as for `Engine.run`.
    """

    def run(engine: Engine) -> Any:
        engine.run(signature.collective, source, target, **how)
        return deliver()

    return Operation(signature, run, on_gpu=True)


def as_it_is(result: Any) -> Any:
    """For `bound_operation`, where a bound call returns the result."""
    return result


class BoundCalls:
    """The blocking calls of one communicator: those that were bound are found first."""

    def __init__(
        self, engine: Engine, check_open: Callable[[], None], run: Callable[[Operation], Any]
    ) -> None:
        """`check_open` raises where no call can be made; `run` makes a call that wasn't found."""
        self._engine, self._check_open, self._run = engine, check_open, run
        self.bound_calls = engine.bound_calls
        """By key: of `all_reduce` (op, dtype, shape) or (op, dtype, shape, what).

        Keys of other collectives have other lengths or begin with the collective's name, so that
        an unknown op never finds the call of another collective.
        """
        self._tensors = TensorMemory()

    def _find(self, key: tuple[Any, ...], algorithm: str | None) -> Bound | None:
        if algorithm is None:
            return self.bound_calls.get(key)
        return self.bound_calls.get(_forced(key, algorithm)) if type(algorithm) is str else None

    def _on_tensor(
        self,
        key: tuple[Any, ...],
        algorithm: str | None,
        source: Array | None,
        target: Array | None,
        out: Any,
    ) -> Any:
        """A call on the memory of a tensor, and of `out`."""
        # As `_find` does, without entering one more function in most calls.
        bound = self.bound_calls.get(key) if algorithm is None else self._find(key, algorithm)
        if bound is None:
            return PASS
        if out is None:
            return self._engine.whole(_as_tensor, bound, source)
        return PASS if bound(source, target) is PASS else out

    def _on_gpu(
        self, collective: str, array: Any, out: Any, op: Any = None, axis: Any = 0, root: int = 0
    ) -> Any:
        """A call of an array on a GPU; PASS where it isn't bound."""
        if type(array) is cuda().array_type:
            bound = self._bound_on_gpu(collective, array, op, axis, root)
            return PASS if bound is None else bound(array, out)
        found = self.find_on_gpu(collective, array, out=out, op=op, axis=axis, root=root)
        return PASS if found is None else self._engine.whole(found.run)

    def find_on_gpu(
        self,
        collective: str,
        array: Any,
        *,
        out: Any = None,
        op: Any = None,
        axis: Any = 0,
        root: Any = 0,
    ) -> CallOnGpu | None:
        """The bound call of an array or a tensor on a GPU; None where there is none.

        Nothing is sent.
        """
        if not (type(root) is int and 0 <= root < self._engine.size):
            return None
        if collective == "broadcast":
            out = array
        elif collective == "reduce" and root != self._engine.rank:
            out = None
        source, target, tensor = array, out, None
        gpus = cuda()
        if type(array) is not gpus.array_type:
            if not is_torch(array) or (source := gpus.of_tensor(array)) is None:
                return None
            tensor = array
            if out is array:
                target = source
            elif out is not None and (not is_torch(out) or (target := gpus.of_tensor(out)) is None):
                return None
        bound = self._bound_on_gpu(collective, source, op, axis, root)
        return None if bound is None else CallOnGpu(bound, source, target, tensor, out)

    def _bound_on_gpu(
        self, collective: str, array: DeviceArray, op: Any, axis: Any, root: int
    ) -> Bound | None:
        """The bound call for arrays like this one; None where there is none.

        It is bound in the first call, in which all ranks choose a path, for the next one.
        """
        known_op = isinstance(op, OPS) if collective in _REDUCTIONS else op is None
        if not (known_op and type(axis) is int and axis == 0):
            return None
        kind = "on a GPU", collective, op, array.dtype, array.shape, root
        bound, devices = self.bound_calls.get(kind), self._engine.devices
        if bound is None and devices is not None:
            self._check_open()
            made = devices.bind(collective, array, op, root)
            if made is not None:
                self.bound_calls.put(kind, made)
        return bound


class CallOnGpu(NamedTuple):
    """A bound call on the memory of arrays or tensors on a GPU."""

    bound: Bound
    source: DeviceArray
    target: DeviceArray | None
    tensor: Any
    """The tensor whose memory the source is, or None."""
    out: Any

    def run(self) -> Any:
        """Make the call; its result, or PASS where the arrays are not what was bound."""
        result = self.bound(self.source, self.target)
        if self.tensor is None or result is PASS:
            return result
        if result is not None and self.out is None:
            return cuda().export(result, self.tensor)
        # What was read may be overwritten from now on, too.
        cuda().hand_back(self.tensor)
        return self.out


def _as_tensor(bound: Bound, source: Array | None) -> Any:
    """The array that a bound call returns as a tensor; None or PASS where it returns that.

    For `CallScope.whole`: a signal's exception in the conversion must not look like that of a call
    that was not made.
    """
    result = bound(source, None)
    return result if result is None or result is PASS else to_torch(result)
