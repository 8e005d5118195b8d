"""Steps that write rows of a large buffer: keep XLA from copying the buffer at every step.

XLA updates a buffer in place if it can tell that every other reader of it comes first. In a step it
often cannot: the transpose of "write row i" reads row i of the cotangent and sets it to zero, with
no order between the two, and the transpose of "read row j" adds a buffer that is zero but for one
row. So before a step is lowered

- ``a + (zeros with a row r written)`` becomes a read, an addition and a write of that row of a;
- a row that is written depends on what was read of the same buffer, through a select on a flag that
  is never set; and such reads stand in a branch, where they are not fused into later code.

The values stay the same to the last bit.
"""

import heapq
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from pybridge._loops import steps

# Below this size a copy costs less than a branch.
LARGE_BYTES = 2**16

_WRITES = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}  # the operand that is written
_READS = ("dynamic_slice", "gather", "slice")


def in_place(step):
    """``(never, *operands) -> results``: the step, for a flag that is never set."""
    if not _writes_rows(step):
        return lambda never, *operands: jaxpr_as_fun(step)(*operands)
    flat = _inlined(step)
    plan = _plan(flat)
    return lambda never, *operands: _evaluate(flat, plan, never, operands)


@steps.remember
def _writes_rows(closed):
    inner = [e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name == "jit"]
    return any(map(_is_write, closed.jaxpr.eqns)) or any(map(_writes_rows, inner))


def _is_write(eqn):
    return eqn.primitive.name in _WRITES and _is_large(eqn.outvars[0])


def _is_large(var):
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize >= LARGE_BYTES


def _is_var(atom):
    return isinstance(atom, Var)


# ---- what to do with which equation ----


class _Plan(NamedTuple):
    order: list  # of the equations
    sums: dict  # an addition -> the buffer, and the write onto zeros that is added to it
    merged: set  # writes onto zeros that sums take care of
    before: dict  # a write -> the reads of the same buffer that must come before it


@steps.remember
def _plan(flat):
    eqns, readers, producer = flat.jaxpr.eqns, {}, {}
    for i, eqn in enumerate(eqns):
        for v in dict.fromkeys(filter(_is_var, eqn.invars)):
            readers.setdefault(v, []).append(i)
        producer.update((v, i) for v in eqn.outvars)
    outputs = set(filter(_is_var, flat.jaxpr.outvars))

    sums = {}
    for i, eqn in enumerate(eqns):
        if eqn.primitive.name == "add_any" and _is_large(eqn.outvars[0]):
            for one, other in (eqn.invars, eqn.invars[::-1]):
                at = producer.get(one) if _is_var(one) else None
                alone = at is not None and readers[one] == [i] and one not in outputs
                if alone and _is_var(other) and _writes_on_zeros(eqns, producer, at):
                    sums[i] = (other, at)
                    break
    merged = {at for _, at in sums.values()}

    before = {}
    for i, eqn in enumerate(eqns):
        if i in sums or (_is_write(eqn) and i not in merged and _is_var(eqn.invars[0])):
            buffer = sums[i][0] if i in sums else eqn.invars[0]
            others = [k for k in readers[buffer] if k != i]
            if all(eqns[k].primitive.name in _READS for k in others):
                before[i] = others
    order = _order(eqns, producer, before)
    if order is None:
        order, before = list(range(len(eqns))), {}
    return _Plan(order, sums, merged, before)


def _writes_on_zeros(eqns, producer, at):
    eqn = eqns[at]
    base = producer.get(eqn.invars[0]) if _is_var(eqn.invars[0]) else None
    if eqn.primitive.name not in _WRITES or base is None:
        return False
    source = eqns[base].invars[0] if eqns[base].primitive.name == "broadcast_in_dim" else None
    zero = isinstance(source, Literal) and source.val == 0
    # Adding what overwrites needs that no row is named twice.
    return zero and (eqn.primitive.name != "scatter" or eqn.params["unique_indices"])


