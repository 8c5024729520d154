"""`save` and `save_weights` of models of torch and JAX, which any number of ranks may call.

Each writes a file of its own, which takes the name once it is complete. So all ranks may save to
one path at a time, as programs of one process do: the ranks' models are equal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import keras

_SUFFIXES = {"save": (".keras", ".h5"), "save_weights": (".weights.h5",)}


def saving_of(model: Any) -> dict[str, Callable[..., Any]]:
    """The methods by name, but for those that the model's class has of its own."""
    names = [name for name in _SUFFIXES if getattr(type(model), name) is getattr(keras.Model, name)]
    return {name: _replacing(model, name) for name in names}


def _replacing(model: Any, name: str) -> Callable[..., Any]:
    method = getattr(type(model), name)

    def save(filepath: Any, overwrite: bool = True, *args: Any, **options: Any) -> Any:
        path = _local(filepath)
        suffix = next((each for each in _SUFFIXES[name] if str(path).endswith(each)), None)
        several = options.get("zipped") is False or options.get("max_shard_size") is not None
        other = args or several or not overwrite
        if other or path is None or suffix is None or not path.parent.is_dir():
            # Several files, a question of Keras's, another file system, or an error.
            return method(model, filepath, overwrite, *args, **options)
        written = path.with_name(f".{uuid4().hex}{suffix}")
        try:
            method(model, str(written), **options)
            if path.exists():
                shutil.copymode(path, written)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
        return None

    return save


def _local(filepath: Any) -> Path | None:
    """The file, behind links; None for what is no path of a file system of this machine."""
    if not isinstance(filepath, str | os.PathLike) or "://" in str(filepath):
        return None
    return Path(os.path.realpath(filepath))
