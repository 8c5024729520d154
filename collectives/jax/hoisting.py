"""Calls in loops run in each iteration, also under reverse mode.

The derivative of a `scan` first computes what depends on none of its iterations, once for all of
them. A call is not the same each time: what `recv` returns doesn't depend on its argument alone,
and the other ranks, whose arguments depend on the iteration, make the call in each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow import loops  # exported in parts only

from collectives.jax.lowering_in_place import Contains

_Hoisting = Callable[[Any, list[Any], int], Any]
_Rule = Callable[..., Any]


def keep_in_loops(contains: Contains) -> None:
    """From now on JAX moves no part out of a loop that contains calls.

    Under `jax.checkpoint` it is refused. Older versions, which have no such function, move them.
    """
    hoist: _Hoisting | None = getattr(loops, "_scan_known_hoisting", None)
    if hoist is not None:
        loops._scan_known_hoisting = _unless_within(contains, hoist)
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    rules[loops.scan_p] = _refusing(contains, rules[loops.scan_p])


def _unless_within(contains: Contains, hoist: _Hoisting) -> _Hoisting:
    def hoist_unless_within(jaxpr: Any, known: list[Any], residuals: int) -> Any:
        if contains(jaxpr):
            return jaxpr, known, [False] * residuals, []
        return hoist(jaxpr, known, residuals)

    return hoist_unless_within


def _refusing(contains: Contains, rule: _Rule) -> _Rule:
    """The rule for a scan under `jax.checkpoint`, which moves parts out in a way of its own."""

    def refuse(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
        jaxpr, constants = equation.params["jaxpr"], equation.params["num_consts"]
        if contains(jaxpr):
            varies = [False] * constants + [True] * (len(jaxpr.in_avals) - constants)
            moved, *_ = partial_eval.partial_eval_jaxpr_nounits(jaxpr, varies, True)
            if contains(moved):
                raise NotImplementedError(
                    "a call in a scan under jax.checkpoint depends on nothing of the iteration: "
                    "JAX would make it once for all iterations; give it an array of the carry or "
                    "of xs, or apply jax.checkpoint to the scan's body"
                )
        return rule(saveable, unknown, instantiated, equation)

    return refuse
