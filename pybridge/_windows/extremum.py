"""Maximum and minimum: ties, NaN and the identity have derivative rules of their own.

The derivative selects: ``ties="first"`` the first of the equal elements, init counted as the first,
``ties="split"`` all of them in equal shares. A NaN is greater (or less) than every number. An init
that is the identity (-inf for a maximum) wins no tie, so that where all cells are -inf a cell has
the gradient.

The selection depends on the values only through comparisons, so the tangent is linear in the
tangents with integer or boolean coefficients and every higher order follows from it.

The maximum of a window's cells is a primitive, not a custom_jvp function: where a scan is linearized
JAX drops the rules of custom_jvp functions in it, and a derivative of that linearization would see the
bare value, whose lax.max splits ties pairwise.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pybridge._windows import doubling
from pybridge._windows.geometry import (
    Axis,
    Geometry,
    cell_at,
    cells,
    transposable_cells,
    vary,
    varying,
)
from pybridge._windows.reducer import accumulator, identity
from pybridge._windows.written import UNROLLED


def extremum(geometry, name, ties, identity_init, x, init):
    """The greatest (name "max") or least ("min") of init and each window's cells.

    ``identity_init``: init is known to be the identity, so only a window without a cell needs it.
    """
    if ties == "split" and jnp.issubdtype(x.dtype, jnp.inexact):
        return _with_split_ties(geometry, name, identity_init, x, init)
    greatest = cells_extremum_p.bind(x, geometry=geometry, name=name)
    wins = _init_wins(geometry, name, identity_init, init, greatest)
    return greatest if wins is None else jnp.where(wins, init, greatest)


# ---- the extreme cell: shape, jvp, batching, lowering; its tangent is transposed by itself ------

cells_extremum_p = Primitive("window_extremum")


def _of_cells(x, *, geometry, name):
    """The extreme cell of each window; the identity where none is."""
    fill, pair = identity(name, x.dtype), {"max": lax.max, "min": lax.min}[name]
    if geometry.count > UNROLLED:
        op = lambda left, right: [pair(left[0], right[0])]
        return doubling.fold(op, [x], geometry, fill, has_identity=True)[0]
    return functools.reduce(pair, cells(geometry.line(x, fill), geometry.axes))


def _jvp(primals, tangents, *, geometry, name):
    (x,), (tx,) = primals, tangents
    greatest = cells_extremum_p.bind(x, geometry=geometry, name=name)
    if type(tx) is ad.Zero:
        return greatest, ad.Zero(jax.typeof(greatest).to_tangent_aval())
    # Wide, so that the cotangents of many windows are not summed in 16 bits.
    tangent = _first(geometry, name, x, tx.astype(accumulator(tx.dtype)), greatest)
    return greatest, tangent.astype(tx.dtype)


def _batch(arrays, dims, *, geometry, name):
    (x,), (dim,) = arrays, dims
    x = jnp.moveaxis(x, dim, 0)
    batched = Geometry((Axis(x.shape[0], 1), *geometry.axes))
    return cells_extremum_p.bind(x, geometry=batched, name=name), 0


cells_extremum_p.def_impl(_of_cells)
cells_extremum_p.def_abstract_eval(
    lambda x, geometry, name: x.update(shape=geometry.out, weak_type=False)
)
ad.primitive_jvps[cells_extremum_p] = _jvp
batching.primitive_batchers[cells_extremum_p] = _batch
mlir.register_lowering(cells_extremum_p, mlir.lower_fun(_of_cells, multiple_results=False))


# ---- init -----------------------------------------------------------------------------------------


def _init_wins(geometry, name, identity_init, init, greatest):
    """Which windows have init's value, ties="first": bool of shape ``out``; None for no window."""
    has_cell = geometry.has_cell()
    if identity_init:
        return None if has_cell is None else ~has_cell
    wins = _beats(name, init, greatest) | ((init == greatest) & ~_is_identity(name, init))
    wins |= jnp.isnan(init)
    return wins if has_cell is None else wins | ~has_cell


