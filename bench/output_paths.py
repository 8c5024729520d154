"""Paths of output files, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    """The path of a file, for argparse in a program of one process."""
    return _checked(Path(text), folder=False)


def output_folder(text: str) -> Path:
    """The path of a folder, which may be made with those above it, for argparse likewise."""
    return _checked(Path(text), folder=True)


def problem_of(
    world: Any, options: argparse.Namespace, *names: str, folder: bool = False
) -> str | None:
    """Why rank 0 can't write to the paths of these options, the same on every rank.

    Only rank 0 writes, and the other hosts need not have its folders. A rank that ended at parsing,
    before MPI starts, would keep the others waiting.
    """
    problem = None
    if world.rank == 0:
        paths = {name: path for name in names if (path := getattr(options, name))}
        found = {name: _why_not(path, folder) for name, path in paths.items()}
        problem = next((f"--{name}: {text}" for name, text in found.items() if text), None)
        problem = problem or _twice(paths)
    shared: str | None = world.bcast(problem)
    return shared


def _twice(paths: Mapping[str, Path]) -> str | None:
    """Which options name one file."""
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        first = seen.setdefault(path.resolve(), name)
        # A device may take both.
        if first != name and (path.is_file() or not path.exists()):
            return f"--{name}: {path} is the file of --{first}, too"
    return None


def _checked(path: Path, *, folder: bool) -> Path:
    problem = _why_not(path, folder)
    if problem is not None:
        raise argparse.ArgumentTypeError(problem)
    return path


def _why_not(path: Path, folder: bool) -> str | None:
    # Methods of Path raise PermissionError for what is in a closed folder.
    if folder:
        place = next(each for each in (path, *path.parents) if os.path.lexists(each))
    elif os.path.exists(path):
        if os.path.isdir(path):
            return f"{path} is a folder; it must be a file"
        return None if os.access(path, os.W_OK) else f"no permission to write to {path}"
    else:
        place = path.parent
    if not os.path.isdir(place):
        return f"can't write {path}: {place} is no folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"can't write {path}: no permission to write to {place}"
    return None
