"""The rules that close the primitive: every derivative of a loop is again such a loop.

The tangent is the loop on dual carries; its linear part, given what the forward pass saved as ys, is
a loop of given length over those as xs; the transpose of that runs the rows backwards.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Var, gensym, jaxpr_as_fun, new_jaxpr_eqn, primitives, set_current_trace
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from pybridge._loops import chunks, lanes, saving, steps
from pybridge._loops.primitive import bind, loop_p, parts
from pybridge._loops.steps import dots_of, dual_step, invert, merge, moves, select, split

# ---- forward mode: the loop on dual carries ----


def _jvp(primals, tangents, *, cond, step, bound, reverse, checkpoints, counts):
    control, consts, carry, xs = parts(primals, counts)
    dots = parts([t if moves(t) else None for t in tangents], counts)
    moving = [[t is not None for t in group] for group in dots]
    _, m_consts, m_carry, m_xs = moving
    while True:
        out = steps.active_outputs(step, tuple(m_consts + m_carry + m_xs))
        m_next = [a or b for a, b in zip(m_carry, out)]
        if m_next == m_carry:
            break
        m_carry = m_next
    m_ys = out[len(carry) :]
    dual = dual_step(step, tuple(m_consts), tuple(m_carry), tuple(m_xs), tuple(m_ys))
    outs = bind(
        control,
        consts + select(m_consts, dots[1]),
        carry + dots_of(carry, dots[2], m_carry),
        xs + select(m_xs, dots[3]),
        cond=cond and steps.ignoring(cond, _dots(cond.in_avals[counts[0] :], m_carry)),
        step=dual,
        bound=bound,
        reverse=reverse,
        checkpoints=checkpoints,
    )
    length, carry_out, carry_dots, ys, ys_dots = split(
        outs, int(cond is not None), len(carry), sum(m_carry), len(m_ys)
    )
    primal_out = [*length, *carry_out, *ys]
    still = [False] * len(length)
    dots_out = iter(carry_dots + ys_dots)
    tangent_out = [
        next(dots_out) if m else ad.Zero(jax.typeof(p).to_tangent_aval())
        for p, m in zip(primal_out, still + m_carry + m_ys)
    ]
    return primal_out, tangent_out


ad.primitive_jvps[loop_p] = _jvp


def _dots(avals, moving):
    return tuple(a.to_tangent_aval() for a in select(moving, avals))


# ---- linearisation: run what is known, saving; leave a loop of known length ----


def _lanes_around(trace):
    """How many lanes of ``vmap`` there are outside: what is kept here is kept once for each. There is
    no public way to ask; without an answer the budget is that of one lane."""
    lanes = 1
    while trace is not None:
        lanes *= getattr(getattr(trace, "axis_data", None), "size", None) or 1
        trace = getattr(trace, "parent_trace", None)
    return lanes


def _partial_eval(trace, *tracers, **params):
    unknown = [not t.is_known() for t in tracers]
    plan = saving.plan(unknown, copies=_lanes_around(trace), **params)
    if plan is None:
        return trace.default_process_primitive(loop_p, tracers, params)
    operands = [t if u else t.pval.get_known() for t, u in zip(tracers, unknown)]
    outs, handed = plan.run_known(select(invert(unknown), operands))
    with set_current_trace(trace):
        rest = plan.run_unknown(handed, select(unknown, operands))
    return merge(plan.out_unknown, rest, outs)


pe.custom_partial_eval_rules[loop_p] = _partial_eval


def _partial_eval_jaxpr(saveable, unknown, instantiated, eqn):
    """The same for an equation: under checkpoint and shard_map."""
    new = [v for v, i in zip(eqn.invars, instantiated) if not i and isinstance(v, Var)]
    if not any(unknown):  # nothing to split: the policy says whether it is saved or run again
        again = saveable(loop_p, *(v.aval for v in eqn.invars), **eqn.params) is not True
        n = len(eqn.outvars)
        return eqn, eqn if again else None, [False] * n, [again] * n, new if again else []
    plan = saving.plan(unknown, **eqn.params)
    if plan is None:
        return None, eqn, [True] * len(eqn.outvars), [True] * len(eqn.outvars), new
    known_in, unknown_in = select(invert(unknown), eqn.invars), select(unknown, eqn.invars)
    found = {}

    def first(*operands):
        outs, handed = plan.run_known(list(operands))
        found["residuals"] = list(map(jax.typeof, handed))
        return [*outs, *handed]

    first = steps.trace(first, [v.aval for v in known_in])
    n = len(found["residuals"])
    second = steps.trace(
        lambda *args: plan.run_unknown(list(args[:n]), list(args[n:])),
        [*found["residuals"], *(v.aval for v in unknown_in)],
    )
    new_var = gensym()
    residuals = [new_var(a) for a in found["residuals"]]
    known_out = select(invert(plan.out_unknown), eqn.outvars)
    call = lambda ins, outs, body: new_jaxpr_eqn(
        ins, outs, primitives.closed_call_p, {"call_jaxpr": body}, body.effects, eqn.source_info
    )
    return (
        call(known_in, known_out + residuals, first),
        call(residuals + unknown_in, select(plan.out_unknown, eqn.outvars), second),
        list(plan.out_unknown),
        list(plan.out_unknown),
        new + residuals,
    )


pe.partial_eval_jaxpr_custom_rules[loop_p] = _partial_eval_jaxpr


# ---- reverse mode: the transpose of a linear loop runs its rows backwards ----


def _transpose(cts, *operands, cond, step, bound, reverse, checkpoints, counts):
    if cond is not None:
        raise ValueError(
            "reverse-mode differentiation of a loop with max_steps=None: the reverse pass needs a "
            "bound on what it saves. Give max_steps an integer, or use forward mode (jax.jvp, "
            "jax.jacfwd)."
        )
    control, consts, carry, xs = parts(operands, counts)
    linear = ad.is_undefined_primal
    lin_consts, lin_xs = list(map(linear, consts)), list(map(linear, xs))
    known_c, known_x = select(invert(lin_consts), consts), select(invert(lin_xs), xs)
    ct_carry, ct_ys = split(cts, len(carry))
    ct_carry = list(map(ad.instantiate_zeros, ct_carry))
    live_ys = [type(ct) is not ad.Zero for ct in ct_ys]
    ct_ys = select(live_ys, ct_ys)
    loop = {"bound": bound, "reverse": not reverse, "checkpoints": checkpoints}
    if not (any(lin_xs) or live_ys) and chunks.pay(step, lin_consts, len(carry), bound):
        known = *control, known_c, ct_carry, known_x
        outs = chunks.transpose(_transposed_step, step, *known, lin_consts, **loop)
    else:
        back = _transposed_step(step, tuple(lin_consts), len(carry), tuple(lin_xs), tuple(live_ys))
        sums = [jnp.zeros(c.aval.shape, c.aval.dtype) for c in select(lin_consts, consts)]
        rows = known_x + ct_ys
        outs = bind(control, known_c, sums + ct_carry, rows, cond=None, step=back, **loop)
    d_consts, d_carry, d_xs = split(outs, sum(lin_consts), len(carry))
    return [
        *(None for _ in control),
        *merge(lin_consts, d_consts, [None] * len(known_c)),
        *(d if linear(x) else None for x, d in zip(carry, d_carry)),
        *merge(lin_xs, d_xs, [None] * len(known_x)),
    ]


ad.primitive_transposes[loop_p] = _transpose


@steps.remember
def _transposed_step(step, lin_consts, n_carry, lin_xs, live_ys):
    """One reverse step: known consts; sums of the consts' cotangents and the carry's; known rows
    and the ys' cotangents; cotangents of the linear rows as ys."""
    avals_c, avals_s, avals_x = split(step.in_avals, len(lin_consts), n_carry)
    lin_c, lin_x = select(lin_consts, avals_c), select(lin_xs, avals_x)
    known_c, known_x = select(invert(lin_consts), avals_c), select(invert(lin_xs), avals_x)
    out_y = select(live_ys, step.out_avals[n_carry:])

    def back(*args):
        c, sums, ct_s, x, ct_y = split(args, len(known_c), len(lin_c), n_carry, len(known_x))

        def forward(dc, s, dx):
            outs = jaxpr_as_fun(step)(*merge(lin_consts, dc, c), *s, *merge(lin_xs, dx, x))
            s, y = split(outs, n_carry)
            return s, select(live_ys, y)

        spec = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        pull = jax.linear_transpose(forward, spec(lin_c), spec(avals_s), spec(lin_x))
        d_c, d_s, d_x = pull((ct_s, ct_y))
        return [*map(jax.lax.add, sums, d_c), *d_s, *d_x]

    return steps.trace(back, [*known_c, *lin_c, *avals_s, *known_x, *out_y])


