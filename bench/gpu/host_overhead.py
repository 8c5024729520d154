"""Cost of a call in Python alone: `python -m bench.gpu.host_overhead [--profile]`.

A CUDA and an NCCL without effect replace the real ones, so that it runs on any machine, with the
host's clock. The result is this package's part of a call's overhead. On a GPU, the time of CuPy's
own methods (events, streams, `__cuda_array_interface__`) is added.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.cuda import interface, runtime
from collectives.gpu import probe
from collectives.transports import local
from collectives.transports.nccl_driver import NcclDriver

# Repeats of about a millisecond: on a loaded machine some run undisturbed.
_CALLS, _REPEATS, _PROFILED, _LINES = 200, 500, 20_000, 15
_TENSORS = 1000


class NullArray(np.ndarray[Any, Any]):
    """An array that is treated as a device array."""

    __cuda_array_interface__ = None


class _NullEvent:
    def done(self) -> bool:
        return True


class _NullStream:
    handle = 7

    def record(self, again: Any = None) -> Any:
        return again or _NullEvent()

    def wait(self, event: Any) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def same_as(self, other: Any) -> bool:
        return self is other

    def synchronize(self) -> None:
        pass


def _nothing(*arguments: Any) -> None:
    pass


def null_cuda() -> interface.Cuda:
    """A CUDA whose methods return at once."""
    stream = _NullStream()

    def empty(self: Any, shape: Any, dtype: Any) -> NullArray:
        return np.empty(shape, dtype).view(NullArray)

    methods: dict[str, Any] = dict.fromkeys(interface.Cuda.__abstractmethods__, _nothing)
    methods |= {
        "array_type": NullArray,
        "device_count": lambda self: 1,
        "current_device": lambda self: 0,
        "device_of": lambda self, array: 0,
        "uuid": lambda self, number: "GPU-0",
        "capability": lambda self, number: (9, 0),
        "array": lambda self, given: given,
        "export": lambda self, array, original: array,
        "read_only": lambda self, original: False,
        "empty": empty,
        "is_contiguous": lambda self, array: True,
        "pinned": lambda self, nbytes: np.empty(nbytes, np.uint8),
        "address": lambda self, array: id(array.base),
        "current_stream": lambda self: stream,
        "current_streams": lambda self: [stream],
        "new_stream": lambda self: _NullStream(),
        "on": lambda self, stream: nullcontext(),
        "beside": lambda self, stream: nullcontext(),
        "as_torch": lambda self: nullcontext(),
        "of_tensor": lambda self, tensor: None,
    }
    made: interface.Cuda = type("NullCuda", (interface.Cuda,), methods)()
    return made


class NullNccl:
    """An `NcclDriver` without effect."""

    def version(self) -> int:
        """An arbitrary version."""
        return 22809

    def unique_id(self) -> bytes:
        """An arbitrary identifier."""
        return bytes(128)

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Any other function."""
        if not hasattr(NcclDriver, name):
            raise AttributeError(name)
        # Stored, so that later lookups are as fast as those of a method.
        setattr(self, name, _nothing)
        return _nothing


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the times; always returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.host_overhead")
    parser.add_argument("--profile", action="store_true", help="also where the time goes")
    options = parser.parse_args(arguments)
    with null_communicator() as comm:
        calls = _calls(comm)
        times = {name: _fastest(call) for name, call in calls.items()}
        bare = times["the driver's call"]
        for name, seconds in times.items():
            print(f"{name:40} {seconds * 1e6:7.2f} µs  (+{(seconds - bare) * 1e6:.2f})")
        arrays, out = (np.split(np.zeros(_TENSORS).view(NullArray), _TENSORS) for _ in range(2))
        many = _fastest(partial(comm.all_reduce_many, arrays, out=out), calls=1)
        print(f"all_reduce_many of {_TENSORS} arrays, out=out   {many * 1e6:7.0f} µs")
        if options.profile:
            _profile(calls["all_reduce(array, out=out)"])
    return 0


def null_communicator() -> Communicator:
    """Of one rank, "over NCCL"."""
    driver: Any = NullNccl()
    runtime._made = null_cuda()
    setattr(probe, "nccl_driver", lambda: driver)  # noqa: B010 (mypy takes it for a constant)
    return Communicator(local.alone(), backend="nccl")


def _calls(comm: Communicator) -> dict[str, Callable[[], Any]]:
    array, out, other = (np.zeros(1, np.float32).view(NullArray) for _ in range(3))
    driver = probe.nccl_driver()
    return {
        "the driver's call": partial(driver.enqueue, None, "all_reduce", 4096, 8192, 1, 7, 0, 7),
        "all_reduce(array, out=out)": partial(comm.all_reduce, array, out=out),
        "all_reduce(array, out=array)": partial(comm.all_reduce, other, out=other),
        "all_reduce(array)": partial(comm.all_reduce, array),
        "broadcast(array)": partial(comm.broadcast, array),
        "reduce(array, out=out)": partial(comm.reduce, array, out=out),
        "all_gather(array, out=out)": partial(comm.all_gather, array, out=out),
        "reduce_scatter(array, out=out)": partial(comm.reduce_scatter, array, out=out),
    }


def _fastest(call: Callable[[], Any], calls: int = _CALLS) -> float:
    """Seconds per call, of the best repeat: what disturbs the others is no part of the call."""
    times = []
    for _ in range(_REPEATS):
        start = perf_counter()
        for _ in range(calls):
            call()
        times.append((perf_counter() - start) / calls)
    return min(times)


def _profile(call: Callable[[], Any]) -> None:
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(_PROFILED):
        call()
    profile.disable()
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(_LINES)


if __name__ == "__main__":
    sys.exit(main())
