"""Steps of training that wait for each other, without any communication of data.

What a barrier after each step costs is no cost of a framework or of a collective: each step takes
as long as the slowest rank's. The speed with the barrier is the most that a training in step can
reach.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import collectives

IN_STEP = "apart, with a barrier after each step"


def with_barrier(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step, then a barrier of all ranks."""
    barrier = collectives.world().barrier

    def step_and_barrier() -> Any:
        result = step()
        barrier()
        return result

    return step_and_barrier