# ---- ties: the first ------------------------------------------------------------------------------


def _first(geometry, name, x, tx, greatest):
    """The tangent of the first extreme cell."""
    if geometry.count > UNROLLED:
        return _first_by_doubling(geometry, name, x, tx)
    return _pick(geometry, _winner(geometry, name, x, greatest), tx)


def _winner(geometry, name, x, greatest):
    """The first offset of each window whose cell is the greatest; its count where none is.

    Found by comparing the cells with the value once more, from the last to the first: carried
    along with the maximum it would make XLA evaluate the chain twice.
    """
    columns = cells(geometry.line(x, identity(name, x.dtype)), geometry.axes)
    winner = jnp.full(geometry.out, geometry.count, jnp.uint8)
    for k, offset in reversed(list(enumerate(geometry.offsets()))):
        hit = _same(columns[k], greatest)
        mask = geometry.holds(offset)
        if mask is not None:  # padding is filled with the identity, which a cell may equal
            hit &= mask
        winner = jnp.where(hit, jnp.uint8(k), winner)
    return winner


def _pick(geometry, winner, tangent):
    """The tangent of the cell at each window's winning offset; 0 where there is none.

    Linear in the tangent. A loop over the first axis of the window, the others unrolled: in one
    expression XLA would fuse whatever made the winner, or on the way back the cotangent, into each
    of the shifted summands.
    """
    line = geometry.line(tangent, 0)
    axes = geometry.axes
    lead = next((i for i, a in enumerate(axes) if a.window > 1), None)

    def chosen(found, first):
        total = jnp.zeros(geometry.out, tangent.dtype)
        for k, cell in enumerate(found):
            offset = jnp.asarray(first + k, winner.dtype)
            total += jnp.where(winner == offset, cell, jnp.zeros((), cell.dtype))
        return total

    if lead is None:
        return chosen(transposable_cells(line, axes), 0)
    along = [axes[i] if i == lead else Axis(n, 1) for i, n in enumerate(line.shape)]
    across = [Axis(a.out, 1) if i == lead else a for i, a in enumerate(axes)]
    inner = geometry.count // axes[lead].window

    def body(total, k):
        offset = [k if i == lead else 0 for i in range(len(axes))]
        row = cell_at(line, along, offset)
        return total + chosen(transposable_cells(row, across), k * inner), None

    start = vary(jnp.zeros(geometry.out, tangent.dtype), varying(line, winner))
    return lax.scan(body, start, jnp.arange(axes[lead].window, dtype=jnp.int32))[0]


def _first_by_doubling(geometry, name, x, tx):
    """Doubling finds where the extreme cell is, and the tangent is read there.

    A tangent carried along with the maximum is transposed to a masked sum at every level: at a
    window of 1,000 of a million numbers six times as slow.
    """

    def op(left, right):
        (a, ta), (b, tb) = left, right
        stays = _stays(name, a, b)
        return [jnp.where(stays, a, b), jnp.where(stays, ta, tb)]

    if x.size > jnp.iinfo(jnp.int32).max:
        return doubling.fold(op, [x, tx], geometry)[1]
    index = lax.iota(jnp.int32, x.size).reshape(x.shape)
    index = vary(index, varying(x))
    where = doubling.fold(op, [lax.stop_gradient(x), index], geometry)[1]
    return jnp.take(tx.reshape(-1), where, mode="clip")


# ---- ties: in equal shares ------------------------------------------------------------------------


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _with_split_ties(geometry, name, identity_init, x, init):
    value = extremum(geometry, name, "first", identity_init, *map(lax.stop_gradient, (x, init)))
    # Zero, with the derivative of the rule below, for where JAX drops that rule.
    zero = lambda v: jnp.where(jnp.isfinite(v), v - lax.stop_gradient(v), 0)
    still = map(lax.stop_gradient, (x, init))
    return value + _split(geometry, name, identity_init, *still, zero(x), zero(init))