# ---- vmap: map the step, mask the lanes that have stopped ----


def _batch(axis, operands, dims, **params):
    return lanes.batch(axis, operands, dims, **params)


batching.fancy_primitive_batchers[loop_p] = _batch


# ---- dead code: a loop that computes only what is wanted ----


def _wanted(used, eqn):
    if not any(used):
        return [False] * len(eqn.invars), None
    p = eqn.params
    cond, step, counts = p["cond"], p["step"], p["counts"]
    n_control, n_consts, n_carry = counts
    head = int(cond is not None)
    _, w_carry, w_ys = split(used, head, n_carry)
    if cond is not None:
        w_carry = [a or b for a, b in zip(w_carry, steps.needs(cond, [True])[n_control:])]
    while True:
        w_consts, w_in, w_xs = split(steps.needs(step, w_carry + w_ys), n_consts, n_carry)
        w_next = [a or b for a, b in zip(w_carry, w_in)]
        if w_next == w_carry:
            break
        w_carry = w_next
    kept = [True] * n_control + w_consts + w_carry + w_xs
    params = dict(
        p,
        step=steps.restrict(step, tuple(w_consts + w_carry + w_xs), tuple(w_carry + w_ys)),
        cond=cond and steps.restrict(cond, (True,) * n_control + tuple(w_carry), (True,)),
        counts=(n_control, sum(w_consts), sum(w_carry)),
    )
    wanted = [True] * head + w_carry + w_ys
    # A carry that others need is computed though nobody asked for it: its variable stays unread.
    outvars = select(wanted, eqn.outvars)
    invars = select(kept, eqn.invars)
    effects = params["step"].effects | (params["cond"].effects if cond is not None else frozenset())
    return kept, new_jaxpr_eqn(invars, outvars, loop_p, params, effects, eqn.source_info, eqn.ctx)


steps.wanted_rules[loop_p] = _wanted
pe.dce_rules[loop_p] = steps.dce
