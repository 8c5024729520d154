"""Calls in loops run in each iteration, also under reverse mode.

The derivative of a `scan` first computes what depends on none of its iterations, once for all of
them. A call is not the same each time: what `recv` returns doesn't depend on its argument alone,
and the other ranks, whose arguments depend on the iteration, make the call in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow import loops  # exported in parts only
from jax._src.state import AbstractRef

from collectives.jax.lowering_in_place import Contains

_Hoisting = Callable[..., Any]
_Rule = Callable[..., Any]


def keep_in_loops(contains: Contains) -> None:
    """From now on JAX moves nothing out of a loop of which a call would be a part.

    Under `jax.checkpoint` it is refused. Older versions, which have no such function, move it.
    """
    hoist: _Hoisting | None = getattr(loops, "_scan_known_hoisting", None)
    if hoist is not None:
        loops._scan_known_hoisting = _unless_moved(contains, hoist)
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    rules[loops.scan_p] = _refusing(contains, rules[loops.scan_p])


def _moves_calls(contains: Contains, body: Any, varies: list[bool]) -> bool:
    """Whether a call of a loop's body depends on none of the arguments that vary.

    References that the body writes vary, too.
    """
    if not contains(body):
        return False
    pairs = zip(varies, body.in_avals, strict=True)
    varies = [each or isinstance(aval, AbstractRef) for each, aval in pairs]
    moved, *_ = partial_eval.partial_eval_jaxpr_nounits(body, varies, True)
    return contains(moved)


def _unless_moved(contains: Contains, hoist: _Hoisting) -> _Hoisting:
    def hoist_unless_moved(body: Any, constants: list[Any], residuals: int, *kept: int) -> Any:
        others = len(body.in_avals) - len(constants)
        if _moves_calls(contains, body, [False] * len(constants) + [True] * others):
            return body, constants, [False] * residuals, []
        return hoist(body, constants, residuals, *kept)

    return hoist_unless_moved


def _constants_of(scan: Mapping[str, Any]) -> int:
    """The number of a scan's constants, by its parameters."""
    if "num_consts" in scan:
        return int(scan["num_consts"])
    # Since JAX 0.12.
    constants, _, _ = scan["ft_in"].unpack()
    return len(list(constants))


def _refusing(contains: Contains, rule: _Rule) -> _Rule:
    """The rule for a scan under `jax.checkpoint`, which moves parts out in a way of its own."""

    def refuse(saveable: Any, unknown: list[bool], instantiated: Any, equation: Any) -> Any:
        body, constants = equation.params["jaxpr"], _constants_of(equation.params)
        # Tangents aren't known, and JAX moves none.
        varies = [*unknown[:constants], *[True] * (len(unknown) - constants)]
        if _moves_calls(contains, body, varies):
            raise NotImplementedError(
                "a call in a scan under jax.checkpoint depends on nothing of the iteration: "
                "JAX would make it once for all iterations; give it an array of the carry or "
                "of xs, or apply jax.checkpoint to the scan's body"
            )
        return rule(saveable, unknown, instantiated, equation)

    return refuse
