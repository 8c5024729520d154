"""Initial values of variables, and their dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.cuda.runtime import on_gpu
from strategies.core.values import Array, as_array, cast

_OF_PYTHON: dict[Any, Any] = {float: np.float32, int: np.int32}


def as_initial(initial_value: Any, dtype: Any) -> Array:
    """A new array of the value, or of the function's result, in the dtype.

    dtype None: as TensorFlow chooses it for numbers of Python and lists, tuples and ranges of them;
    otherwise NumPy's. (Of a list of NumPy's scalars TensorFlow takes the first one's, into which
    the others may not fit.) An array on a GPU is copied there. Raises TypeError where fractions or
    imaginary parts would be lost, ValueError for numbers after a bool, OverflowError for an integer
    that the dtype can't hold.
    """
    value = initial_value() if callable(initial_value) else initial_value
    if on_gpu(value):
        return _on_gpu(value, dtype)
    array = np.array(as_array(value, "initial_value"))
    if dtype is not None:
        wanted = np.dtype(_OF_PYTHON.get(dtype) or getattr(dtype, "as_numpy_dtype", dtype))
    else:
        wanted = _small(value, array) if _of_python(value) else array.dtype
    check_held("initial_value", array, wanted, wanted)
    given = np.array(value, wanted) if _of_python(value) else array
    return given.astype(wanted.newbyteorder("="), copy=False)


def _on_gpu(value: Any, dtype: Any) -> Array:
    given = as_array(value, "initial_value", gpu=True)
    wanted = given.dtype if dtype is None else np.dtype(_OF_PYTHON.get(dtype) or dtype)
    check_held("initial_value", given, wanted, wanted)
    return cast(given.copy(), wanted)


def _of_python(value: Any) -> bool:
    """Whether it consists of Python's own numbers: NumPy's float64 is a float, too."""
    if isinstance(value, list | tuple):
        return all(map(_of_python, value))
    return isinstance(value, range) or type(value) in (bool, float, int)


def _small(value: Any, array: Array) -> np.dtype[Any]:
    """The dtype that TensorFlow gives such numbers, of which `array` is made."""
    if array.dtype.kind != "b" and array.size and _first(value) is bool:
        raise ValueError("initial_value has numbers after a bool: give numbers or bools alone")
    if array.dtype.kind == "f":
        return np.dtype(np.float32)
    if array.dtype.kind == "i":
        limits = np.iinfo(np.int32)
        if limits.min <= array.min() and array.max() <= limits.max:
            return np.dtype(np.int32)
    return array.dtype


def _first(value: Any) -> type:
    """The type of the first of such numbers."""
    while isinstance(value, list | tuple | range):
        value = value[0]
    return type(value)


def check_held(name: str, given: Array, wanted: np.dtype[Any], holder: object) -> None:
    """TypeError where a dtype loses fractions or imaginary parts, OverflowError for integers."""
    kinds = given.dtype.kind, wanted.kind
    if (kinds[0] == "c" and kinds[1] != "c") or (kinds[0] not in "biu" and kinds[1] in "biu"):
        raise TypeError(
            f"{name} has dtype {given.dtype}, which {holder} can't hold: convert it first"
        )
    if kinds[0] not in "iu" or kinds[1] not in "iu" or np.can_cast(given.dtype, wanted):
        return
    limits = np.iinfo(wanted)
    for each in (given.min(), given.max()) if given.size else ():
        if not limits.min <= int(each) <= limits.max:
            raise OverflowError(f"{name} has {int(each)}, which {holder} can't hold")
