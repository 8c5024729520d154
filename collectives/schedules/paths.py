"""The names of the ways to run a collective that are no schedules of messages."""

from __future__ import annotations

NATIVE = "native"
"""The transport's own collective."""

SHARED = "shared"
"""Through the node's memory, whichever way is the quickest now: one of the next three."""

DIRECT = "direct"
"""Registered arrays are read and written where they lie."""

STAGED = "staged"
"""Copied into shared memory, and folded or copied out of it."""

SINGLE_COPY = "single_copy"
"""Copied straight between the memories of two processes."""

QUICKEST = "quickest"
"""What runs where nothing is forced and all ranks share memory: as `SHARED`, or `NATIVE`."""

HIERARCHICAL = "hierarchical"
"""Through the memory of each node, and by messages between the nodes."""

FORCED = (NATIVE, SHARED, STAGED, SINGLE_COPY, HIERARCHICAL)
"""Those that a caller may ask for."""
