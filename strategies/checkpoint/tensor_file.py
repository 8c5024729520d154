"""A checkpoint's file: named arrays in the safetensors format, with a checksum. No pickle.

Any safetensors reader (https://github.com/huggingface/safetensors) can read it. Its metadata have
one entry, "strategies.Checkpoint", which identifies the file: a JSON object with "version";
"sha256" of all names, dtypes, shapes and bytes; and "as_bytes", {name: dtype} of the arrays whose
dtype safetensors lacks (such as complex128), which are stored as U8 with an additional last axis.
Equal tensors give equal files.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from strategies.core.values import Array

FORMAT, VERSION = "strategies.Checkpoint", 1

PARTIAL = ".partial"
"""Suffix of temporary files, which a killed process may leave behind."""


class CheckpointError(ValueError):
    """A file that isn't a complete checkpoint, or whose tensors don't fit the program's.

    The text names the file and the tensors. Raised on every rank, before anything is changed.
    """


# safetensors' dtype codes, and the names of NumPy or ml_dtypes.
_NAMES = {
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def encode(tensors: Mapping[str, Array]) -> bytes:
    """The file's content. TypeError for an array that isn't numeric or bool."""
    arrays = {name: _plain(name, array) for name, array in tensors.items()}
    as_bytes = {
        name: array.dtype.name
        for name, array in arrays.items()
        if array.dtype.name not in _NAMES.values()
    }
    entry = {"version": VERSION, "sha256": _checksum(arrays), "as_bytes": as_bytes}
    for name in as_bytes:
        array = arrays[name]
        flat = np.frombuffer(array.tobytes(), np.uint8)
        arrays[name] = flat.reshape(*array.shape, array.dtype.itemsize)
    return safetensors.numpy.save(arrays, {FORMAT: json.dumps(entry)})


def decode(content: bytes, path: str) -> dict[str, Array]:
    """The arrays in a file's content, by name.

    Raises CheckpointError, naming the file, unless it is a complete checkpoint of this version.
    """
    stored, entry = _opened(content, path)
    if entry.get("version") != VERSION:
        version = entry.get("version")
        raise CheckpointError(f"{path}: has version {version!r}: must be {VERSION}")
    try:
        as_bytes = entry["as_bytes"]
        tensors = {name: _array(each, as_bytes.get(name)) for name, each in stored.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt: {error!r}") from None
    if entry.get("sha256") != _checksum(tensors):
        raise CheckpointError(f"{path}: corrupt: the checksum doesn't match the content")
    return tensors


def _opened(content: bytes, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's tensors as safetensors returns them, and this project's metadata entry."""
    try:
        stored = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]  # no types
        length = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + length]).get("__metadata__") or {}
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: incomplete, or not a safetensors file: {error}") from None
    if FORMAT not in metadata:
        raise CheckpointError(f"{path}: a safetensors file, but without the metadata of {FORMAT}")
    try:
        return stored, dict(json.loads(metadata[FORMAT]))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: corrupt: {error!r}") from None


def write(path: str, content: bytes) -> str:
    """Write the content to the file atomically, and return its path.

    Creates missing directories. Replaces a file of this name. Raises OSError.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)
    return path


def _sync_directory(directory: Path) -> None:
    """Else the file's new name may not survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(name: str, array: Any) -> Array:
    """The array in C order and native byte order, since safetensors writes the memory as is."""
    array = np.asarray(array)
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        raise TypeError(f"{name} has dtype {array.dtype}: must be numeric or bool")
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


def _array(stored: Mapping[str, Any], name: str | None) -> Array:
    kind = _NAMES[stored["dtype"]] if name is None else name
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    shape = stored["shape"] if name is None else stored["shape"][:-1]
    return np.frombuffer(stored["data"], dtype).reshape(shape)


def _checksum(arrays: Mapping[str, Array]) -> str:
    checksum = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        header = json.dumps([name, array.dtype.name, array.shape])
        checksum.update(len(header).to_bytes(8, "little") + header.encode())
        checksum.update(array.reshape(-1).view(np.uint8).data)
    return checksum.hexdigest()
