"""Ways to train one network, compared by the time of their steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.timing import WARMUP_CALLS, medians

INSTANCES = 5
HEAD = "| training | ms per step | speed |\n|---|---:|---:|"

Make = Callable[[], dict[str, Callable[[], Any]]]


def rows(
    make: Make,
    world: Any,
    *,
    batch: int,
    repeats: int,
    steps: int = 1,
) -> Iterator[str]:
    """Each way's time for a step, and its speed as a share of the first one's, as Markdown.

    They are medians of several instances of the networks: where the arrays of one lie in memory
    changes its step by up to a tenth. `make` makes an instance: what trains `steps` steps in each
    way, by its name. A repeat is `batch` of them. At least `WARMUP_CALLS` steps come before.
    """
    warmup = math.ceil(WARMUP_CALLS / steps)
    seconds = []
    for _ in range(INSTANCES):
        ways = make()
        calls = list(ways.values())
        taken = medians(calls, world, batch=batch, repeats=repeats, warmup=warmup)
        seconds.append(taken / steps)
    times = np.array(seconds)
    shares = times[:, :1] / times
    for name, time, share in zip(
        ways, np.median(times, axis=0), np.median(shares, axis=0), strict=True
    ):
        yield f"| {name} | {1e3 * time:.2f} | {share:.2f} |"
