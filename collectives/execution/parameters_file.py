"""Cost parameters on disk, measured once for each host, MPI library and layout."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from collectives.execution.cost_model import CostParameters, Layout
from collectives.waiting.wait_policy import log

CACHE_VARIABLE = "COLLECTIVES_CACHE"
# Seconds, or bytes per second.
_LEAST, _LARGEST = 1e-12, 1e15
VERSION = 1
"""Version of the file's format and of the parameters' meaning; other versions are ignored."""

_FOLDER = "mpi-collectives"


@dataclass(frozen=True)
class Key:
    """Validity of measured parameters: one host, one MPI library and one layout."""

    host: str
    library: str
    layout: Layout

    @property
    def path(self) -> Path:
        """The file in the user's cache folder; it need not exist."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()
        return cache_folder() / f"figures-{digest}.json"


def cache_folder() -> Path:
    """COLLECTIVES_CACHE, or the user's cache folder; RuntimeError if there is no home."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / _FOLDER


def save(key: Key, costs: CostParameters) -> Path | None:
    """Write the file atomically; on failure log a warning and return None."""
    try:
        path = key.path
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, to_text(key, costs))
    except (OSError, RuntimeError) as error:
        log.warning("the measured parameters could not be saved: %s", error)
        return None
    return path


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        # Other users may share the folder.
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def load(key: Key) -> tuple[CostParameters, Path] | None:
    """The parameters saved for this key, and their file; None, with a warning if it is invalid.

    Without a warning where the user's own cache folder can't be read, as in containers.
    """
    try:
        path = key.path
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        if os.environ.get(CACHE_VARIABLE) or isinstance(error, UnicodeDecodeError):
            log.warning("the measured parameters could not be read: %s", error)
        return None
    try:
        return from_text(key, text), path
    except ValueError as error:
        log.warning("%s is ignored: %s", path, error)
        return None


def to_text(key: Key, costs: CostParameters) -> str:
    """The file's content."""
    content = {"version": VERSION, "key": _key_fields(key), "figures": asdict(costs)}
    return json.dumps(content, indent=1)


def from_text(key: Key, text: str) -> CostParameters:
    """The parameters; ValueError if the text is not valid for this key and version."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError(f"it is not of version {VERSION}")
    if content.get("key") != _key_fields(key):
        raise ValueError("it was measured elsewhere")
    return _parameters(content.get("figures"))


def _key_fields(key: Key) -> dict[str, object]:
    return {
        "host": key.host,
        "library": key.library,
        "local_sizes": list(key.layout.local_sizes),
        "crowding": key.layout.oversubscription,
    }


def _parameters(values: object) -> CostParameters:
    names = {field.name for field in fields(CostParameters)}
    if not isinstance(values, dict) or set(values) != names:
        raise ValueError("its parameters are not those that are needed")
    for name, value in values.items():
        if not isinstance(value, float) or not _LEAST < value < _LARGEST:
            raise ValueError(
                f"{name} is {value!r}: must be a float between {_LEAST:g} and {_LARGEST:g}"
            )
    return CostParameters(**values)
