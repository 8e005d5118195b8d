"""The transpose of a long loop with large constants, a chunk of steps at a time.

Step by step, a loop's transpose computes the residuals from a state again, which reads the weights,
and adds to the cotangent of the weights, which reads and writes as much. But only the carry's
cotangent is a chain. The states of a chunk are all known, so their residuals are one map of the
step, in which products of a matrix and a vector become one product of matrices; and so do the sums,
once the chain has passed through the chunk and left the carry's cotangents as rows.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pybridge._loops import steps
from pybridge._loops.steps import invert, merge, select, split

# How many steps go together. A loop that took no more than this is transposed step by step.
CHUNK = 32


class _Lanes:
    """The steps of a chunk as lanes of a map, in the form that ``steps.mapped`` asks for."""

    size, name, spmd_name = CHUNK, None, None


def pay(step, lin_consts, n_carry, bound):
    """Whether the constants are larger than what a chunk holds, and the step has nothing whose cost
    or end depends on values."""
    consts, carry, rows = split(step.in_avals, len(lin_consts), n_carry)
    moving = select(lin_consts, consts)
    if bound <= CHUNK or not rows or not moving or not _is_plain(step):
        return False
    flat = tuple(lin_consts)
    _, held, _ = _parts(step, flat, n_carry)
    return _bytes(moving) >= 2 * CHUNK * _bytes([*held, *carry])


def transpose(bind, step, length, consts, ct_carry, xs, lin_consts, **loop):
    """Cotangents of the linear constants and of the carry, for a loop of more than a chunk.

    ``step`` is linear in the flagged constants and in the carry; ``consts`` are the others.
    """
    lin_consts, n_carry, bound = tuple(lin_consts), len(ct_carry), loop["bound"]
    residuals, _, where = _parts(step, lin_consts, n_carry)
    chain, pull = _chain(step, lin_consts, n_carry), _pull(step, lin_consts, n_carry)
    moving = select(lin_consts, step.in_avals[: len(lin_consts)])
    n = 1, len(consts), len(xs), len(moving), n_carry
    small = {**loop, "bound": CHUNK, "cond": None, "step": chain}

    def chunk(*args):
        (length,), consts, xs, sums, ct_carry, (k,) = split(args, *n)
        inside = jnp.minimum(length - k * CHUNK, CHUNK)
        # Rows past the end hold nothing; the last that holds something stands in for them.
        rows = jnp.minimum(k * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32), length - 1)
        found = jaxpr_as_fun(residuals)(*consts, *(x[rows] for x in xs))
        shared, own = select(invert(where), found), select(where, found)
        outs = bind([inside], shared, ct_carry, own, **small)
        d_carry, arrived = split(outs, n_carry)
        sums = map(lax.add, sums, jaxpr_as_fun(pull)(*shared, *own, *arrived))
        return [*sums, *d_carry]

    zeros = [jnp.zeros(a.shape, a.dtype) for a in moving]
    operands = [length, *consts, *xs], [*zeros, *ct_carry]
    avals = [jax.typeof(x) for x in (*operands[0], *operands[1], jnp.int32(0))]
    chunks = -(-bound // CHUNK)
    outer = {**loop, "bound": chunks, "cond": None, "step": steps.trace(chunk, avals)}
    count = (length + (CHUNK - 1)) // CHUNK
    return split(
        bind([count], *operands, [jnp.arange(chunks, dtype=jnp.int32)], **outer), len(moving)
    )


def _bytes(avals):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


@steps.remember
def _is_plain(closed):
    nested = lambda eqn: [v for v in eqn.params.values() if hasattr(v, "jaxpr")]
    plain = lambda eqn: (
        all(map(_is_plain, nested(eqn)))
        if eqn.primitive.name == "jit"
        else not nested(eqn) and not eqn.effects and "call" not in eqn.primitive.name
    )
    return all(map(plain, closed.jaxpr.eqns))


# ---- the parts of a step ----


def _halves(step, lin_consts, n_carry):
    rows = len(step.in_avals) - len(lin_consts) - n_carry
    unknown = lin_consts + (True,) * n_carry + (False,) * rows
    return steps.halves(step, unknown, (True,) * n_carry)


@steps.remember
def _parts(step, lin_consts, n_carry):
    """``(consts, rows) -> residuals`` for a chunk of rows; the types of those residuals that differ
    from row to row, for one row; and flags of these."""
    known = _halves(step, lin_consts, n_carry).known
    n_consts = len(lin_consts) - sum(lin_consts)
    differs = (False,) * n_consts + (True,) * (len(known.in_avals) - n_consts)
    where = tuple(steps.depends(known, differs))
    held = select(where, known.out_avals)
    return steps.mapped(known, _Lanes, differs, where), held, where


def _linear(step, lin_consts, n_carry):
    """The linear half, and the types of its groups: shared residuals, own ones, consts, carry."""
    unknown = _halves(step, lin_consts, n_carry).unknown
    _, _, where = _parts(step, lin_consts, n_carry)
    residuals, consts, carry = split(unknown.in_avals, len(where), sum(lin_consts))
    fun = lambda shared, own, dc, s: jaxpr_as_fun(unknown)(*merge(where, own, shared), *dc, *s)
    return fun, select(invert(where), residuals), select(where, residuals), consts, carry


def _specs(avals, *lead):
    return [jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype) for a in avals]


def _zeros(avals):
    return [jnp.zeros(a.shape, a.dtype) for a in avals]


@steps.remember
def _chain(step, lin_consts, n_carry):
    """One reverse step for the carry's cotangent, which as it arrives is a y."""
    fun, shared, own, consts, carry = _linear(step, lin_consts, n_carry)

    def back(*args):
        held, ct, rows = split(args, len(shared), n_carry)
        forward = lambda s: fun(held, rows, _zeros(consts), s)
        return [*jax.linear_transpose(forward, _specs(carry))(ct)[0], *ct]

    return steps.trace(back, _specs(shared) + _specs(carry) + _specs(own))


@steps.remember
def _pull(step, lin_consts, n_carry):
    """``(shared, own rows, arrived rows) -> cotangents of the constants``, summed over the rows."""
    fun, shared, own, consts, carry = _linear(step, lin_consts, n_carry)

    def pull(*args):
        held, rows, arrived = split(args, len(shared), len(own))
        one = lambda dc: lambda rows: fun(held, rows, dc, _zeros(carry))
        forward = lambda dc: jax.vmap(one(dc), axis_size=CHUNK)(rows)
        return jax.linear_transpose(forward, _specs(consts))(arrived)[0]

    return steps.trace(pull, _specs(shared) + _specs(own, CHUNK) + _specs(carry, CHUNK))
