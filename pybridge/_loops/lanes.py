"""Loops under vmap, whose lanes may stop at different times.

The step is mapped and what is shared stays shared, so the cotangent of shared weights comes out of
the reverse loop as one sum. If lanes stop at different times the joint loop runs until the last of
them does, and a lane that has stopped must neither change nor be evaluated on a stale value: a body
that is NaN or Inf past its stop would poison the sums through 0 * NaN. So such a lane is handed
inputs on which the step is known to be good, and its outputs are dropped. Both are plain selects
inside the step, which differentiation then sees like any other operation.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pybridge._loops import steps
from pybridge._loops.primitive import bind
from pybridge._loops.steps import split

# ---- a question to all lanes ----

any_lane_p = Primitive("any_lane")


def any_lane(flag):
    """Whether a flag is set here, or under ``vmap`` in any lane: one answer for all of them, so that a
    branch on it remains a branch."""
    return any_lane_p.bind(flag)


any_lane_p.def_impl(lambda flag: flag)
any_lane_p.def_abstract_eval(lambda flag: flag)
mlir.register_lowering(any_lane_p, lambda _, flag: [flag])
ad.defjvp(any_lane_p, None)  # a boolean has no tangent


def _any_lane_of_a_batch(args, dims):
    return any_lane(jnp.any(args[0], axis=dims[0])), None


batching.primitive_batchers[any_lane_p] = _any_lane_of_a_batch


# ---- the rules ----


def batch(axis, operands, dims, *, cond, step, bound, reverse, checkpoints, counts):
    """The batching rule of the loop."""
    n_control, n_consts, n_carry = counts
    batched = [d is not None for d in dims]
    b_control, b_consts, b_carry, b_xs = split(batched, *counts)
    stop_differs = b_control[0] if cond is None else False
    if cond is not None:
        # cond sees the carry as it will be, so first find what the carry becomes.
        b_carry = _fixed_point(step, b_consts, b_carry, b_xs)
        (stop_differs,) = steps.depends(cond, b_control + b_carry)
    if stop_differs:
        b_carry = [True] * n_carry
        b_xs = [True] * len(b_xs) if cond is not None else b_xs
    else:
        b_carry = _fixed_point(step, b_consts, b_carry, b_xs)
    b_ys = steps.depends(step, b_consts + b_carry + b_xs)[n_carry:]
    b_ys = [y or stop_differs for y in b_ys]

    # Lanes come first on control, consts and carry; on xs and ys the rows do.
    wanted = [b_control, b_consts, b_carry, b_xs]
    place = [0] * (n_control + n_consts + n_carry) + [1] * len(b_xs)
    arrive = lambda x, d, want, to: _lanes_at(x, d, to, axis.size) if want else x
    flat = [w for group in wanted for w in group]
    control, consts, carry, xs = split(
        [arrive(x, d, w, to) for x, d, w, to in zip(operands, dims, flat, place)], *counts
    )
    b_in = tuple(b_consts + b_carry + b_xs)
    many = steps.mapped(step, axis, b_in, tuple(b_carry + b_ys))
    shared = {"bound": bound, "reverse": reverse, "checkpoints": checkpoints}
    y_dims = [1 if b else None for b in b_ys]
    carry_dims = [0 if b else None for b in b_carry]

    if not stop_differs:
        many_cond = cond and steps.mapped(cond, axis, tuple(b_control + b_carry), (False,))
        outs = bind(control, consts, carry, xs, cond=many_cond, step=many, **shared)
        return outs, [None] * int(cond is not None) + carry_dims + y_dims
    if cond is None:
        outs = _given_lengths(control[0], consts, carry, xs, many, b_consts, b_xs, **shared)
        return outs, carry_dims + y_dims
    many_cond = steps.mapped(cond, axis, tuple(b_control + b_carry), (True,))
    outs = _found_lengths(control, consts, carry, xs, many_cond, many, b_consts, **shared)
    return outs, [0, *carry_dims, *y_dims]


def batch_fold(bind, axis, operands, dims, *, advance, fold, counts, **shared):
    """The batching rule of a fold along a trajectory."""
    batched = [d is not None for d in dims]
    (b_length,), b_consts, b_x, b_r = split(batched, *counts)
    if b_length:
        b_x, b_r = [True] * len(b_x), [True] * len(b_r)
    b_x = _fixed_point(advance, b_consts, b_x, [])
    b_r = _fixed_point(fold, b_consts + b_x, b_r, [])
    flat = [b_length, *b_consts, *b_x, *b_r]
    arrive = lambda x, d, want: _lanes_at(x, d, 0, axis.size) if want else x
    (length,), consts, x, r = split(list(map(arrive, operands, dims, flat)), *counts)
    advance = steps.mapped(advance, axis, tuple(b_consts + b_x), tuple(b_x))
    fold = steps.mapped(fold, axis, tuple(b_consts + b_x + b_r), tuple(b_r))
    if b_length:
        length, consts, x, advance, fold = _fold_lengths(
            length, consts, x, r, advance, fold, b_consts
        )
    outs = bind(length, consts, x, r, advance=advance, fold=fold, **shared)
    return outs, [0 if b else None for b in b_r]


def _fold_lengths(lengths, consts, x, r, advance, fold, b_consts):
    """A length each: the state also counts its step, and a lane past its length holds still."""
    n = len(consts), len(x)

    def inside(args):
        (lengths,), consts, (i,), rest = split(args, 1, n[0], 1)
        inside = i < lengths
        lane = _first(inside)
        consts = [_borrow(inside, c, lane) if b else c for c, b in zip(consts, b_consts)]
        return i, inside, consts, rest, [_borrow(inside, v, lane) for v in rest]

    def masked_advance(*args):
        i, here, consts, x, held = inside(args)
        after = jaxpr_as_fun(advance)(*consts, *held)
        return [i + jnp.int32(1), *(_where(here, a, v) for a, v in zip(after, x))]

    def masked_fold(*args):
        _, here, consts, rest, held = inside(args)
        after = jaxpr_as_fun(fold)(*consts, *held)
        return [_where(here, a, v) for a, v in zip(after, rest[n[1] :])]

    consts, x = [lengths, *consts], [jnp.int32(0), *x]
    avals = [jax.typeof(v) for v in (*consts, *x)]
    return (
        jnp.max(lengths, initial=0),
        consts,
        x,
        steps.trace(masked_advance, avals),
        steps.trace(masked_fold, [*avals, *map(jax.typeof, r)]),
    )


def _fixed_point(step, b_consts, b_carry, b_xs):
    while True:
        out = steps.depends(step, b_consts + b_carry + b_xs)
        after = [a or b for a, b in zip(b_carry, out)]
        if after == b_carry:
            return b_carry
        b_carry = after


def _lanes_at(x, dim, to, size):
    if dim is None:
        x = jnp.broadcast_to(x, (size, *x.shape))
        dim = 0
    return jnp.moveaxis(x, dim, to)


def _where(mask, a, b):
    return lax.select(
        jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a.shape), a, b
    )


def _first(mask):
    """The first lane whose flag is set."""
    return jnp.argmax(mask) if mask.size else jnp.int32(0)


def _borrow(mask, x, lane):
    """``x`` with the value of ``lane`` in every lane whose flag is not set."""
    if not mask.size:
        return x
    other = lax.dynamic_index_in_dim(x, lane, keepdims=True)
    return _where(mask, x, jnp.broadcast_to(other, x.shape))


def _found_lengths(control, consts, carry, xs, cond, step, b_consts, **shared):
    """Lanes with a predicate each. A stopped lane is handed its own start and first row, on which its
    step was evaluated for its first step; one that never starts borrows them, and its consts, of one
    that does.
    """
    alive = jaxpr_as_fun(cond)(*control, *carry)[0]
    lane = _first(alive)
    consts = [_borrow(alive, c, lane) if b else c for c, b in zip(consts, b_consts)]
    first_rows = [x[-1 if shared["reverse"] else 0] for x in xs]
    safe = [lax.stop_gradient(_borrow(alive, x, lane)) for x in [*carry, *first_rows]]
    taken = jnp.zeros(alive.shape, jnp.int32)
    n = len(control), len(consts), len(safe), len(carry)

    def masked(*args):
        control, consts, safe, (alive, taken), carry, x = split(args, *n[:3], 2, n[3])
        inside = [_where(alive, v, s) for v, s in zip([*carry, *x], safe)]
        after, y = split(jaxpr_as_fun(step)(*consts, *inside), n[3])
        after = [_where(alive, a, x) for a, x in zip(after, carry)]
        (more,) = jaxpr_as_fun(cond)(*control, *after)
        return [alive & more, taken + alive.astype(jnp.int32), *after, *y]

    operands = [*control, *consts, *safe], [alive, taken, *carry]
    avals = [[jax.typeof(x) for x in group] for group in operands]
    rows = [a.update(shape=a.shape[1:]) for a in map(jax.typeof, xs)]
    masked = steps.trace(masked, avals[0] + avals[1] + rows)
    any_alive = steps.trace(lambda alive, *_: jnp.any(alive), avals[1])
    _, _, taken, *outs = bind([], *operands, xs, cond=any_alive, step=masked, **shared)
    return [taken, *outs]


def _given_lengths(lengths, consts, carry, xs, step, b_consts, b_xs, **shared):
    """Lanes with a length each. A lane outside its rows is handed consts, carry and row of one that
    is inside, so that the three belong together."""
    reverse = shared["reverse"]
    total = jnp.max(lengths, initial=0)
    n = len(consts), len(carry)

    def masked(*args):
        (lengths, total), consts, (i,), carry, x = split(args, 2, n[0], 1, n[1])
        inside = (total - 1 - i if reverse else i) < lengths
        lane = _first(inside)
        consts = [_borrow(inside, c, lane) if b else c for c, b in zip(consts, b_consts)]
        held = [_borrow(inside, v, lane) for v in carry]
        x = [_borrow(inside, v, lane) if b else v for v, b in zip(x, b_xs)]
        after, y = split(jaxpr_as_fun(step)(*consts, *held, *x), n[1])
        return [i + jnp.int32(1), *(_where(inside, a, v) for a, v in zip(after, carry)), *y]

    operands = [lengths, total, *consts], [jnp.int32(0), *carry]
    avals = [jax.typeof(x) for group in operands for x in group]
    rows = step.in_avals[n[0] + n[1] :]
    masked = steps.trace(masked, [*avals, *rows])
    _, *outs = bind([total], *operands, xs, cond=None, step=masked, **shared)
    return outs
