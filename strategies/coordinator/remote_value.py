"""What a scheduled function will have returned."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from strategies.core import nest


class RemoteValue:
    """The result of a scheduled function, once there is one.

    As `tf.distribute.coordinator.RemoteValue`; made by `ClusterCoordinator.schedule`.
    """

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def get(self) -> Any:
        """What the function returned; waits for it.

        Raises what the function raised, CancelledError where it was not run, and RankFailedError
        where no worker is left to run it.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def fetch(self) -> Any:
        """As `get`, with the variables in a nest as arrays."""
        return nest.map_leaves(_as_array, self.get())

    def settle(self, value: Any) -> None:
        """The function has returned. For the coordinator."""
        self._value = value
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """The function will not return. For the coordinator."""
        self._error = error
        self._settled.set()

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            "a RemoteValue can't be given to a scheduled function: fetch it first, and give it the"
            " value"
        )

    def __repr__(self) -> str:
        return f"<RemoteValue {self._state()}>"

    def _state(self) -> str:
        if not self._settled.is_set():
            return "not ready"
        return "ready" if self._error is None else f"failed with {type(self._error).__name__}"


def _as_array(leaf: Any) -> Any:
    return leaf.read_value() if hasattr(leaf, "read_value") else leaf
