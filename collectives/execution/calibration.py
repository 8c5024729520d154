"""Calibration: cost parameters for which the cost model reproduces measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

from collectives.execution.cost_model import CostParameters

SMALL_BYTES = 8

Seconds = Mapping[tuple[str, int], float]
"""Seconds of an all_reduce by (path, bytes); unavailable paths are missing."""

Model = Callable[[str, int, CostParameters], float]
"""Expected seconds of an all_reduce by a path, for a number of bytes and cost parameters."""

_LEAST_SECONDS = 1e-9
_BANDWIDTHS = (1e6, 1e13)
_HALVINGS = 40


def fit(
    seconds: Seconds, model: Model, costs: CostParameters, kinds: Mapping[str, str]
) -> CostParameters:
    """The cost parameters that fit the times best; those of no measured path stay as they are.

    `kinds` gives the kind of parameters that a path uses: "schedule", "native" or "shared".
    """
    for kind in dict.fromkeys(kinds.values()):
        own = {key: value for key, value in seconds.items() if kinds[key[0]] == kind}
        costs = _fit_bandwidth(kind, own, model, _fit_start(kind, own, model, costs))
    return costs


def _fit_start(kind: str, seconds: Seconds, model: Model, costs: CostParameters) -> CostParameters:
    """Scale start and latency alike, because a single size can't separate them."""
    ratios = [
        taken / model(path, nbytes, costs)
        for (path, nbytes), taken in seconds.items()
        if nbytes == SMALL_BYTES
    ]
    names = (f"{kind}_start", f"{kind}_latency")
    return replace(
        costs,
        **{name: max(_LEAST_SECONDS, getattr(costs, name) * median(ratios)) for name in names},
    )


def _fit_bandwidth(
    kind: str, seconds: Seconds, model: Model, costs: CostParameters
) -> CostParameters:
    """The median of the bandwidths that fit each of the larger sizes."""
    name = f"{kind}_bandwidth"

    def found(path: str, nbytes: int, taken: float) -> float:
        return _solve(lambda value: model(path, nbytes, replace(costs, **{name: value})), taken)

    values = [found(*key, taken) for key, taken in seconds.items() if key[1] > SMALL_BYTES]
    return replace(costs, **{name: median(values)})


def _solve(expected: Callable[[float], float], taken: float) -> float:
    """The bandwidth for which the model expects the measured time, by bisection."""
    low, high = _BANDWIDTHS
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if expected(middle) > taken else (low, middle)
    return math.sqrt(low * high)
