"""Checks of integer arguments, which a rank makes on its own before any message is sent."""

from __future__ import annotations

import operator
from typing import Any


def check_index(name: str, value: Any, limit: int, least: int = 0) -> int:
    """`value` as an integer from `least` to limit − 1; TypeError or ValueError otherwise."""
    problem = f"{name}={value!r}: must be an integer from {least} to {limit - 1}"
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(problem) from None
    if not least <= index < limit:
        raise ValueError(problem)
    return index


def check_peer(peer: Any, rank: int, size: int) -> int:
    """`peer` as the number of another rank; TypeError or ValueError otherwise."""
    index = check_index("peer", peer, size)
    if index == rank:
        raise ValueError(f"peer={peer!r}: must be another rank than this one")
    return index
