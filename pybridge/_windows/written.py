"""The written order: any reducer, folded over the window's offsets.

The accumulators have the output's shape and start as init; for each offset of the window, in
row-major order, they are combined with what the operand holds there. That is ordinary JAX code, so
jit, grad, jvp, vmap, the gradient of init and of captures follow.

The value of a short window is one unrolled expression, which XLA fuses into a single pass. A
derivative is taken of the same fold as a loop: fused, XLA would evaluate the chain of k steps anew
for each of the k shifted cotangents. Its steps are rematerialised, so one accumulator an offset
is all that the reverse pass keeps.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pybridge._windows.geometry import cell_at, cells

# Offsets up to which the value is unrolled: beyond, compile time outweighs the fused pass.
UNROLLED = 32


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def fold(geometry, reducer, operands, inits, consts):
    """Lists of operands and scalar inits to a list of arrays of the output's shape."""
    if geometry.count > UNROLLED:
        return _loop(geometry, reducer, operands, inits, consts)
    step, accumulators, lines = _start(geometry, reducer, operands, inits, consts)
    columns = zip(*(cells(line, geometry.axes) for line in lines))
    for offset, column in zip(geometry.offsets(), columns):
        accumulators = step(accumulators, list(column), geometry.holds(offset))
    return accumulators


@functools.partial(fold.defjvp, symbolic_zeros=True)
def _fold_jvp(geometry, reducer, primals, tangents):
    # Only what has a tangent is differentiated: operands without one cost nothing in the loop.
    flat, tree = jax.tree.flatten(primals)
    flat_tangents = jax.tree.leaves(tangents)
    moving = [i for i, t in enumerate(flat_tangents) if type(t) is not SymbolicZero]

    def of_moving(*values):
        filled = list(flat)
        for i, value in zip(moving, values):
            filled[i] = value
        return _loop(geometry, reducer, *jax.tree.unflatten(tree, filled))

    return jax.jvp(of_moving, [flat[i] for i in moving], [flat_tangents[i] for i in moving])


def _loop(geometry, reducer, operands, inits, consts):
    step, accumulators, lines = _start(geometry, reducer, operands, inits, consts)
    window = geometry.window

    def offset_of(k):
        offset = []
        for w in reversed(window):
            offset.append(k % w if w > 1 else 0)
            k = k // w if w > 1 else k
        return tuple(reversed(offset))

    # Checkpointed: the residual of a step is its accumulator; the cells are read again.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(accumulators, lines, stacked, k):
        offset = offset_of(k)
        found = stacked or [cell_at(line, geometry.axes, offset) for line in lines]
        return step(accumulators, found, geometry.holds(offset))

    if reducer.has_custom_rules:
        # Where a scan is linearized JAX drops such rules, and second derivatives miss them.
        for k in range(geometry.count):
            accumulators = body(accumulators, lines, [], k)
        return accumulators

    # The reverse pass adds each step's cotangent to one as large as the operand. Where strides
    # make the operand much larger than the output, gathering the cells first is the cheaper way.
    stacked = []
    if math.prod(a.stride for a in geometry.axes) > 8:
        stacked, lines = [_stack(line, geometry.axes) for line in lines], []

    def scanned(accumulators, slices):
        k, stacked = slices
        return body(accumulators, lines, stacked, k), None

    ks = jnp.arange(geometry.count, dtype=jnp.int32)
    return lax.scan(scanned, accumulators, (ks, stacked))[0]


def _start(geometry, reducer, operands, inits, consts):
    """The step function, the first accumulators, and the operands on their lines."""
    op = reducer.on_arrays(geometry.rank)
    lines = [geometry.line(x, 0) for x in operands]
    accumulators = [jnp.broadcast_to(init, geometry.out) for init in inits]
    at = geometry.some_cell
    some = [line[at] for line in lines]

    def step(accumulators, found, mask):
        if mask is None:
            return op(consts, accumulators, found)
        # Where there is no cell the reducer still runs, on what some window really starts with:
        # on padding it might be singular, and zero times infinity would reach the captures.
        a = [jnp.where(mask, x, init) for x, init in zip(accumulators, inits)]
        b = [jnp.where(mask, x, s) for x, s in zip(found, some)]
        new = op(consts, a, b)
        return [jnp.where(mask, n, x) for n, x in zip(new, accumulators)]

    return step, accumulators, lines


def _stack(line, axes):
    """All cells as one array of shape (positions in a window, *out)."""
    rank = len(axes)
    for axis, a in reversed(list(enumerate(axes))):
        outputs = jnp.arange(a.out, dtype=jnp.int32)[None, :] * a.stride
        offsets = jnp.arange(a.window, dtype=jnp.int32)[:, None] * a.dilation
        line = jnp.take(line, outputs + offsets, axis=axis, mode="clip")
    order = [2 * i for i in range(rank)] + [2 * i + 1 for i in range(rank)]
    return line.transpose(order).reshape(-1, *(a.out for a in axes))
