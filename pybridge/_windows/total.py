"""Sums: linear, so one expression is the value and another the derivative, of every order."""

import functools
import operator

import jax
from jax import lax

from pybridge._windows import doubling
from pybridge._windows.geometry import cells
from pybridge._windows.written import UNROLLED


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def total(geometry, x):
    """The sum of each window's cells; 0 where there is none."""
    if geometry.count > UNROLLED:
        return _long(geometry, x)
    return functools.reduce(operator.add, cells(geometry.line(x, 0), geometry.axes))


@total.defjvp
def _total_jvp(geometry, primals, tangents):
    (x,), (tangent,) = primals, tangents
    linear = _long if geometry.count > UNROLLED else _native
    return total(geometry, x), linear(geometry, tangent)


def _native(geometry, x):
    # XLA's own windowed sum is exact with init 0, and its transpose reads the cotangent once, where
    # the fused sum of shifted cotangents would evaluate it once an offset. It gets the line, for its
    # derivatives meet negative padding where padding exceeds the window (jax#7860); but not a line
    # that differs from the operand by the rest of a stride only, a copy for nothing.
    plain = all(a.low == a.high == 0 and a.base == 1 for a in geometry.axes)
    return lax.reduce_window(
        x if plain else geometry.line(x, 0),
        x.dtype.type(0),
        lax.add,
        geometry.window,
        tuple(a.stride for a in geometry.axes),
        "VALID",
        window_dilation=tuple(a.dilation for a in geometry.axes),
    )


def _long(geometry, x):
    add = lambda left, right: [left[0] + right[0]]
    return doubling.fold(add, [x], geometry, has_identity=True)[0]