def _order(eqns, producer, before):
    """The equations in an order that puts the reads first, or None if there is none."""
    waits = [{producer[v] for v in filter(_is_var, e.invars) if v in producer} for e in eqns]
    for i, others in before.items():
        waits[i] |= set(others)
    after = [[] for _ in eqns]
    for i, w in enumerate(waits):
        for k in w:
            after[k].append(i)
    ready, order = [i for i, w in enumerate(waits) if not w], []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for k in after[i]:
            waits[k].discard(i)
            if not waits[k]:
                heapq.heappush(ready, k)
    return order if len(order) == len(eqns) else None


# ---- doing it ----


def _inlined(closed):
    """The step with its calls inlined, so that reads and writes stand side by side."""

    def inline(closed, args):
        values = _Values(closed, args)
        for eqn in closed.jaxpr.eqns:
            given = values.of(eqn.invars)
            jitted = eqn.primitive.name == "jit"
            values.put(eqn, inline(eqn.params["jaxpr"], given) if jitted else _apply(eqn, given))
        return values.of(closed.jaxpr.outvars)

    return steps.trace(lambda *args: inline(closed, args), closed.in_avals)


def _evaluate(flat, plan, never, operands):
    eqns, values = flat.jaxpr.eqns, _Values(flat, operands)
    reads = {k for others in plan.before.values() for k in others}
    seen = {}
    for i in plan.order:
        eqn = eqns[i]
        if i in plan.merged:
            continue
        if i in plan.sums:
            buffer, at = plan.sums[i]
            outs = _add_rows(
                eqns[at], values, buffer, [seen[k] for k in plan.before.get(i, [])], never
            )
        else:
            given = values.of(eqn.invars)
            if i in plan.before:
                row = _WRITES[eqn.primitive.name]
                given[row] = _after(never, given[row], [seen[k] for k in plan.before[i]])
            if i in reads:
                outs = _aside(never, eqn, given)
                seen[i] = outs[0]
            else:
                outs = _apply(eqn, given)
        values.put(eqn, outs)
    return values.of(flat.jaxpr.outvars)


def _add_rows(eqn, values, buffer, seen, never):
    """``buffer`` plus what ``eqn`` writes onto zeros."""
    (base,) = values.of([buffer])
    _, *given = values.of(eqn.invars)
    if eqn.primitive.name == "dynamic_update_slice":
        row, *start = given
        old = lax.dynamic_slice(base, start, row.shape)
        return [lax.dynamic_update_slice(base, _after(never, old + row, seen), start)]
    where, rows = given
    p = eqn.params
    add = lax.scatter_add(
        base,
        where,
        _after(never, rows, seen),
        p["dimension_numbers"],
        indices_are_sorted=p["indices_are_sorted"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
    )
    return [add]


def _after(never, row, seen):
    """``row``, in a way that it depends on everything that was seen."""
    for other in seen:
        if other.size and jnp.issubdtype(row.dtype, jnp.number):
            first = lax.reshape(lax.slice(other, (0,) * other.ndim, (1,) * other.ndim), ())
            row = jnp.where(never, lax.convert_element_type(first, row.dtype), row)
    return row


def _aside(never, eqn, given):
    zeros = lambda *_: [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return lax.cond(never, zeros, lambda *given: _apply(eqn, given), *given)


class _Values:
    def __init__(self, closed, args):
        jaxpr = closed.jaxpr
        self.known = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*args, *closed.consts]))

    def of(self, atoms):
        return [a.val if isinstance(a, Literal) else self.known[a] for a in atoms]

    def put(self, eqn, outs):
        self.known.update(zip(eqn.outvars, outs))


def _apply(eqn, given):
    """One equation, whatever its primitive, on other values."""
    where = {v: x for v, x in zip(eqn.invars, given) if isinstance(v, Var)}
    jaxpr = _empty().replace(invars=list(where), outvars=list(eqn.outvars), eqns=[eqn])
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*where.values())


@steps.remember
def _empty():
    return jax.make_jaxpr(lambda: ())().jaxpr
