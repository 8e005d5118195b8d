"""What the rules of the loop ask of a step: its tangent, its two halves, its map over lanes.

A step is a closed jaxpr ``(consts, carry, x) -> (carry, y)``. Each question is answered by tracing
it again with public transformations, and the answer is remembered.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.api_util import debug_info
from jax.extend import linear_util as lu
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun, new_jaxpr_eqn, primitives
from jax.interpreters import ad
from jax.interpreters import partial_eval as pe

remember = functools.lru_cache(2048)


def trace(fun, avals):
    """The closed jaxpr of ``fun``, a function of flat arrays, at ``avals``."""
    return jax.make_jaxpr(fun)(*avals)


def split(xs, *sizes):
    """``xs`` cut into lists of the given sizes, and one of what is left."""
    out, at = [], 0
    for n in sizes:
        out.append(list(xs[at : at + n]))
        at += n
    return [*out, list(xs[at:])]


def select(mask, xs):
    """The elements of ``xs`` whose flag is set."""
    return [x for x, m in zip(xs, mask, strict=True) if m]


def merge(mask, yes, no):
    """The list of which ``yes`` is the part with the flag set, ``no`` the rest."""
    yes, no = iter(yes), iter(no)
    return [next(yes) if m else next(no) for m in mask]


def invert(mask):
    return [not m for m in mask]


def is_float(aval):
    return jax.dtypes.issubdtype(aval.dtype, jnp.inexact)


# ---- what depends on what ----

# Primitive -> a rule ``(flags of the used results, equation) -> (flags of the operands they need, the
# equation for them alone)``. It asks for values only, and so differs from a rule for dead code, which
# keeps what has an effect.
wanted_rules = {}


def dce(used, eqn):
    """A rule for dead code that follows from one of ``wanted_rules``."""
    if eqn.effects:
        return [True] * len(eqn.invars), eqn
    return wanted_rules[eqn.primitive](used, eqn)


def _while_wanted(used, eqn):
    """jax has no such rule for ``while``, so a value there would seem to need its tangent."""
    p = eqn.params
    n = p["cond_nconsts"], p["body_nconsts"]
    cond, body = p["cond_jaxpr"], p["body_jaxpr"]
    c_consts, c_carry = split(needs(cond, [True]), n[0])
    carry = [a or b for a, b in zip(used, c_carry)]
    while True:
        b_consts, b_carry = split(needs(body, carry), n[1])
        after = [a or b for a, b in zip(carry, b_carry)]
        if after == carry:
            break
        carry = after
    cond = restrict(cond, (*c_consts, *carry), (True,))
    body = restrict(body, (*b_consts, *carry), tuple(carry))
    params = dict(
        p,
        cond_jaxpr=cond,
        body_jaxpr=body,
        cond_nconsts=sum(c_consts),
        body_nconsts=sum(b_consts),
    )
    kept = [*c_consts, *b_consts, *carry]
    return kept, new_jaxpr_eqn(
        select(kept, eqn.invars),
        select(carry, eqn.outvars),
        eqn.primitive,
        params,
        cond.effects | body.effects,
        eqn.source_info,
        eqn.ctx,
    )


wanted_rules[primitives.while_p] = _while_wanted


def _live(closed, wanted):
    """The equations that the wanted outputs need, and flags of the inputs.

    Unlike dead code elimination in jax this asks for values only: an effect keeps nothing alive.
    """
    live = {v for v, w in zip(closed.jaxpr.outvars, wanted, strict=True) if w and _is_var(v)}
    eqns = []
    for eqn in reversed(closed.jaxpr.eqns):
        hit = [v in live for v in eqn.outvars]
        if any(hit):
            rule = None if eqn.effects else pe.dce_rules.get(eqn.primitive)
            rule = wanted_rules.get(eqn.primitive, rule)
            eqn = rule(hit, eqn)[1] if rule else eqn
            eqns.append(eqn)
            live.update(v for v in eqn.invars if _is_var(v))
    return eqns[::-1], [v in live for v in closed.jaxpr.invars]


def _is_var(atom):
    return isinstance(atom, Var)


@remember
def dependencies(closed):
    """For each output, flags of the inputs from which it is computed."""
    n = len(closed.jaxpr.outvars)
    return tuple(tuple(needs(closed, [i == j for i in range(n)])) for j in range(n))


def depends(closed, flags):
    """Which outputs are computed from an input whose flag is set."""
    return [any(f and u for f, u in zip(flags, used, strict=True)) for used in dependencies(closed)]


def needs(closed, wanted):
    """Which inputs the wanted outputs are computed from."""
    return _live(closed, wanted)[1]


@remember
def active_outputs(closed, flags):
    """Which outputs may have a tangent that is not zero, given which inputs have one.

    Tangents flow through floating-point values only: a counter or a predicate stops them.
    """
    active = {v for v, f in zip(closed.jaxpr.invars, flags, strict=True) if f}
    for eqn in closed.jaxpr.eqns:
        hit = tuple(_is_var(v) and v in active for v in eqn.invars)
        if any(hit):
            jitted = eqn.primitive.name == "jit"
            outs = active_outputs(eqn.params["jaxpr"], hit) if jitted else [True] * len(eqn.outvars)
            active.update(v for v, f in zip(eqn.outvars, outs) if f and is_float(v.aval))
    return [_is_var(v) and v in active for v in closed.jaxpr.outvars]


def forwarded(closed):
    """For each output, the index of the input that it is, unchanged, or None."""
    source = {v: i for i, v in enumerate(closed.jaxpr.invars)}
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "jit":
            for v, i in zip(eqn.outvars, forwarded(eqn.params["jaxpr"])):
                if i is not None and _is_var(eqn.invars[i]) and eqn.invars[i] in source:
                    source[v] = source[eqn.invars[i]]
    return [source.get(v) if _is_var(v) else None for v in closed.jaxpr.outvars]


# ---- parts of a step ----


@remember
def ignoring(closed, extra):
    """The same function with further inputs, at the end, that it does not look at."""
    n = len(closed.in_avals)
    return trace(lambda *args: jaxpr_as_fun(closed)(*args[:n]), [*closed.in_avals, *extra])


@remember
def restrict(closed, ins, outs):
    """The step as a function of the flagged inputs alone, returning the flagged outputs alone.

    The wanted outputs must not need the inputs that are dropped.
    """
    eqns, used = _live(closed, outs)
    assert all(i for i, u in zip(ins, used) if u), "a wanted output needs a dropped input"
    jaxpr = closed.jaxpr.replace(
        invars=select(ins, closed.jaxpr.invars),
        outvars=select(outs, closed.jaxpr.outvars),
        eqns=eqns,
    )
    return trace(jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts)), select(ins, closed.in_avals))


@remember
def tangent(closed, active_in, active_out):
    """``(inputs, tangents of the active inputs) -> (outputs, tangents of the active outputs)``."""

    def dual(*args):
        primals, tangents = split(args, len(closed.in_avals))
        moving = lambda *moved: jaxpr_as_fun(closed)(
            *merge(active_in, moved, select(invert(active_in), primals))
        )
        outs, dots = jax.jvp(moving, select(active_in, primals), tangents)
        return [*outs, *select(active_out, dots)]

    tangents = [a.to_tangent_aval() for a in select(active_in, closed.in_avals)]
    return trace(dual, [*closed.in_avals, *tangents])


@remember
def dual_step(step, m_consts, m_carry, m_xs, m_ys):
    """The tangent of the step with its operands sorted as (consts, carry, x) again."""
    n = len(m_consts), len(m_carry), len(m_xs)
    dual = tangent(step, m_consts + m_carry + m_xs, m_carry + m_ys)

    def sorted_step(*args):
        c, dc, s, ds, x, dx = split(args, n[0], sum(m_consts), n[1], sum(m_carry), n[2])
        outs = jaxpr_as_fun(dual)(*c, *s, *x, *dc, *ds, *dx)
        s, y, ds, dy = split(outs, n[1], len(m_ys), sum(m_carry))
        return [*s, *ds, *y, *dy]

    c, s, x, dc, ds, dx = split(dual.in_avals, *n, sum(m_consts), sum(m_carry))
    return trace(sorted_step, [*c, *dc, *s, *ds, *x, *dx])


def moves(t):
    """Whether a tangent is there at all."""
    return type(t) is not ad.Zero and jax.typeof(t).dtype != jax.dtypes.float0


def dots_of(xs, dots, moving):
    """The tangents of those that move, zeros where one starts at rest."""
    zero = lambda x: ad.instantiate_zeros(ad.Zero(jax.typeof(x).to_tangent_aval()))
    return [zero(x) if t is None else t for x, t, m in zip(xs, dots, moving) if m]


class Halves(NamedTuple):
    known: ClosedJaxpr  # known inputs -> known outputs, residuals
    unknown: ClosedJaxpr  # residuals, unknown inputs -> unknown outputs
    out_unknown: tuple


@remember
def halves(closed, unknown, keep_unknown):
    """The step in two: what the known inputs determine, and the rest given residuals.

    Outputs flagged in ``keep_unknown`` go to the second half whatever they depend on.
    """
    found, fun = {}, jaxpr_as_fun(closed)

    def known(*ins):
        ins = iter(ins)
        pvals = [
            pe.PartialVal.unknown(a) if u else pe.PartialVal.known(next(ins))
            for a, u in zip(closed.in_avals, unknown, strict=True)
        ]
        rest, outs, residuals = pe.trace_to_jaxpr_nounits(
            lu.wrap_init(fun, debug_info=debug_info("bounded loop", fun, pvals, {})),
            pvals,
            instantiate=list(keep_unknown),
        )
        found["rest"] = rest
        found["out_unknown"] = tuple(not o.is_known() for o in outs)
        found["residuals"] = [jax.typeof(r) for r in residuals]
        return [*(o.get_known() for o in outs if o.is_known()), *residuals]

    first = trace(known, select(invert(unknown), closed.in_avals))
    rest, residuals = found["rest"], found["residuals"]
    second = lambda *args: jaxpr_as_fun(ClosedJaxpr(rest, list(args[: len(residuals)])))(
        *args[len(residuals) :]
    )
    avals = [*residuals, *select(unknown, closed.in_avals)]
    return Halves(first, trace(second, avals), found["out_unknown"])


@remember
def mapped(closed, axis, batched_in, batched_out):
    """The step over lanes: flagged inputs and outputs carry them on their first axis."""
    flags = lambda mask: [0 if m else None for m in mask]
    fun = jax.vmap(
        lambda *args: jaxpr_as_fun(closed)(*args),
        in_axes=flags(batched_in),
        out_axes=flags(batched_out),
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name,
    )
    grow = lambda a: jax.ShapeDtypeStruct((axis.size, *a.shape), a.dtype)
    avals = [grow(a) if m else a for a, m in zip(closed.in_avals, batched_in, strict=True)]
    return trace(lambda *args: fun(*args), avals)
