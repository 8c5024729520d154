"""Functions, loops and conditions that contain calls are lowered where they are used.

JAX lowers a compiled function that another one calls, and lately every loop and condition, as a
function of its own, once for all places. A call in that function could not depend on a call
before such a place. XLA could run the two in different orders on different ranks, and the ranks
would exchange the arrays of different calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from collectives.jax.tokens import condition, loop, uncached

# By name: JAX exports some of these primitives only, and not the same in each version.
_FUNCTIONS = ("jit", "pjit", "composite", "compute_on", "xla_metadata_call")
_WITH_TOKEN: dict[str, Callable[..., Any]] = {"cond": condition, "while": loop}
_WITH_REGIONS = (
    *("scan", "checkpoint", "remat2", "remat_opt", "custom_linear_solve"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"),
    *("custom_lin", "linear_call", "custom_partitioning", "run_state"),
)
_known: set[Any] = set()


def lower_in_place(contains: Contains) -> None:
    """Lower from now on what contains a call where it is used.

    Again when a call is traced: modules of JAX that were imported meanwhile have added rules.
    """
    if len(_known) == len(mlir._lowerings):
        return
    for each, entry in list(mlir._lowerings.items()):
        if each in _known:
            continue
        _known.add(each)
        # Older versions keep the rules themselves.
        rule = getattr(entry, "rule", entry)
        calls_function = getattr(rule, "func", None) is mlir.core_call_lowering
        if calls_function or each.name in _FUNCTIONS:
            rule = partial(_if_within, contains, _in_place, rule)
        elif each.name in _WITH_TOKEN:
            rule = partial(_if_within, contains, _WITH_TOKEN[each.name], rule)
        elif each.name not in _WITH_REGIONS:
            continue
        mlir.register_lowering(each, rule, **uncached)


def _if_within(
    contains: Contains,
    own: Callable[..., Any],
    rule: Callable[..., Any],
    ctx: Any,
    *operands: Any,
    **parameters: Any,
) -> Any:
    if any(map(contains, _jaxprs_in(parameters.values()))):
        return own(rule, ctx, *operands, **parameters)
    return rule(ctx, *operands, **parameters)


def _in_place(rule: Callable[..., Any], ctx: Any, *operands: Any, **parameters: Any) -> Any:
    jaxprs = list(_jaxprs_in(parameters.values()))
    if len(jaxprs) != 1:
        return rule(ctx, *operands, **parameters)
    return mlir.lower_fun(jaxpr_as_fun(jaxprs[0]), multiple_results=True)(ctx, *operands)


class Contains:
    """Whether a program contains a call, also in functions and loops within it."""

    def __init__(self, is_call: Callable[[Any], bool]) -> None:
        """`is_call`: whether an equation is one."""
        self._is_call = is_call
        self._known: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def __call__(self, closed: Any) -> bool:
        """Whether this program does."""
        jaxpr = getattr(closed, "jaxpr", closed)
        if jaxpr not in self._known:
            self._known[jaxpr] = any(map(self._is_in, jaxpr.eqns))
        return self._known[jaxpr]

    def _is_in(self, equation: Any) -> bool:
        inner = _jaxprs_in(equation.params.values())
        return self._is_call(equation) or any(map(self, inner))


def _jaxprs_in(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (tuple, list)):
            yield from _jaxprs_in(each)
        elif hasattr(each, "eqns"):
            yield each
