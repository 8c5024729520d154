"""A process group's names and abilities, which torch asks backends written in C++ for."""

from __future__ import annotations

from typing import Any

import torch

from collectives.torch.untraced import untraced


@untraced
class Names:
    """The names that torch reads and sets, and what the group can't do."""

    _backend = _name = _description = ""
    records_itself = True  # read by collectives_torch_entry
    supports_splitting = _supports_time_estimate = False
    # From torch 2.15 on.
    supports_reconfigure = supports_window = supports_abort_hooks = False

    def getBackendName(self) -> str:  # noqa: N802
        """The backend's name."""
        return self._backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Store the name."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Store the description."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """The group's description."""
        return self._description

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu")]

    def _get_backend(self, device: Any) -> Any:
        """The group itself: it has one backend."""
        return self

    def split_group(self, *arguments: Any, **named: Any) -> Any:
        """Raise NotImplementedError: torch's own method would end the process."""
        raise NotImplementedError(
            f"split_group of the backend {self._backend!r}: use torch.distributed.new_group"
        )
