"""What Horovod has and its interfaces here have not."""

from __future__ import annotations

from collections.abc import Mapping

_ADVICE = {
    "Adasum": "use op=Average or op=Sum",
    "run": "`mpirun -n 2 python train.py` starts the ranks",
    "elastic": "restart from a checkpoint with any number of ranks",
    "start_timeline": "`collectives.world().trace(path)` writes the last calls of every rank",
    "stop_timeline": "`collectives.world().trace(path)` writes the last calls of every rank",
}


def absent(module: str, name: str, further: Mapping[str, str] = {}) -> AttributeError:
    """The error that says what to use in place of a name that the module lacks."""
    advice = _ADVICE.get(name) or further.get(name)
    return AttributeError(f"{module} has no {name}" + (f": {advice}" if advice else ""))
