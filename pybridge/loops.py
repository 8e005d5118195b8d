"""Loops with a bound: called like ``jax.lax.while_loop``, differentiable in both modes."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pybridge._loops import primitive, tracing

__all__ = ["bounded_fori_loop", "bounded_scan_until", "bounded_while_loop"]

_ON_LIMIT = ("return", "nan", "raise")


def bounded_while_loop(
    cond_fun,
    body_fun,
    init_val,
    max_steps,
    *,
    checkpoints="auto",
    on_limit="return",
    return_steps=False,
):
    """todo"""
    bound = _check_bound(max_steps)
    _check_option("on_limit", on_limit, _ON_LIMIT)
    loop = tracing.trace(cond_fun, body_fun, init_val)
    if bound == 0:
        steps, carry = jnp.int32(0), loop.carry
    else:
        steps, *carry = primitive.bind(
            loop.control,
            loop.consts,
            loop.carry,
            [],
            cond=loop.cond,
            step=loop.step,
            bound=bound,
            reverse=False,
            checkpoints=checkpoints,
        )
    out = loop.rebuild(carry)
    return (out, steps) if return_steps else out


def _check_bound(max_steps):
    if max_steps is None:
        return None
    try:
        if isinstance(max_steps, (bool, np.bool_)):
            raise TypeError
        bound = operator.index(max_steps)
    except TypeError:
        raise TypeError(
            f"max_steps is {max_steps!r}, a {type(max_steps).__name__}: it must be a Python or NumPy "
            "integer, known when the loop is traced, or None (forward mode only)"
        ) from None
    if not 0 <= bound < 2**31:
        raise ValueError(f"max_steps is {bound}: it must be at least 0 and below 2**31")
    return bound


def _check_option(name, given, accepted):
    if given not in accepted:
        raise ValueError(f"{name} is {given!r}: it must be one of {', '.join(map(repr, accepted))}")
