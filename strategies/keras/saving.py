"""`save` and `save_weights` of models of torch and JAX, which any number of ranks may call.

Each writes a file of its own, which takes the name once it is complete. So all ranks may save to
one path at a time, as programs of one process do: the ranks' models are equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

_SUFFIXES = (".keras", ".h5")


def saving_of(model: Any) -> dict[str, Callable[..., Any]]:
    """The methods by name."""
    return {name: _replacing(model, name) for name in ("save", "save_weights")}


def _replacing(model: Any, name: str) -> Callable[..., Any]:
    def save(filepath: Any, overwrite: bool = True, *args: Any, **options: Any) -> Any:
        method = getattr(type(model), name)
        local = isinstance(filepath, str | os.PathLike) and "://" not in str(filepath)
        if not (local and str(filepath).endswith(_SUFFIXES) and overwrite) or args or options:
            # Another file system, several files, or a question of Keras's.
            return method(model, filepath, overwrite, *args, **options)
        path = Path(filepath)
        written = path.with_name(f".{uuid4().hex}-{path.name}")
        try:
            method(model, str(written), overwrite)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)
        return None

    return save
