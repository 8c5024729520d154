"""TPUStrategy, for scripts that name it: TPUs aren't supported."""

from __future__ import annotations

from typing import Any, NoReturn


class TPUStrategy:
    """Raises NotImplementedError: the arrays of this package are on CPUs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """NotImplementedError, with the alternatives."""
        raise NotImplementedError(
            "TPUStrategy: TPUs aren't supported; use MirroredStrategy for the ranks of one node, or"
            " MultiWorkerMirroredStrategy for several, under mpirun"
        )
