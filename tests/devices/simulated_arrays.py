"""The arrays of a simulated GPU, and those of other libraries on it."""

import ctypes
from functools import partial

import numpy as np

# CuPy dispatches these too, and they touch no data.
_ABOUT_THE_ARRAY_ONLY = {np.moveaxis, np.shares_memory, np.may_share_memory, np.shape, np.ndim}


def plain(array):
    """The simulator's own view of a device array: unordered, so only for work on a stream.

    It doesn't keep the array's memory from being reused.
    """
    if not isinstance(array, OnDevice):
        return array
    view, memory = np.ndarray.view(array, np.ndarray), array.memory
    if memory is None:
        return view
    offset = _address(view) - _address(memory)
    unheld = np.ndarray(view.shape, view.dtype, memory, offset, view.strides)
    unheld.flags.writeable = view.flags.writeable
    return unheld


def _address(array):
    return array.__array_interface__["data"][0]


def memory_at(address, length, dtype):
    """A plain view of memory that doesn't keep it alive."""
    if length == 0:
        return np.empty(0, dtype)
    cells = (ctypes.c_uint8 * (length * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(cells, np.uint8).view(dtype)


def address_of(array):
    return _address(np.ndarray.view(array, np.ndarray))


def _interface(array, read_only):
    strides = None if array.flags.c_contiguous else array.strides
    return {
        "shape": array.shape,
        "typestr": array.dtype.str,
        "data": (address_of(array), read_only),
        "strides": strides,
        "version": 3,
    }


def _refused(name):
    def refuse(self, *arguments, **named):
        raise TypeError(f"{name}: a device array isn't converted to a host array implicitly")

    return refuse


def _absent(name):
    def get(self):
        raise AttributeError(f"{name}: is not among what `Cuda` says that device arrays have")

    return property(get)


class OnDevice(np.ndarray):
    """A device array. As with CuPy, it can't be combined with the host's arrays."""

    __array__ = _refused("__array__")
    __float__ = _refused("float")
    __int__ = _refused("int")
    __index__ = _refused("index")
    __bool__ = _refused("bool")
    # These would give the host access to the memory without waiting.
    __array_interface__ = _absent("__array_interface__")
    ctypes, data = _absent("ctypes"), _absent("data")
    item, tolist, tobytes = _absent("item"), _absent("tolist"), _absent("tobytes")
    fill, flatten, ravel = _absent("fill"), _absent("flatten"), _absent("ravel")

    def __array_finalize__(self, source):
        self.cuda, self.gpu = getattr(source, "cuda", None), getattr(source, "gpu", None)
        self.memory = getattr(source, "memory", None)

    @property
    def __cuda_array_interface__(self):
        return _interface(self, False)

    def _do(self, function):
        """At once, after the current stream's work; or into the graph that is being captured."""
        assert self.gpu == self.cuda.device, "the array lies on another GPU than the current one"
        stream = self.cuda.current_stream()
        if stream.capturing():
            stream.put(function)
        else:
            stream.synchronize()
            with np.errstate(all="ignore"):
                function()

    def _made(self, function):
        """The result of `function`, in new memory."""
        assert self.gpu == self.cuda.device, "the array lies on another GPU than the current one"
        self.cuda.refuse_capture("memory was allocated")
        self.cuda.current_stream().synchronize()
        with np.errstate(all="ignore"):
            return self.cuda.from_host(function())

    def get(self):
        self.cuda.current_stream().synchronize()
        return plain(self).copy()

    def copy(self, order="C"):
        assert order == "C"
        return self._made(lambda: plain(self))

    def astype(self, dtype, *, copy=True):
        if not copy and self.dtype == dtype:
            return self
        return self._made(lambda: plain(self).astype(dtype))

    def reshape(self, *shape):
        return super().reshape(*shape) if self.flags.c_contiguous else self.copy().reshape(*shape)

    def __getitem__(self, key):
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, list | np.ndarray) for part in parts):
            return self._made(lambda: plain(self)[tuple(map(plain, parts))])
        # The Ellipsis makes a view of what would be a NumPy scalar, read without waiting.
        return super().__getitem__(parts if Ellipsis in parts else (*parts, ...))

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __setitem__(self, key, value):
        _refuse_host_arrays((value,))
        self._do(partial(plain(self).__setitem__, key, plain(value)))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **named):
        if method not in ("__call__", "reduce") or ufunc.nout != 1:
            return NotImplemented
        _refuse_host_arrays((*inputs, *(out or ())))
        function = partial(getattr(ufunc, method), *map(plain, inputs), **named)
        if out is None:
            return self._made(function)
        self._do(partial(function, out=tuple(map(plain, out))))
        return out[0]

    def __array_function__(self, function, types, arguments, named):
        if function in _ABOUT_THE_ARRAY_ONLY:
            return super().__array_function__(function, types, arguments, named)
        if function is np.zeros_like and not named:
            return self._made(lambda: np.zeros_like(*map(plain, arguments)))
        if function is np.split and not named:
            array, parts = arguments
            length = len(array) // parts
            return [array[part * length : (part + 1) * length] for part in range(parts)]
        raise TypeError(f"numpy.{function.__name__} of a device array")

    def __repr__(self):
        return f"OnDevice({plain(self)!r})"


def _refuse_host_arrays(operands):
    for each in operands:
        if not isinstance(each, OnDevice) and np.ndim(each) > 0:
            raise TypeError(f"a device array together with the host's {type(each).__name__}")


class Foreign:
    """Another library's array, whose content is written and used on that library's own stream."""

    def __init__(self, memory, stream, read_only=False):
        self.memory, self.stream, self.read_only = memory, stream, read_only
        self.shape, self.dtype = memory.shape, memory.dtype

    @property
    def __cuda_array_interface__(self):
        return {**_interface(self.memory, self.read_only), "stream": self.stream.handle}

    def get(self):
        self.stream.synchronize()
        return plain(self.memory).copy()
