"""What the forward pass of a loop keeps for its linear part, and within which memory.

Linearising a loop splits its step into what is known and what is linear in the unknowns. Between
the two stand residuals, and there are four ways to hand them over:

- *residuals*: each step's residuals are saved as rows, and nothing is computed twice;
- *states*: each step's carry is saved, and the linear loop computes the residuals from it again;
- *states and the last residuals*: the same, but the last steps hand over their residuals too, from a
  ring. That is for large constants, which computing residuals reads once more: a short loop then
  reads them no more often than it must, and for a long one ``chunks`` does it many steps at a time;
- *checkpoints*: only the start is handed over, and the linear part is a fold along the trajectory,
  which it computes again (see ``trajectory``).

A loop without a bound saves nothing and has no transpose.

A residual that depends on the loop's constants alone is computed once, outside the loop, and one
that is an operand is not saved at all: weights are never stacked. Where the carry holds a buffer of
which a step writes one row, the residual of the write is its index, so the residuals are small
though the states are large.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from pybridge._loops import chunks, lanes, steps, trajectory
from pybridge._loops.primitive import bind
from pybridge._loops.steps import invert, merge, select, split

# Rows are filled by XLA before the loop starts, for the whole bound. Up to this many bytes that
# costs less than computing residuals again.
FREE_BYTES = 2**16

# The most that checkpoints="auto" fills with rows, unless a few single states are larger than that:
# then checkpoints of states would save nothing.
BUDGET_BYTES = 2**24
FEW_STATES = 8

# More slots than this would not help: two advances a step then reach 1e8 steps.
MOST_SLOTS = 2**14


class Plan(NamedTuple):
    """A loop in two parts; the second is linear if the unknown operands are tangents."""

    out_unknown: list
    run_known: Callable  # known operands -> known results, what to hand over
    run_unknown: Callable  # what was handed over, unknown operands -> unknown results


class Halved(NamedTuple):
    """A loop whose step is in two halves; u_ and k_ flag what is unknown and known."""

    halves: steps.Halves
    u_consts: list
    u_start: list  # carries that are unknown from the start
    u_carry: list  # carries that are, or become, unknown
    u_xs: list
    u_ys: list
    has_cond: bool

    @property
    def n(self):
        """The numbers of known consts, carries and rows."""
        return tuple(len(u) - sum(u) for u in (self.u_consts, self.u_carry, self.u_xs))

    @property
    def n_out(self):
        """The number of known results of the step."""
        return self.n[1] + len(self.u_ys) - sum(self.u_ys)


def plan(unknown, *, cond, step, bound, reverse, checkpoints, counts, copies=1):
    """How to split the loop, or None where it stays whole; ``copies`` of it share the budget."""
    u_control, u_consts, u_start, u_xs = split(unknown, *counts)
    if any(u_control) or not any(unknown) or checkpoints == "unsaved":
        return None
    u_carry = u_start
    while True:
        keep = tuple(u_carry) + (False,) * (len(step.out_avals) - len(u_carry))
        halves = steps.halves(step, tuple(u_consts + u_carry + u_xs), keep)
        u_after, u_ys = split(halves.out_unknown, len(u_carry))
        if u_after == u_carry:
            break
        u_carry = u_after
    if cond is None and all(u_carry) and all(u_ys):
        return None
    if cond is not None and any(steps.depends(cond, [False] * counts[0] + u_carry)):
        return None
    loop = Halved(halves, u_consts, u_start, u_carry, u_xs, u_ys, cond is not None)
    k_cond = cond and steps.restrict(cond, (True,) * counts[0] + tuple(invert(u_carry)), (True,))
    shared = {"bound": bound, "reverse": reverse, "checkpoints": checkpoints}
    moving = _bytes(select(u_consts, step.in_avals[: counts[1]]))
    keeping = _keep(loop.halves, loop.n, loop.n_out, 1 if bound is None else bound, moving)
    slots = None if bound is None else _slots(loop, keeping, bound, checkpoints, copies)
    if bound is None:
        known, unknown = _unsaved(loop, keeping, cond, k_cond, step, shared)
    elif slots is None:
        known, unknown = _rows(loop, keeping, k_cond, shared)
    else:
        known, unknown = _trajectory(loop, keeping, k_cond, shared, slots)

    def run_known(operands):
        operands = iter(operands)
        take = lambda mask: [None if u else next(operands) for u in mask]
        control, consts, start, xs = map(take, (u_control, u_consts, u_start, u_xs))
        consts, xs = select(invert(u_consts), consts), select(invert(u_xs), xs)
        outs, handed = known(control, consts, select(invert(u_carry), start), xs)
        # A carry that starts known and becomes unknown hands over its start.
        late = [x for x, s, c in zip(start, u_start, u_carry) if c and not s]
        return outs, [*late, *handed]

    def run_unknown(handed, operands):
        late, handed = split(handed, sum(u_carry) - sum(u_start))
        u_c, u_s, u_x = split(operands, sum(u_consts), sum(u_start))
        u_s, late = iter(u_s), iter(late)
        start = [next(u_s) if u else next(late) for u in select(u_carry, u_start)]
        return unknown(handed, u_c, start, u_x)

    return Plan([False] * loop.has_cond + u_carry + u_ys, run_known, run_unknown)


def _run(loop, control, consts, carry, xs, cond, step, shared):
    """The known loop: its results and its length."""
    outs = bind(control, consts, carry, xs, cond=cond, step=step, **shared)
    return outs, outs[0] if loop.has_cond else control[0]


# ---- the ways ----


def _rows(loop, keeping, cond, shared):
    """By residuals or by states: rows of either."""
    first = _known_step(loop.halves.known, keeping, loop.n, loop.n_out)
    second = _linear_step(loop, keeping)
    ring = [loop.halves.known.out_avals[loop.n_out + i] for i in keeping.recent]
    sizes = (1, len(keeping.fixed.out_avals), sum(keeping.consts), len(ring), keeping.n_rows)
    if ring:
        cond = cond and steps.ignoring(cond, tuple(_ring_avals(ring)))

    def known(control, consts, carry, xs):
        start = [jnp.zeros(a.shape, a.dtype) for a in _ring_avals(ring)]
        outs = bind(control, consts, [*carry, *start], xs, cond=cond, step=first, **shared)
        head, carry, _, ring_out, ys, rows = split(
            outs,
            int(loop.has_cond),
            loop.n[1],
            min(1, len(ring)),
            len(ring),
            loop.n_out - loop.n[1],
        )
        fixed = jaxpr_as_fun(keeping.fixed)(*consts)
        again = select(keeping.consts, consts)
        (length,) = head or control
        handed = [length, *fixed, *again, *ring_out, *rows, *select(keeping.xs, xs)]
        return [*head, *carry, *ys], handed

    def unknown(handed, u_consts, start, u_xs):
        (length,), fixed, again, ring, rows, xs = split(handed, *sizes)
        consts, xs = [*fixed, *again, *u_consts], [*rows, *xs, *u_xs]
        if ring:
            at = jnp.arange(shared["bound"], dtype=jnp.int32)
            consts, xs = [length - chunks.CHUNK, *ring, *consts], [at, *xs]
        return bind([length], consts, start, xs, cond=None, step=second, **shared)

    return known, unknown


def _ring_avals(ring):
    """The number of a step, and a row for each of the last steps."""
    rows = [a.update(shape=(chunks.CHUNK, *a.shape)) for a in ring]
    return [jax.core.ShapedArray((), jnp.int32), *rows] if ring else []


def _trajectory(loop, keeping, cond, shared, slots):
    """By checkpoints: a fold that starts where the loop started."""
    n_consts, n_carry, _ = loop.n
    every = keeping._replace(
        saved=(), states=tuple(range(n_carry)), consts=(True,) * n_consts, xs=(), recent=()
    )
    first = _known_step(loop.halves.known, every._replace(states=()), loop.n, loop.n_out)
    second = _linear_step(loop, every)
    n = len(every.fixed.out_avals), n_consts, sum(loop.u_consts), sum(loop.u_carry)
    c, r, x = split(second.in_avals, n[0] + n[1] + n[2], n[3])

    def fold(*args):
        c, x, r = split(args, n[0] + n[1] + n[2], n_carry)
        return jaxpr_as_fun(second)(*c, *r, *x)

    def advance(*args):
        _, consts, _, x = split(args, *n[:3])
        return jaxpr_as_fun(first)(*consts, *x)

    fold, advance = steps.trace(fold, [*c, *x, *r]), steps.trace(advance, [*c, *x])

    def known(control, consts, carry, xs):
        outs, length = _run(loop, control, consts, carry, xs, cond, first, shared)
        return outs, [length, *jaxpr_as_fun(every.fixed)(*consts), *consts, *carry]

    def unknown(handed, u_consts, start, _):
        (length,), consts, carry = split(handed, 1, n[0] + n[1])
        return trajectory.bind(
            length, consts + u_consts, carry, start,
            advance=advance, fold=fold, bound=shared["bound"], slots=slots, reverse=False,
        )  # fmt: skip

    return known, unknown


def _unsaved(loop, keeping, cond, known_cond, step, shared):
    """Without a bound nothing can be saved: the second part is the whole loop again. That serves
    forward mode; its transpose is an error."""
    nothing = keeping._replace(saved=(), states=(), recent=())
    first = _known_step(loop.halves.known, nothing, loop.n, loop.n_out)

    def known(control, consts, carry, xs):
        outs, _ = _run(loop, control, consts, carry, xs, known_cond, first, shared)
        return outs, [*control, *consts, *carry]

    def unknown(handed, u_consts, start, _):
        control, consts, carry = split(handed, len(handed) - loop.n[0] - loop.n[1], loop.n[0])
        consts = merge(loop.u_consts, u_consts, consts)
        carry = merge(loop.u_carry, start, carry)
        again = {**shared, "checkpoints": "unsaved"}
        _, *outs = bind(control, consts, carry, [], cond=cond, step=step, **again)
        return select(loop.u_carry, outs)

    return known, unknown


# ---- which of them ----


class Keeping(NamedTuple):
    """Where each residual of a step comes from, and what is kept for that."""

    source: tuple  # a (kind, index) each: fixed, saved, a state or a row of xs
    fixed: ClosedJaxpr  # known consts -> residuals that depend on nothing else
    saved: tuple  # indices of the residuals that are saved as rows; if none are, they are computed
    states: tuple  # indices of the known carries that are saved as rows, ascending
    consts: tuple  # flags of the known consts that the linear step computes residuals from
    xs: tuple  # flags of the known rows that the linear step needs
    recent: tuple = ()  # indices of the residuals that the last steps hand over in a ring

    @property
    def n_rows(self):
        return len(self.saved) + len(self.states)

    def row_bytes(self, known, n, n_out):
        avals = [known.out_avals[n_out + i] for i in self.saved]
        return _bytes(avals + [known.in_avals[n[0] + j] for j in self.states])


def _bytes(avals):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


@steps.remember
def _keep(halves, n, n_out, bound, moving):
    """By residuals or by states, whichever fills fewer bytes with rows; ``moving`` is the size of the
    constants that are differentiated."""
    known = halves.known
    n_consts, n_carry, n_xs = n
    variables = known.jaxpr.outvars[n_out:]
    place = {v: i for i, v in enumerate(known.jaxpr.invars)}
    used = steps.dependencies(known)[n_out:]
    source, fixed, saved, states, rows = [], [], {}, set(), set()
    for i, v in enumerate(variables):
        at = None if isinstance(v, Literal) else place.get(v)
        if not any(used[i][n_consts:]):
            source.append(("fixed", len(fixed)))
            fixed.append(i)
        elif at is None:
            source.append(("saved", saved.setdefault(v, (len(saved), i))[0]))
        elif at < n_consts + n_carry:
            source.append(("state", at - n_consts))
            states.add(at - n_consts)
        else:
            source.append(("row", at - n_consts - n_carry))
            rows.add(at - n_consts - n_carry)
    saved = tuple(i for _, i in saved.values())
    only = lambda chosen: tuple(i in chosen for i in range(n_out + len(variables)))
    just_consts = tuple(i < n_consts for i in range(sum(n)))
    fixed = steps.restrict(known, just_consts, only([n_out + i for i in fixed]))
    none, flags = (False,) * n_consts, tuple(k in rows for k in range(n_xs))
    by_residuals = Keeping(tuple(source), fixed, saved, tuple(sorted(states)), none, flags)
    residual_bytes = by_residuals.row_bytes(known, n, n_out)
    if not saved or bound * residual_bytes <= FREE_BYTES:
        return by_residuals

    again = steps.needs(known, only([n_out + i for i in saved]))
    a_consts, a_carry, a_xs = split(again, n_consts, n_carry)
    by_states = by_residuals._replace(
        saved=(),
        states=tuple(sorted(states | set(select(a_carry, range(n_carry))))),
        consts=tuple(a_consts),
        xs=tuple(a or b for a, b in zip(flags, a_xs)),
    )
    if residual_bytes <= by_states.row_bytes(known, n, n_out):
        return by_residuals
    # The ring is worth its place beside cotangents of its size or more: under vmap a lane that has
    # stopped holds on to it at every step.
    read_again = _bytes(select(a_consts, known.in_avals[:n_consts]))
    heavy = chunks.heavy(residual_bytes + _bytes(halves.unknown.out_avals))
    if min(read_again, moving) < heavy or n_xs or n_out > n_carry or not chunks.is_plain(known):
        return by_states
    return by_residuals if bound <= chunks.CHUNK else by_states._replace(recent=saved)


def _slots(loop, keeping, bound, checkpoints, copies):
    """How many states a fold may keep, or None where rows for every step fit."""
    known = loop.halves.known
    if loop.u_xs or loop.u_ys or checkpoints == "all":
        return None
    if checkpoints != "auto":
        return None if checkpoints >= bound else min(int(checkpoints), MOST_SLOTS)
    state = _bytes(known.in_avals[loop.n[0] :])
    filled = bound * keeping.row_bytes(known, loop.n, loop.n_out)
    budget = BUDGET_BYTES // copies
    if filled <= max(budget, FEW_STATES * state):
        return None
    return min(max(2, budget // max(1, state)), MOST_SLOTS)


# ---- the steps of both loops ----


@steps.remember
def _known_step(known, keeping, n, n_out):
    """The known half, with what it keeps as further ys, or in a ring as further carries."""
    extra = _ring_avals([known.out_avals[n_out + i] for i in keeping.recent])

    def step(*args):
        consts, carry, extra_in, xs = split(args, n[0], n[1], len(extra))
        outs, residuals = split(jaxpr_as_fun(known)(*consts, *carry, *xs), n_out)
        outs, ys = split(outs, n[1])
        if extra:
            i, *ring = extra_in
            write = lambda b, r: lax.dynamic_update_index_in_dim(b, r, i % chunks.CHUNK, 0)
            outs += [i + jnp.int32(1), *map(write, ring, (residuals[k] for k in keeping.recent))]
        kept = [*(residuals[i] for i in keeping.saved), *(carry[j] for j in keeping.states)]
        return [*outs, *ys, *kept]

    consts, carry, xs = split(known.in_avals, n[0], n[1])
    return steps.trace(step, [*consts, *carry, *extra, *xs])


def _linear_step(loop, keeping):
    return _linear_step_of(
        loop.halves, keeping, loop.n, loop.n_out, sum(loop.u_consts), sum(loop.u_carry)
    )


@steps.remember
def _linear_step_of(halves, keeping, n, n_out, n_u_consts, n_u_carry):
    """The unknown half on rows of what was kept; its consts are fixed, again, unknown. With a ring,
    the first of its steps and the ring come before them, and a step's number before the rows."""
    known, unknown = halves.known, halves.unknown
    k_consts, k_carry, k_xs = split(known.in_avals, n[0], n[1])
    _, u_avals = split(unknown.in_avals, len(keeping.source))
    u_consts, u_carry, u_xs = split(u_avals, n_u_consts, n_u_carry)
    number, *ring = _ring_avals([known.out_avals[n_out + i] for i in keeping.recent]) or [None]
    number = [number] if ring else []
    groups = [
        number,
        ring,
        keeping.fixed.out_avals,
        select(keeping.consts, k_consts),
        u_consts,
        u_carry,
        number,
        [known.out_avals[n_out + i] for i in keeping.saved],
        [k_carry[j] for j in keeping.states],
        select(keeping.xs, k_xs),
        u_xs,
    ]
    computed = [kind == "saved" and not keeping.saved for kind, _ in keeping.source]
    where = [i for c, (_, i) in zip(computed, keeping.source) if c]
    here = (*keeping.consts, *(j in keeping.states for j in range(n[1])), *keeping.xs)

    def step(*args):
        first, ring, fixed, consts, u_c, u_s, at, saved, states, xs, u_x = split(
            args, *map(len, groups[:-1])
        )
        again = iter(())
        if any(computed):
            part = steps.restrict(known, here, (False,) * n_out + tuple(computed))
            compute = lambda: jaxpr_as_fun(part)(*consts, *states, *xs)
            again = compute() if not ring else _from_ring(first[0], at[0], ring, compute, where)
            again = iter(again)
        pick = {
            "fixed": fixed,
            "saved": saved,
            "state": dict(zip(keeping.states, states)),
            "row": dict(zip(select(keeping.xs, range(n[2])), xs)),
        }
        residuals = [
            next(again) if c else pick[kind][i] for c, (kind, i) in zip(computed, keeping.source)
        ]
        return jaxpr_as_fun(unknown)(*residuals, *u_c, *u_s, *u_x)

    return steps.trace(step, list(itertools.chain(*groups)))


def _from_ring(first, at, ring, compute, where):
    """Step ``at``'s residuals: from the ring, if the steps from ``first`` on are there. One answer for
    all lanes, be they samples or the steps of a chunk, so that it stays a branch."""
    read = lambda: [
        lax.dynamic_index_in_dim(ring[i], at % chunks.CHUNK, keepdims=False) for i in where
    ]
    return lax.cond(lanes.any_lane(at < first), compute, read)
