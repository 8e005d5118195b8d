"""The transpose of a long loop with large constants, a chunk of steps at a time.

Step by step, a loop's transpose computes the residuals from a state again, which reads the weights
once more. But the states of a chunk are all known, so their residuals are one map of the step, in
which products of a matrix and a vector become one product of matrices. The last chunk of a loop
finds its residuals in the ring (see ``saving``).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pybridge._loops import lanes, steps
from pybridge._loops.primitive import bind
from pybridge._loops.steps import invert, select, split

# How many steps go together.
CHUNK = 32


def heavy(row_bytes):
    """From which size on constants are large beside what a chunk holds of each step."""
    return 2 * CHUNK * row_bytes


class _Lanes:
    """The steps of a chunk as lanes of a map, in the form that ``steps.mapped`` asks for."""

    size, name, spmd_name = CHUNK, None, None


def pay(step, lin_consts, n_carry, bound):
    """Whether residuals are computed from constants that are larger than what a chunk holds, by a
    step that has nothing whose cost or end depends on values."""
    consts, carry, rows = split(step.in_avals, len(lin_consts), n_carry)
    if bound <= CHUNK or not rows or not is_plain(step):
        return False
    known = _halves(step, tuple(lin_consts), n_carry).known
    _, where = _residuals(step, tuple(lin_consts), n_carry)
    reads = steps.needs(known, where)[: len(lin_consts) - sum(lin_consts)]
    held = _bytes([*select(where, known.out_avals), *carry])
    return _bytes(select(reads, select(invert(lin_consts), consts))) >= heavy(held)


def transpose(transposed, step, length, consts, ct_carry, xs, lin_consts, **loop):
    """Cotangents of the linear constants and of the carry.

    ``step`` is linear in the flagged constants and in the carry; ``consts`` are the others.
    ``transposed`` makes one step's transpose.
    """
    lin_consts, n_carry, bound = tuple(lin_consts), len(ct_carry), loop["bound"]
    residuals, where = _residuals(step, lin_consts, n_carry)
    moving = select(lin_consts, step.in_avals[: len(lin_consts)])
    shared = (False,) * (len(where) - sum(where))
    linear = _linear(step, lin_consts, n_carry)
    back = transposed(linear, shared + (True,) * len(moving), n_carry, (False,) * sum(where), ())
    n = 1, len(consts), len(xs), len(moving) + n_carry

    def chunk(*args):
        (length,), consts, xs, carry, (k,) = split(args, *n)
        inside = jnp.minimum(length - k * CHUNK, CHUNK)
        # Rows past the end hold nothing; the last that holds something stands in for them.
        rows = jnp.minimum(k * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32), length - 1)
        found = jaxpr_as_fun(residuals)(*consts, *(x[rows] for x in xs))
        shared, own = select(invert(where), found), select(where, found)
        return bind([inside], shared, carry, own, **{**loop, "bound": CHUNK}, cond=None, step=back)

    zeros = [jnp.zeros(a.shape, a.dtype) for a in moving]
    operands = [length, *consts, *xs], [*zeros, *ct_carry]
    avals = [jax.typeof(x) for x in (*operands[0], *operands[1], jnp.int32(0))]
    chunks = -(-bound // CHUNK)
    outer = {**loop, "bound": chunks, "cond": None, "step": steps.trace(chunk, avals)}
    count = lax.div(length + jnp.int32(CHUNK - 1), jnp.int32(CHUNK))
    return bind([count], *operands, [jnp.arange(chunks, dtype=jnp.int32)], **outer)


def _bytes(avals):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


@steps.remember
def is_plain(closed):
    """Whether a step may be mapped over a chunk: nothing in it has a cost, an end or an effect that
    depends on values, but for branches on one answer for all."""
    asked = set()

    def plain(eqn):
        # ``lax.cond`` makes an index of its predicate.
        to_index = eqn.primitive.name == "convert_element_type" and eqn.invars[0] in asked
        if eqn.primitive is lanes.any_lane_p or to_index:
            asked.update(eqn.outvars)
        inner = [v for v in jax.tree.leaves(list(eqn.params.values())) if hasattr(v, "jaxpr")]
        together = eqn.primitive.name == "cond" and eqn.invars[0] in asked
        if eqn.primitive.name == "jit" or together:
            return all(map(is_plain, inner))
        return not inner and not eqn.effects and "call" not in eqn.primitive.name

    return all(map(plain, closed.jaxpr.eqns))


# ---- the parts of a step ----


def _halves(step, lin_consts, n_carry):
    rows = len(step.in_avals) - len(lin_consts) - n_carry
    unknown = lin_consts + (True,) * n_carry + (False,) * rows
    return steps.halves(step, unknown, (True,) * n_carry)


@steps.remember
def _residuals(step, lin_consts, n_carry):
    """``(consts, rows) -> residuals`` for a chunk of rows, and flags of those that differ from row to
    row."""
    known = _halves(step, lin_consts, n_carry).known
    n_consts = len(lin_consts) - sum(lin_consts)
    differs = (False,) * n_consts + (True,) * (len(known.in_avals) - n_consts)
    where = tuple(steps.depends(known, differs))
    return steps.mapped(known, _Lanes, differs, where), where


@steps.remember
def _linear(step, lin_consts, n_carry):
    """The linear half as a step: consts are shared residuals and moving constants, rows the others."""
    unknown = _halves(step, lin_consts, n_carry).unknown
    _, where = _residuals(step, lin_consts, n_carry)
    residuals, moving, carry = split(unknown.in_avals, len(where), sum(lin_consts))
    shared, own = select(invert(where), residuals), select(where, residuals)

    def linear(*args):
        shared_in, dc, s, own_in = split(args, len(shared), len(moving), n_carry)
        return jaxpr_as_fun(unknown)(*steps.merge(where, own_in, shared_in), *dc, *s)

    return steps.trace(linear, [*shared, *moving, *carry, *own])
