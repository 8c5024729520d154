"""TPUStrategy, a name that scripts may have: there are no TPUs here."""

from __future__ import annotations

from typing import Any, NoReturn


class TPUStrategy:
    """Raises NotImplementedError: the arrays of this package are on CPUs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Say what to use."""
        raise NotImplementedError(
            "TPUStrategy: TPUs aren't supported; use MirroredStrategy for the ranks of one node, or"
            " MultiWorkerMirroredStrategy for several, under mpirun"
        )
