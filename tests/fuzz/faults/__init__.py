"""The injected faults, and the required result of each."""

from tests.fuzz.faults import arguments, concurrent, interrupted, memory, waiting
from tests.fuzz.faults.registry import FAULTS

__all__ = ["FAULTS", "arguments", "concurrent", "interrupted", "memory", "waiting"]
