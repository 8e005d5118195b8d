"""Folds along a trajectory that is computed again: what a loop leaves when its rows do not fit.

From ``x_0`` and ``x_{i+1} = advance(consts, x_i)`` for a given length, fold
``r <- fold(consts, x_i, r)`` over the steps, the last first if ``reverse``. The linear part of a
loop is such a fold with the tangent as r; its transpose is the fold the other way with the
cotangent as r. A forward fold keeps nothing. A reverse one keeps ``slots`` states and computes the
others again, on the schedule that advances no step more often than it must: with c slots and at
most r advances a step it reaches binomial(c + r, c) steps (Griewank and Walther, Algorithm 799:
revolve, ACM TOMS 26, 2000).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun, new_jaxpr_eqn, primitives, set_current_trace
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from pybridge._loops import lanes, segments, steps
from pybridge._loops.steps import invert, merge, select, split

fold_p = Primitive("trajectory_fold")
fold_p.multiple_results = True


def bind(length, consts, x, r, *, advance, fold, bound, slots, reverse):
    return fold_p.bind(
        length,
        *consts,
        *x,
        *r,
        advance=advance,
        fold=fold,
        bound=bound,
        slots=slots,
        reverse=reverse,
        counts=(1, len(consts), len(x)),
    )


def _parts(operands, counts):
    (length,), consts, x, r = split(operands, *counts)
    return length, consts, x, r


def _abstract(*avals, advance, fold, counts, **_):
    _, _, _, r = split(avals, *counts)
    return [a.update(weak_type=False) for a in r], advance.effects | fold.effects


fold_p.def_effectful_abstract_eval(_abstract)


# ---- evaluation ----


def _settle(outs, like):
    return [lax.convert_element_type(o, jax.typeof(x).dtype) for o, x in zip(outs, like)]


def _run(*operands, advance, fold, bound, slots, reverse, counts):
    length, consts, x, r = _parts(operands, counts)
    step = lambda x: _settle(jaxpr_as_fun(advance)(*consts, *x), x)
    apply = lambda x, r: _settle(jaxpr_as_fun(fold)(*consts, *x, *r), r)
    run = _backward if reverse else _forward
    return run(length, step, apply, _settle(x, x), _settle(r, r), min(slots, bound), bound)


def _forward(length, step, apply, x, r, slots, bound):
    del slots, bound
    body = lambda s: (s[0] + 1, step(s[1]), apply(s[1], s[2]))
    return lax.while_loop(lambda s: s[0] < length, body, (jnp.int32(0), x, r))[2]


def _backward(length, step, apply, x, r, slots, bound):
    """A stack of states, the deepest the start; ``at`` holds their step numbers."""
    split_at = _schedule(slots, bound)
    stack = [jnp.zeros((slots + 1, *v.shape), v.dtype) for v in x]  # the last row takes what is
    put = lambda stack, x, k: [  # not to be kept
        lax.dynamic_update_index_in_dim(b, v, k, 0) for b, v in zip(stack, x)
    ]
    get = lambda stack, k: [lax.dynamic_index_in_dim(b, k, keepdims=False) for b in stack]
    stack = put(stack, x, 0)
    at = jnp.zeros(slots + 1, jnp.int32)

    def reach(i, state):
        """Advance from the top of the stack to step i, leaving states behind on the way."""

        def leg(state):
            p, x, top, stack, at = state
            target = jnp.where(top + 1 < slots, p + split_at(i - p + 1, slots - top), i)
            move = lambda s: (s[0] + 1, step(s[1]))
            p, x = lax.while_loop(lambda s: s[0] < target, move, (p, x))
            keep = p < i
            slot = jnp.where(keep, top + 1, slots)
            return p, x, top + keep.astype(jnp.int32), put(stack, x, slot), at.at[slot].set(p)

        return lax.while_loop(lambda s: s[0] < i, leg, state)

    def back(state):
        i, top, stack, at, r = state
        _, x, top, stack, at = reach(i, (at[top], get(stack, top), top, stack, at))
        done = (at[top] == i).astype(jnp.int32)
        return i - 1, top - done, stack, at, apply(x, r)

    start = (length - 1, jnp.int32(0), stack, at, r)
    return lax.while_loop(lambda s: s[0] >= 0, back, start)[4]


def _schedule(slots, bound):
    """``(m, c) -> l``: of m steps to reverse with c slots, the first of which holds the state at
    their start, how many to advance before the next state is kept."""
    # Row r holds binomial(c + r, c) for every c, saturated.
    c, table = np.arange(slots + 1, dtype=np.int64), [np.ones(slots + 1, np.int64)]
    while slots > 1 and table[-1][slots] < bound:
        r = len(table)
        table.append(np.minimum(table[-1] * (c + r) // r, 2**31 - 1))
    table = np.array(table, np.int32).T

    def split_at(m, c):
        rows = jnp.asarray(table)
        here, less = rows[c], rows[c - 1]
        r = jnp.maximum(jnp.argmax(here >= m), 1)
        return jnp.minimum(here[r - 1], m - less[r - 1])

    return split_at


mlir.register_lowering(fold_p, mlir.lower_fun(_run, multiple_results=True))


@steps.remember
def _compiled(params):
    return jax.jit(lambda *operands: fold_p.bind(*operands, **dict(params)))


@fold_p.def_impl
def _evaluate(*operands, **params):
    if jax.config.jax_disable_jit:
        return _run(*operands, **params)
    return _compiled(tuple(sorted(params.items())))(*operands)


# ---- forward mode: the fold of duals along the trajectory of duals ----


def _jvp(primals, tangents, *, advance, fold, bound, slots, reverse, counts):
    length, consts, x, r = _parts(primals, counts)
    dots = [t if steps.moves(t) else None for t in tangents]
    _, d_consts, d_x, d_r = split(dots, *counts)
    m_consts, m_x, m_r = ([t is not None for t in group] for group in (d_consts, d_x, d_r))
    m_x = _closure(advance, m_consts, m_x)
    m_r = _closure(fold, m_consts + m_x, m_r)
    outs = bind(
        length,
        consts + select(m_consts, d_consts),
        x + steps.dots_of(x, d_x, m_x),
        r + steps.dots_of(r, d_r, m_r),
        advance=steps.dual_step(advance, tuple(m_consts), tuple(m_x), (), ()),
        fold=_dual_fold(fold, tuple(m_consts), tuple(m_x), tuple(m_r)),
        bound=bound,
        slots=slots,
        reverse=reverse,
    )
    outs, found = split(outs, len(r))
    found = iter(found)
    zero = lambda o: ad.Zero(jax.typeof(o).to_tangent_aval())
    return outs, [next(found) if m else zero(o) for m, o in zip(m_r, outs)]


ad.primitive_jvps[fold_p] = _jvp


def _closure(step, given, carry):
    while True:
        out = steps.active_outputs(step, tuple(given + carry))
        after = [a or b for a, b in zip(carry, out)]
        if after == carry:
            return carry
        carry = after


@steps.remember
def _dual_fold(fold, m_consts, m_x, m_r):
    """The tangent of the fold with its operands sorted as (consts, x, r) again."""
    n = len(m_consts), len(m_x), len(m_r)
    dual = steps.tangent(fold, m_consts + m_x + m_r, m_r)

    def sorted_fold(*args):
        c, dc, x, dx, r, dr = split(args, n[0], sum(m_consts), n[1], sum(m_x), n[2])
        return jaxpr_as_fun(dual)(*c, *x, *r, *dc, *dx, *dr)

    c, x, r, dc, dx, dr = split(dual.in_avals, *n, sum(m_consts), sum(m_x))
    return steps.trace(sorted_fold, [*c, *dc, *x, *dx, *r, *dr])


# ---- linearisation ----


def _by_loops(*operands, advance, fold, bound, slots, reverse, counts):
    """The same fold as ``segments`` does it. Only reverse mode over reverse mode comes here."""
    length, consts, x, r = _parts(operands, counts)
    nest = segments.fold_in_segments(
        advance, fold, counts[1:], segments.levels(bound, slots), reverse
    )
    return jaxpr_as_fun(nest)(length, *consts, *x, *r)


def _trajectory_unknown(unknown, advance, counts):
    _, u_consts, u_x, _ = split(unknown, *counts)
    used = steps.needs(advance, [True] * len(advance.out_avals))
    return unknown[0] or any(u_x) or any(select(used[: counts[1]], u_consts))


def _partial_eval(trace, *tracers, **params):
    unknown = [not t.is_known() for t in tracers]
    if not _trajectory_unknown(unknown, params["advance"], params["counts"]):
        return trace.default_process_primitive(fold_p, tracers, params)
    with set_current_trace(trace):
        return _by_loops(*tracers, **params)


pe.custom_partial_eval_rules[fold_p] = _partial_eval


def _partial_eval_jaxpr(saveable, unknown, instantiated, eqn):
    if not _trajectory_unknown(unknown, eqn.params["advance"], eqn.params["counts"]):
        known = not any(unknown)
        new = [v for v, i in zip(eqn.invars, instantiated) if not i and isinstance(v, steps.Var)]
        flags = [not known] * len(eqn.outvars)
        return (eqn, None, flags, flags, []) if known else (None, eqn, flags, flags, new)
    body = steps.trace(
        lambda *operands: _by_loops(*operands, **eqn.params), [v.aval for v in eqn.invars]
    )
    call = eqn.replace(
        primitive=primitives.closed_call_p, params={"call_jaxpr": body}, effects=body.effects
    )
    rule = pe.partial_eval_jaxpr_custom_rules[primitives.closed_call_p]
    return rule(saveable, unknown, instantiated, call)


pe.partial_eval_jaxpr_custom_rules[fold_p] = _partial_eval_jaxpr


# ---- reverse mode: the fold the other way ----


def _transpose(cts, *operands, advance, fold, bound, slots, reverse, counts):
    length, consts, x, r = _parts(operands, counts)
    linear = list(map(ad.is_undefined_primal, consts))
    kept = steps.restrict(advance, tuple(invert(linear) + [True] * len(x)), (True,) * len(x))
    sums = [jnp.zeros(c.aval.shape, c.aval.dtype) for c in select(linear, consts)]
    outs = bind(
        length,
        select(invert(linear), consts),
        x,
        sums + [ad.instantiate_zeros(ct) for ct in cts],
        advance=kept,
        fold=_transposed(fold, tuple(linear), len(x)),
        bound=bound,
        slots=slots,
        reverse=not reverse,
    )
    sums, d_r = split(outs, len(sums))
    sums = iter(sums)
    d_consts = [next(sums) if m else None for m in linear]
    d_r = [d if ad.is_undefined_primal(v) else None for v, d in zip(r, d_r)]
    return [None, *d_consts, *(None for _ in x), *d_r]


ad.primitive_transposes[fold_p] = _transpose


@steps.remember
def _transposed(fold, linear, n_x):
    c, x, r = split(fold.in_avals, len(linear), n_x)
    known, moving = select(invert(linear), c), select(linear, c)

    def back(*args):
        c, x, sums, ct = split(args, len(known), n_x, len(moving))
        forward = lambda dc, r: jaxpr_as_fun(fold)(*merge(linear, dc, c), *x, *r)
        spec = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        d_c, d_r = jax.linear_transpose(forward, spec(moving), spec(r))(ct)
        return [*map(lax.add, sums, d_c), *d_r]

    return steps.trace(back, [*known, *x, *moving, *r])


# ---- dead code ----


def _wanted(used, eqn):
    """What the used results are computed from, and a fold of nothing else."""
    if not any(used):
        return [False] * len(eqn.invars), None
    p = eqn.params
    advance, fold = p["advance"], p["fold"]
    _, n_consts, n_x = p["counts"]
    while True:
        w_consts, w_x, w_in = split(steps.needs(fold, used), n_consts, n_x)
        w_r = [a or b for a, b in zip(used, w_in)]
        if w_r == list(used):
            break
        used = w_r
    while True:
        a_consts, a_x = split(steps.needs(advance, w_x), n_consts)
        w_next = [a or b for a, b in zip(w_x, a_x)]
        if w_next == w_x:
            break
        w_x = w_next
    w_consts = [a or b for a, b in zip(w_consts, a_consts)]
    advance = steps.restrict(advance, tuple(w_consts + w_x), tuple(w_x))
    fold = steps.restrict(fold, tuple(w_consts + w_x + w_r), tuple(w_r))
    kept = [True, *w_consts, *w_x, *w_r]
    params = dict(p, advance=advance, fold=fold, counts=(1, sum(w_consts), sum(w_x)))
    effects = advance.effects | fold.effects
    return kept, new_jaxpr_eqn(
        select(kept, eqn.invars), select(w_r, eqn.outvars), fold_p, params, effects,
        eqn.source_info, eqn.ctx,
    )  # fmt: skip


steps.wanted_rules[fold_p] = _wanted
pe.dce_rules[fold_p] = steps.dce


# ---- vmap ----


def _batch(axis, operands, dims, **params):
    return lanes.batch_fold(bind, axis, operands, dims, **params)


batching.fancy_primitive_batchers[fold_p] = _batch
