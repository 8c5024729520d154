"""The structures of XLA's foreign function interface, as ctypes (xla/ffi/api/c_api.h, version 0.1).

XLA raises the minor version when it appends fields to structures, and the major version when it
moves fields.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

MAJOR_VERSION, MINOR_VERSION = 0, 1
METADATA_EXTENSION = 1
INTERNAL_ERROR = 13

DTYPES = frozenset(
    map(
        np.dtype,
        (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128", ml_dtypes.bfloat16),
            *(ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3b11fnuz),
            *(ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e4m3fnuz),
        ),
    )
)
"""Those that XLA gives to functions of the host, of whole bytes."""


class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base."""


_HEAD: list[Any] = [("size", c_size_t), ("extension", c_void_p)]
"""The first fields of most structures."""

Extension._fields_ = [("size", c_size_t), ("type", c_int), ("next", POINTER(Extension))]


class Version(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_: ClassVar = [*_HEAD, ("major", c_int), ("minor", c_int)]


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata."""

    _fields_: ClassVar = [
        ("size", c_size_t),
        ("version", Version),
        ("traits", c_uint32),
        ("state_type", c_int64),
    ]


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension: XLA asks for the handler's version."""

    _fields_: ClassVar = [("base", Extension), ("metadata", POINTER(Metadata))]


class Buffer(ctypes.Structure):
    """XLA_FFI_Buffer."""

    _fields_: ClassVar = [
        *_HEAD,
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    ]


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("buffers", POINTER(POINTER(Buffer))),
    ]


class Scalar(ctypes.Structure):
    """XLA_FFI_Scalar, of an int64."""

    _fields_: ClassVar = [("dtype", c_int), ("value", POINTER(c_int64))]


class Attributes(ctypes.Structure):
    """XLA_FFI_Attrs."""

    _fields_: ClassVar = [
        ("struct_size", c_size_t),
        ("extension", c_void_p),
        ("size", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", POINTER(POINTER(Scalar))),
    ]


class Api(ctypes.Structure):
    """XLA_FFI_Api, as far as it is used."""

    _fields_: ClassVar = [
        *_HEAD,
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
    ]


class ErrorArguments(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_: ClassVar = [*_HEAD, ("message", c_char_p), ("code", c_int)]


class Frame(ctypes.Structure):
    """XLA_FFI_CallFrame: a call of the handler."""

    _fields_: ClassVar = [
        ("size", c_size_t),
        ("extension", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", Attributes),
        ("future", c_void_p),
    ]


CreateError = ctypes.CFUNCTYPE(c_void_p, POINTER(ErrorArguments))
Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)
"""A function of a frame's address."""


def _index(*fields: Any) -> int:
    """The position of a word in a structure, by the fields that lead to it."""
    return int(sum(each.offset for each in fields)) // 8


_EXTENSION = _index(Frame.extension)
ARGUMENTS = _index(Frame.arguments, Buffers.buffers)
RESULTS = _index(Frame.results, Buffers.buffers)
_VALUES = _index(Frame.attributes, Attributes.values)
_DATA = Buffer.data.offset
_Words = c_uint64 * (_VALUES + 1)
_VIEWS_KEPT = 4096
# Views by address: making one takes several times as long as to look it up. XLA's frames lie at few
# addresses, and a view reads what lies there now.
_frame_at = lru_cache(_VIEWS_KEPT)(_Words.from_address)
_word_at = lru_cache(_VIEWS_KEPT)(c_uint64.from_address)


def asks_version(address: int) -> bool:
    """Whether XLA calls the handler for its version."""
    extension = _frame_at(address)[_EXTENSION]
    return bool(extension) and Extension.from_address(extension).type == METADATA_EXTENSION


# What follows reads words, because the fields of ctypes' structures take several times as long.


def attribute(address: int) -> int:
    """The value of a frame's only attribute."""
    scalar = _word_at(_frame_at(address)[_VALUES]).value
    return _word_at(_word_at(scalar + Scalar.value.offset).value).value


def first(address: int, place: int) -> int:
    """The address of the memory of a frame's first argument or result."""
    return _word_at(_word_at(_frame_at(address)[place]).value + _DATA).value


def memory(address: int, place: int, count: int) -> tuple[int, ...]:
    """The addresses of the memory of a frame's first `count` arguments or results."""
    if not count:
        return ()
    pointers = _pointers_at(_frame_at(address)[place], count)
    return tuple([word.value for word in _data_of(tuple(pointers))])


@lru_cache(_VIEWS_KEPT)
def _pointers_at(address: int, count: int) -> Any:
    return (c_uint64 * count).from_address(address)


@lru_cache(_VIEWS_KEPT)
def _data_of(buffers: tuple[int, ...]) -> list[c_uint64]:
    return [c_uint64.from_address(each + _DATA) for each in buffers]
