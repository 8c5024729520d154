"""Conditions and loops that contain calls have a token as one more result.

The calls that follow depend on it. The program's own results can't replace it: there may be none,
or XLA may know them without running the condition or loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from collectives.jax.ordering import TOKEN, keep_last, results_before, token_of

uncached = (
    {"cacheable": False} if "cacheable" in signature(mlir.register_lowering).parameters else {}
)
"""The options by which JAX lowers a primitive in the block that it lies in."""

_last_token = Primitive("token_of_collectives")


def condition(
    rule: Callable[..., Any], ctx: Any, *operands: Any, branches: Sequence[Any], **parameters: Any
) -> Any:
    """Lower a condition by JAX's rule, with the last token of each branch as its last result."""
    own = [_with_token(each) for each in branches]
    return _without_token(rule, ctx, ctx.avals_in, operands, branches=tuple(own), **parameters)


def loop(
    rule: Callable[..., Any],
    ctx: Any,
    *operands: Any,
    cond_jaxpr: Any,
    body_jaxpr: Any,
    **parameters: Any,
) -> Any:
    """Lower a loop by JAX's rule, with a token from each iteration to the next one."""
    jaxprs = {"cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr, **parameters}
    # JAX selects the results of a batch's loops by an array with the batch's axes.
    if cond_jaxpr.out_avals[0].shape:
        return rule(ctx, *operands, **jaxprs)
    cond_jaxpr, body_jaxpr = _with_operand(cond_jaxpr), _with_token(_with_operand(body_jaxpr))
    jaxprs.update(cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr)
    operands = *operands, *_lower(ctx)
    return _without_token(rule, ctx, [*ctx.avals_in, TOKEN], operands, **jaxprs)


def _without_token(
    rule: Callable[..., Any], ctx: Any, avals_in: Any, operands: Any, **parameters: Any
) -> Any:
    inner = ctx.replace(avals_in=avals_in, avals_out=[*ctx.avals_out, TOKEN])
    results = rule(inner, *operands, **parameters)
    if inner.tokens_out is not None:
        ctx.set_tokens_out(inner.tokens_out)
    keep_last(ctx.module_context, results[-1])
    return results[:-1]


def _with_operand(closed: Any) -> Any:
    """The program with a token as its last operand, which it doesn't read."""
    made = jax.make_jaxpr(lambda token: token)(TOKEN).jaxpr
    return closed.replace(jaxpr=closed.jaxpr.replace(invars=[*closed.jaxpr.invars, *made.invars]))


def _with_token(closed: Any) -> Any:
    """The program with the token of its last call as its last result."""
    made = jax.make_jaxpr(_last_token.bind)().jaxpr
    eqns, outvars = [*closed.jaxpr.eqns, *made.eqns], [*closed.jaxpr.outvars, *made.outvars]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, outvars=outvars))


def _lower(ctx: Any) -> Any:
    found = token_of(ctx, results_before(ctx.module_context))
    if found and found == list(mlir.ir.InsertionPoint.current.block.arguments)[-1:]:
        # Of a loop that has calls in its condition alone. XLA replaces what a loop never changes by
        # what it was before, on which a following call would not depend any more.
        following = mlir.lower_fun(lambda token: token + 1, multiple_results=False)
        return following(ctx.replace(avals_in=[TOKEN], avals_out=[TOKEN]), *found)
    return found or [mlir.ir_constant(np.zeros(TOKEN.shape, TOKEN.dtype))]


_last_token.def_abstract_eval(lambda: TOKEN)
mlir.register_lowering(_last_token, _lower, **uncached)
