"""What the forward pass of a loop keeps for its linear part, and within which memory.

Linearising a loop splits its step into what is known and what is linear in the unknowns. Between
the two stand residuals, and there are two ways to hand them over:

- *residuals*: each step's residuals are saved as rows, and nothing is computed twice;
- *states*: each step's carry is saved, and the linear loop computes the residuals from it again.

A residual that depends on the loop's constants alone is computed once, outside the loop, and one
that is an operand is not saved at all: weights are never stacked. Where the carry holds a buffer of
which a step writes one row, the residual of the write is its index, so the residuals are small
though the states are large.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from pybridge._loops import steps
from pybridge._loops.steps import invert, select, split

# Rows are filled by XLA before the loop starts, for the whole bound. Up to this many bytes that
# costs less than computing residuals again.
FREE_BYTES = 2**18


class Plan(NamedTuple):
    """A loop in two parts; the second is linear if the unknown operands are tangents."""

    out_unknown: list
    run_known: Callable  # known operands -> known results, what to hand over
    run_unknown: Callable  # what was handed over, unknown operands -> unknown results


def plan(bind, unknown, *, cond, step, bound, reverse, checkpoints, counts):
    """How to split the loop, or None where it stays whole; ``bind`` binds a loop."""
    u_control, u_consts, u_start, u_xs = split(unknown, *counts)
    n_carry = len(u_start)
    if any(u_control) or not any(unknown) or bound is None:
        return None
    u_carry = u_start
    while True:
        keep = tuple(u_carry) + (False,) * (len(step.out_avals) - n_carry)
        halves = steps.halves(step, tuple(u_consts + u_carry + u_xs), keep)
        u_after, u_ys = split(halves.out_unknown, n_carry)
        if u_after == u_carry:
            break
        u_carry = u_after
    if cond is None and all(u_carry) and all(u_ys):
        return None
    if cond is not None and any(steps.depends(cond, [False] * counts[0] + u_carry)):
        return None

    n = tuple(len(u) - sum(u) for u in (u_consts, u_carry, u_xs))
    n_out = n[1] + len(u_ys) - sum(u_ys)
    keeping = _keep(halves.known, n, n_out, bound)
    first = _known_step(halves.known, keeping, n, n_out)
    second = _linear_step(halves, keeping, n, n_out, sum(u_consts), sum(u_carry))
    known_carry = tuple(invert(u_carry))
    known_cond = cond and steps.restrict(cond, (True,) * counts[0] + known_carry, (True,))
    shared = {"bound": bound, "reverse": reverse, "checkpoints": checkpoints}

    def run_known(operands):
        operands = iter(operands)
        take = lambda mask: [None if u else next(operands) for u in mask]
        control, consts, start, xs = map(take, (u_control, u_consts, u_start, u_xs))
        consts, xs = (select(invert(u), v) for u, v in ((u_consts, consts), (u_xs, xs)))
        carry = select(known_carry, start)
        outs = bind(control, consts, carry, xs, cond=known_cond, step=first, **shared)
        outs, saved = split(outs, int(cond is not None) + n_out)
        length = outs[0] if cond is not None else control[0]
        fixed = jaxpr_as_fun(keeping.fixed)(*consts)
        # A carry that starts known and becomes unknown hands over its start.
        late = [x for x, u, k in zip(start, u_start, known_carry) if not (u or k)]
        again = select(keeping.consts, consts)
        return outs, [length, *fixed, *again, *saved, *select(keeping.xs, xs), *late]

    def run_unknown(handed, operands):
        length, fixed, consts, saved, xs, late = split(
            handed, 1, len(keeping.fixed.out_avals), sum(keeping.consts), keeping.n_saved,
            sum(keeping.xs),
        )  # fmt: skip
        u_c, u_s, u_x = split(operands, sum(u_consts), sum(u_start))
        u_s, late = iter(u_s), iter(late)
        carry = [next(u_s) if u else next(late) for u in select(u_carry, u_start)]
        return bind(
            length, [*fixed, *consts, *u_c], carry, [*saved, *xs, *u_x], cond=None, step=second,
            **shared,
        )  # fmt: skip

    out_unknown = [False] * int(cond is not None) + u_carry + u_ys
    return Plan(out_unknown, run_known, run_unknown)


class Keeping(NamedTuple):
    """Where each residual of a step comes from: (kind, index) into one of the lists below."""

    source: tuple
    fixed: ClosedJaxpr  # known consts -> residuals that depend on nothing else
    saved: tuple  # indices of the residuals that are saved as rows
    states: tuple  # indices of the known carries that are saved as rows
    consts: tuple  # flags of the known consts that the linear step computes residuals from
    xs: tuple  # flags of the known rows that the linear step needs

    @property
    def n_saved(self):
        return len(self.saved) + len(self.states)


@steps.remember
def _keep(known, n, n_out, bound):
    n_consts, n_carry, n_xs = n
    variables = known.jaxpr.outvars[n_out:]
    place = {v: i for i, v in enumerate(known.jaxpr.invars)}
    used = steps.dependencies(known)[n_out:]
    source, fixed, saved, states, rows = [], [], {}, {}, set()
    for i, v in enumerate(variables):
        at = None if isinstance(v, Literal) else place.get(v)
        if not any(used[i][n_consts:]):
            source.append(("fixed", len(fixed)))
            fixed.append(i)
        elif at is None:
            source.append(("saved", saved.setdefault(v, (len(saved), i))[0]))
        elif at < n_consts + n_carry:
            source.append(("state", states.setdefault(at - n_consts, len(states))))
        else:
            source.append(("row", at - n_consts - n_carry))
            rows.add(at - n_consts - n_carry)
    saved = [i for _, i in saved.values()]
    only = lambda chosen: tuple(i in chosen for i in range(n_out + len(variables)))
    just_consts = tuple(i < n_consts for i in range(sum(n)))
    fixed = steps.restrict(known, just_consts, only([n_out + i for i in fixed]))
    none, flags = (False,) * n_consts, tuple(k in rows for k in range(n_xs))
    by_residuals = Keeping(tuple(source), fixed, tuple(saved), tuple(states), none, flags)
    if not saved:
        return by_residuals

    again = steps.needs(known, only([n_out + i for i in saved]))
    a_consts, a_carry, a_xs = split(again, n_consts, n_carry)
    for j in select(a_carry, range(n_carry)):
        states.setdefault(j, len(states))
    flags = tuple(a or b for a, b in zip(flags, a_xs))
    by_states = by_residuals._replace(
        saved=(), states=tuple(states), consts=tuple(a_consts), xs=flags
    )
    sizes = [(_row_bytes(known, k, n_consts, n_out), k) for k in (by_residuals, by_states)]
    if bound * sizes[0][0] <= FREE_BYTES:
        return by_residuals
    return min(sizes, key=lambda pair: pair[0])[1]


def _row_bytes(known, keeping, n_consts, n_out):
    avals = [known.out_avals[n_out + i] for i in keeping.saved]
    avals += [known.in_avals[n_consts + j] for j in keeping.states]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


@steps.remember
def _known_step(known, keeping, n, n_out):
    """The known half, with what it keeps as further ys."""

    def step(*args):
        outs, residuals = split(jaxpr_as_fun(known)(*args), n_out)
        carry = args[n[0] : n[0] + n[1]]
        return [*outs, *(residuals[i] for i in keeping.saved), *(carry[j] for j in keeping.states)]

    return steps.trace(step, known.in_avals)


@steps.remember
def _linear_step(halves, keeping, n, n_out, n_consts, n_carry):
    """The unknown half on rows of what was kept; its consts are fixed, again, unknown."""
    known, unknown = halves.known, halves.unknown
    k_consts, k_carry, k_xs = split(known.in_avals, n[0], n[1])
    _, u_avals = split(unknown.in_avals, len(keeping.source))
    u_consts, u_carry, u_xs = split(u_avals, n_consts, n_carry)
    groups = [
        keeping.fixed.out_avals,
        select(keeping.consts, k_consts),
        u_consts,
        u_carry,
        [known.out_avals[n_out + i] for i in keeping.saved],
        [k_carry[j] for j in keeping.states],
        select(keeping.xs, k_xs),
        u_xs,
    ]
    computed = [kind == "saved" and not keeping.saved for kind, _ in keeping.source]
    wanted = (False,) * n_out + tuple(computed)

    def step(*args):
        fixed, consts, u_c, u_s, saved, states, xs, u_x = split(args, *map(len, groups[:-1]))
        states = dict(zip(keeping.states, states))
        rows = dict(zip(select(keeping.xs, range(n[2])), xs))
        again = iter(())
        if any(computed):
            here = (*keeping.consts, *(j in states for j in range(n[1])), *keeping.xs)
            again = iter(
                jaxpr_as_fun(steps.restrict(known, here, wanted))(*consts, *_in_order(states), *xs)
            )
        pick = {
            "fixed": fixed,
            "saved": saved,
            "state": [states[j] for j in keeping.states],
            "row": rows,
        }
        residuals = [
            next(again) if c else pick[kind][i] for c, (kind, i) in zip(computed, keeping.source)
        ]
        return jaxpr_as_fun(unknown)(*residuals, *u_c, *u_s, *u_x)

    return steps.trace(step, list(itertools.chain(*groups)))


def _in_order(table):
    return [table[k] for k in sorted(table)]
