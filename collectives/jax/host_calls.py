"""Calls of Python functions from compiled JAX programs, with XLA's buffers as NumPy arrays.

The handler of XLA's foreign function interface is a ctypes callback. On GPUs, and where JAX's
version of the interface isn't known, `io_callback` takes its place, which copies every array.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from typing import Any

import jax
import numpy as np

from collectives.caching import LRU
from collectives.jax import ffi_structures as ffi

HostFunction = Callable[[Sequence[Any], Sequence[Any]], object]
"""Reads the first argument's arrays, and writes the second's."""


Kind = tuple[tuple[int, ...], np.dtype[Any]]
"""The shape and dtype of an array."""

TARGET = "collectives_host_call"
_SETS_KEPT = 16


class _Places(dict[int, Callable[[int], None]]):
    def __missing__(self, number: int) -> Callable[[int], None]:
        raise RuntimeError("a program that another process has compiled: compile it in this one")


_places = _Places()


class _Running(threading.local):
    """The number of host functions that run in this thread."""

    count = 0


running = _Running()


class _Failure:
    """The last exception of a function, on any of XLA's threads."""

    error: BaseException | None = None


@contextmanager
def original_errors() -> Iterator[None]:
    """A context in which an exception of a function in a compiled program is raised as itself.

    JAX raises a JaxRuntimeError with its text otherwise, or a ValueError once the program has run.
    """
    _Failure.error = None
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise_original(error)
        raise
    finally:
        _Failure.error = None


def raise_original(error: BaseException | None) -> None:
    """Raise the last exception of a function in a program, if JAX's error has its text."""
    original = _Failure.error
    if original is None or not isinstance(error, jax.errors.JaxRuntimeError | ValueError):
        return
    # The program may have caught that one: this error is another, without its text.
    text = str(original)
    if text in str(error) and (text or isinstance(error, jax.errors.JaxRuntimeError)):
        _Failure.error = None
        raise original from None


def call_back(
    way: Callable[..., Any],
    function: HostFunction,
    arrays: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
    """Call a function from a program by one of JAX's own ways; arrays as `results`."""
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in results]
    dtypes = [np.dtype(each.dtype) for each in arrays]

    def on_host(*given: Any) -> list[Any]:
        written = [np.empty(each.shape, each.dtype) for each in shapes]
        read = [np.asarray(each) for each in given]
        try:
            if [each.dtype for each in read] != dtypes:
                raise TypeError(
                    "JAX gives callbacks 64-bit arrays only where all threads have them: set"
                    " jax.config.update('jax_enable_x64', True) in place of jax.enable_x64()"
                )
            running.count += 1
            try:
                function(read, written)
            finally:
                running.count -= 1
        except BaseException as error:
            _Failure.error = error
            raise
        return written

    return list(way(on_host, shapes, *arrays))


def kinds_of(arrays: Sequence[Any]) -> tuple[Kind, ...]:
    """What `number_of` takes; TypeError for a dtype that NumPy's memory can't have."""
    kinds = tuple((tuple(each.shape), np.dtype(each.dtype)) for each in arrays)
    for _, dtype in kinds:
        if dtype not in ffi.DTYPES:
            names = ", ".join(sorted(map(str, ffi.DTYPES)))
            raise TypeError(f"an array of {dtype}: must be of one of the dtypes {names}")
    return kinds


@cache
def number_of(
    function: HostFunction, arguments: tuple[Kind, ...], results: tuple[Kind, ...]
) -> int:
    """The number by which a program refers to the function, called with such arrays.

    A random one, as a program in JAX's persistent cache would refer to another process's function.
    A program may pass further arrays after these: the function doesn't get them.
    """
    number = secrets.randbits(62)
    single = len(arguments) == len(results) == 1
    _places[number] = (_SinglePlace if single else _Place)(function, arguments, results)
    return number


