"""Names of the paths of a collective that are not message schedules."""

from __future__ import annotations

NATIVE = "native"
"""The transport's own collective."""

SLOTS = "slots"
"""Few bytes, beside the words by which the ranks of a node compare the call; not to be forced."""

PACKED = "packed"
"""Of `all_reduce_many`: packed into shared memory, and folded there; not to be forced."""

SHARED = "shared"
"""Through the node's memory, by the currently fastest of the following."""

DIRECT = "direct"
"""Zero copy: registered arrays are read and written in place."""

STAGED = "staged"
"""Copy-in/copy-out: copied into shared memory, and folded or copied out of it."""

MIGRATORY = "migratory"
"""As `STAGED`; the rank that has read a cache line of a stage also stores into it."""

SINGLE_COPY = "single_copy"
"""Cross-memory attach: copied directly between the address spaces of two processes."""

QUICKEST = "quickest"
"""Default where all ranks share memory: as `SHARED`, or `NATIVE` where that is faster."""

HIERARCHICAL = "hierarchical"
"""Through shared memory within each node, and by messages between the nodes."""

PIPELINED = "pipelined"
"""How `HIERARCHICAL` moves large arrays where that is faster: chunks of them on both levels."""

DISSEMINATION = "dissemination"
"""Between nodes: few bytes, in the messages that compare the call."""

FORCED = (NATIVE, SHARED, STAGED, MIGRATORY, SINGLE_COPY, HIERARCHICAL)
"""The paths that a caller may name as `algorithm`."""
