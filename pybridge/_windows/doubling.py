"""Associative reducers over long windows, at a cost logarithmic in the window.

A window of several axes is folded axis by axis from the last to the first: row-major order is kept,
so the reducer need not commute. Along an axis, runs of length 2^j are combined to runs of length
2^(j+1), and a window is put together of the runs that its binary digits name, from left to right.

Which positions hold a cell is known beforehand, so a run is combined with another only where both
have cells. Where one side has none the reducer would run on padding, and be singular there; it gets
a pair that is combined anyway.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax


def fold(op, operands, geometry, fill=0, has_identity=False):
    """Fold each window's cells with ``op(list, list) -> list``, without an init.

    Args:
      operands: list of arrays of shape ``geometry.shape``.
      has_identity: ``fill`` is op's identity; padding may then be combined like a cell.

    Returns:
      List of arrays of shape ``geometry.out``. A window without a cell has the identity, or else
      the value of another window, for the caller to replace.
    """
    for axis in reversed(range(geometry.rank)):
        operands = _fold_axis(op, operands, geometry.axes[axis], axis, fill, has_identity)
    return operands


def _fold_axis(op, operands, a, axis, fill, has_identity):
    runs = [_line(x, axis, a, fill) for x in operands]
    if has_identity:
        have = np.ones(a.length, bool)
    else:
        have = a.holds(np.arange(a.length))

    def at(arrays, have, start):
        """The runs that begin ``start`` positions into each window."""
        stop = start + (a.out - 1) * a.stride + 1
        sliced = [lax.slice_in_dim(x, start, stop, a.stride, axis) for x in arrays]
        return sliced, have[start : stop : a.stride]

    result, start, length = None, 0, 1
    while True:
        if a.window & length:
            piece = at(runs, have, start)
            result = piece if result is None else _combine(op, axis, *result, *piece)
            start += length * a.dilation
        if 2 * length > a.window:
            break
        shift = length * a.dilation
        size = have.shape[0] - shift
        left = [lax.slice_in_dim(x, 0, size, axis=axis) for x in runs]
        right = [lax.slice_in_dim(x, shift, shift + size, axis=axis) for x in runs]
        runs, have = _combine(op, axis, left, have[:size], right, have[shift:])
        length *= 2
    arrays, have = result
    if have.all():
        return arrays
    # Windows without a cell along this axis: a real value instead, lest op meet padding later.
    some = int(np.argmax(have))
    real = [lax.slice_in_dim(x, some, some + 1, axis=axis) for x in arrays]
    mask = _along(have, axis, arrays[0].ndim)
    return [jnp.where(mask, x, r) for x, r in zip(arrays, real)]


def _combine(op, axis, left, have_left, right, have_right):
    both = have_left & have_right
    either = have_left | have_right
    if both.all():
        return op(left, right), either
    rank = left[0].ndim
    only_left = _along(have_left, axis, rank)
    chosen = [jnp.where(only_left, x, y) for x, y in zip(left, right)]
    if not both.any():
        return chosen, either
    some = int(np.argmax(both))
    mask = _along(both, axis, rank)

    def safe(arrays):
        real = [lax.slice_in_dim(x, some, some + 1, axis=axis) for x in arrays]
        return [jnp.where(mask, x, r) for x, r in zip(arrays, real)]

    combined = op(safe(left), safe(right))
    return [jnp.where(mask, c, x) for c, x in zip(combined, chosen)], either


def _along(mask, axis, rank):
    return jnp.asarray(mask).reshape([-1 if i == axis else 1 for i in range(rank)])


def _line(x, axis, a, fill):
    """``Geometry.line`` along one axis, the others as they are."""
    x = lax.slice_in_dim(x, *a.cells, axis=axis)
    before, after = a.pads
    spread = a.base - 1 if x.shape[axis] else 0
    if (before, after, spread) == (0, 0, 0):
        return x
    config = [(before, after, spread) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.asarray(fill, x.dtype), config)