class _SinglePlace:
    """A function of one array, with one result: at each call XLA gives it their addresses."""

    def __init__(
        self, function: HostFunction, arguments: tuple[Kind, ...], results: tuple[Kind, ...]
    ) -> None:
        self._function = function
        self._input, self._output = _view_of(arguments[0]), _view_of(results[0])
        self._one_kind = self._input is self._output

    def __call__(self, frame: int) -> None:
        address, result_address = ffi.first(frame, ffi.ARGUMENTS), ffi.first(frame, ffi.RESULTS)
        array = self._input(address)
        # One array for a result in the place of the argument: calls recognize it as in place.
        shared = self._one_kind and address == result_address
        self._function((array,), (array if shared else self._output(result_address),))


class _Place:
    """A function of any number of arrays.

    A compiled program uses few sets of addresses in turn. The arrays of each are kept, with what
    the function prepares for them.
    """

    def __init__(
        self, function: HostFunction, arguments: tuple[Kind, ...], results: tuple[Kind, ...]
    ) -> None:
        self._function = function
        self._views = [_view_of(kind) for kind in (*arguments, *results)]
        self._inputs, self._outputs = len(arguments), len(results)
        self._actions: LRU[Any, Callable[[], object]] = LRU(_SETS_KEPT)

    def __call__(self, frame: int) -> None:
        arguments = ffi.memory(frame, ffi.ARGUMENTS, self._inputs)
        results = ffi.memory(frame, ffi.RESULTS, self._outputs)
        addresses = arguments + results
        (self._actions.recall(addresses) or self._prepare(addresses))()

    def _prepare(self, addresses: tuple[int, ...]) -> Callable[[], object]:
        made: dict[Any, Any] = {}
        arrays = []
        for view, address in zip(self._views, addresses, strict=True):
            if (view, address) not in made:
                made[view, address] = view(address)
            arrays.append(made[view, address])
        read, written = arrays[: self._inputs], arrays[self._inputs :]
        # What a function does once for arrays that it gets again and again.
        prepare = getattr(self._function, "prepare", None)
        action = prepare(read, written) if prepare else partial(self._function, read, written)
        return self._actions.put(addresses, action)


@cache
def _view_of(kind: Kind) -> Callable[[int], Any]:
    """What makes an array of XLA's memory at an address; one function for each kind."""
    shape, dtype = kind
    length = math.prod(shape) * dtype.itemsize
    if not length:
        return lambda address: np.empty(shape, dtype)
    memory_at: Callable[[int], Any] = (ctypes.c_char * length).from_address
    return lambda address: np.ndarray(shape, dtype, memory_at(address))


@lru_cache(maxsize=1)
def uses_ffi() -> bool:
    """Whether calls go through XLA's foreign function interface; registers the handler."""
    try:
        jax.devices("cpu")  # XLA declares its interface only once the backend exists
        # The address of the capsule's function must stay valid.
        address = ctypes.cast(_handler, ctypes.c_void_p).value
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(address), platform="cpu")
    except Exception:
        return False
    return _Interface.known


class _Interface:
    """What XLA has declared when the handler was registered."""

    known = False


def _handle(address: int) -> int | None:
    if ffi.asks_version(address):
        _declare(ffi.Frame.from_address(address))
        return None
    running.count += 1
    try:
        _places[ffi.attribute(address)](address)
        return None
    except BaseException as error:
        _Failure.error = error
        text = "".join(traceback.format_exception_only(error)).strip().encode()
        described = ffi.ErrorArguments(
            ctypes.sizeof(ffi.ErrorArguments), None, text, ffi.INTERNAL_ERROR
        )
        create = ffi.CreateError(ffi.Frame.from_address(address).api.contents.error_create)
        created: int | None = create(ctypes.byref(described))
        return created
    finally:
        running.count -= 1


_handler = ffi.Handler(_handle)


def _declare(frame: Any) -> None:
    """Answer XLA's request for the version of the interface that the handler has."""
    # JAX before 0.8 passes no interface here; XLA itself compares the versions then.
    api = frame.api
    _Interface.known = not api or api.contents.version.major == ffi.MAJOR_VERSION
    extension = ctypes.cast(frame.extension, ctypes.POINTER(ffi.MetadataExtension)).contents
    version = extension.metadata.contents.version
    version.major, version.minor = ffi.MAJOR_VERSION, ffi.MINOR_VERSION
