"""The structures of XLA's foreign function interface, as ctypes (xla/ffi/api/c_api.h, version 0.1).

XLA raises the minor version when it appends fields to structures, and the major version when it
moves fields.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import ClassVar

import ml_dtypes
import numpy as np

MAJOR_VERSION, MINOR_VERSION = 0, 1
METADATA_EXTENSION = 1
INTERNAL_ERROR = 13

DTYPES = {
    1: np.dtype(bool),
    2: np.dtype("int8"),
    3: np.dtype("int16"),
    4: np.dtype("int32"),
    5: np.dtype("int64"),
    6: np.dtype("uint8"),
    7: np.dtype("uint16"),
    8: np.dtype("uint32"),
    9: np.dtype("uint64"),
    10: np.dtype("float16"),
    11: np.dtype("float32"),
    12: np.dtype("float64"),
    15: np.dtype("complex64"),
    16: np.dtype(ml_dtypes.bfloat16),
    18: np.dtype("complex128"),
    19: np.dtype(ml_dtypes.float8_e5m2),
    20: np.dtype(ml_dtypes.float8_e4m3fn),
    23: np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    24: np.dtype(ml_dtypes.float8_e5m2fnuz),
    25: np.dtype(ml_dtypes.float8_e4m3fnuz),
}


class Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base."""


Extension._fields_ = [("size", c_size_t), ("type", c_int), ("next", POINTER(Extension))]


class Version(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_: ClassVar = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("major", c_int),
        ("minor", c_int),
    ]


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
        ("size", c_size_t),
        ("extension", c_void_p),
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
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
    ]


class ErrorArguments(ctypes.Structure):
    """XLA_FFI_Error_Create_Args."""

    _fields_: ClassVar = [
        ("size", c_size_t),
        ("extension", c_void_p),
        ("message", c_char_p),
        ("code", c_int),
    ]


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
Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))