@functools.partial(_with_split_ties.defjvp, symbolic_zeros=True)
def _split_jvp(geometry, name, identity_init, primals, tangents):
    x, init = primals
    tx, tinit = (None if type(t) is SymbolicZero else t for t in tangents)
    value = _with_split_ties(geometry, name, identity_init, x, init)
    return value, _split(geometry, name, identity_init, x, init, tx, tinit)


def _split(geometry, name, identity_init, x, init, tx, tinit):
    """The mean of the tangents of all elements equal to the greatest."""
    greatest = cells_extremum_p.bind(x, geometry=geometry, name=name)
    wide = accumulator(x.dtype)
    tx = jnp.zeros(x.shape, wide) if tx is None else tx.astype(wide)
    t = jnp.zeros((), wide) if tinit is None else tinit.astype(wide)
    if geometry.count > UNROLLED:
        _, count, total = _split_by_doubling(geometry, name, x, tx)
    else:
        count, total = _equal_cells(geometry, name, x, greatest, tx)
    has_cell = geometry.has_cell()
    if not identity_init:
        ours = _beats(name, init, greatest) | (jnp.isnan(init) & ~jnp.isnan(greatest))
        ties = _same(init, greatest) & ~_is_identity(name, init)
        total = jnp.where(ours, t, total + jnp.where(ties, t, jnp.zeros((), wide)))
        count = jnp.where(ours, 1, count + ties.astype(count.dtype))
    if has_cell is not None:
        total = jnp.where(has_cell, total, t)
        count = jnp.where(has_cell, count, 1)
    return (total / count.astype(wide)).astype(x.dtype)


def _equal_cells(geometry, name, x, greatest, tx):
    columns = cells(geometry.line(x, identity(name, x.dtype)), geometry.axes)
    tangents = transposable_cells(geometry.line(tx, 0), geometry.axes)
    count = jnp.zeros(geometry.out, jnp.int32)
    total = jnp.zeros(geometry.out, tx.dtype)
    for offset, cell, tangent in zip(geometry.offsets(), columns, tangents):
        hit = _same(cell, greatest)
        mask = geometry.holds(offset)
        hit = hit if mask is None else hit & mask
        count += hit.astype(count.dtype)
        total += jnp.where(hit, tangent, jnp.zeros((), tx.dtype))
    return count, total


def _split_by_doubling(geometry, name, x, tx):
    def op(left, right):
        (a, ca, ta), (b, cb, tb) = left, right
        equal = _same(a, b)
        stays = _stays(name, a, b)
        pick = lambda both, first, second: jnp.where(equal, both, jnp.where(stays, first, second))
        return [jnp.where(stays, a, b), pick(ca + cb, ca, cb), pick(ta + tb, ta, tb)]

    return doubling.fold(op, [x, jnp.ones(x.shape, jnp.int32), tx], geometry)


def _same(a, b):
    return (a == b) | (jnp.isnan(a) & jnp.isnan(b))


def _is_identity(name, init):
    return init == identity(name, init.dtype)


def _stays(name, earlier, later):
    """Whether the earlier of two elements is chosen: unless the later is greater, or first NaN.

    Written as XLA writes its own maximum, which costs two comparisons.
    """
    if jnp.issubdtype(jnp.result_type(earlier), jnp.complexfloating):
        return jnp.isnan(earlier) | ~(_beats(name, later, earlier) | jnp.isnan(later))
    no_less = earlier >= later if name == "max" else earlier <= later
    return no_less | (earlier != earlier)


def _beats(name, a, b):
    """a > b for a maximum, a < b for a minimum; complex numbers in XLA's lexicographic order."""
    if name == "min":
        a, b = b, a
    if jnp.issubdtype(jnp.result_type(a), jnp.complexfloating):
        real = jnp.real(a) == jnp.real(b)
        return (jnp.real(a) > jnp.real(b)) | (real & (jnp.imag(a) > jnp.imag(b)))
    return a > b
