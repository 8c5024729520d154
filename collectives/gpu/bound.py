"""Bound all_reduce of device arrays: the counterpart of `calls.bound`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from collectives.calls import PASS
from collectives.calls.bound import bind
from collectives.calls.reductions import ReduceInput
from collectives.cuda.interface import DeviceArray
from collectives.cuda.runtime import cuda
from collectives.execution.device_path import DevicePath
from collectives.execution.engine import Engine
from collectives.transports.nccl_driver import NcclError


def bind_all_reduce(
    engine: Engine,
    path: DevicePath,
    number: int,
    given: ReduceInput,
    failed: Callable[[NcclError], Exception],
) -> Callable[[DeviceArray, Any], Any] | None:
    """A function (array, out) → result for arrays like the given one, on GPU `number`.

    None if the path offers none. The function returns PASS, before any side effect, for arguments
    that it does not support. `failed` converts an NCCL error.
    """
    shape, dtype, nbytes = given.shape, given.dtype, given.array.nbytes
    whole = nbytes and given.array.dtype == dtype
    reduce = path.bind_all_reduce(given.op, dtype) if whole else None
    if reduce is None:
        return None
    gpus, kind, empty = cuda(), cuda().array_type, cuda().empty
    device_of, current_device, address = gpus.device_of, gpus.current_device, gpus.address

    def run(source: DeviceArray, target: DeviceArray, index: int | None) -> None:
        try:
            reduce(source, target)
        except NcclError as error:
            raise failed(error) from error

    call = bind(engine, given.signature("all_reduce").on_gpu(), run, path=path.name)

    def fits(out: Any, array: DeviceArray) -> bool:
        return (
            type(out) is kind
            and out.shape == shape
            and out.dtype == dtype
            and out.flags.c_contiguous
            and device_of(out) == number
            and abs(address(out) - address(array)) >= nbytes
        )

    def all_reduce(array: DeviceArray, out: Any) -> Any:
        here = device_of(array) == number == current_device()
        if not here or not array.flags.c_contiguous:
            return PASS
        if out is None:
            out = empty(shape, dtype)
        elif out is not array and not fits(out, array):
            return PASS
        return PASS if call(array, out) is PASS else out

    return all_reduce
