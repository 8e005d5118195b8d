"""Windowed reductions with derivatives in every case."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import tree_flatten, tree_unflatten

from pybridge._windows import doubling, written
from pybridge._windows.extremum import extremum
from pybridge._windows.geometry import Axis, Geometry, named_padding, vary, varying
from pybridge._windows.reducer import accumulator, identity, trace, widened
from pybridge._windows.total import total

__all__ = ["reduce_window"]


def reduce_window(
    operand,
    init_value,
    computation,
    window_dimensions,
    window_strides=None,
    padding="VALID",
    base_dilation=None,
    window_dilation=None,
    *,
    ties="first",
    associative=None,
):
    """Reduce each window of an array (or of several at once), differentiably.

    A drop-in for ``jax.lax.reduce_window`` that has derivatives wherever the function has them:
    for any reducer, any init value (with a gradient of its own), in forward and reverse mode, of
    every order, under jit and vmap.

    What is computed: each window is folded left to right in row-major order, starting from
    ``init_value``, which is used exactly once; padding and the holes of a base dilation are
    skipped. A window without any cell returns ``init_value``.

    Args:
      operand: array of shape (n_1, ..., n_r), r from 0 up, or a pytree of arrays of one shape.
      init_value: scalar of the operand's dtype (Python numbers are converted), or a pytree of
        scalars with the operand's structure. May be traced. As in lax, the identity of ``lax.add``,
        ``lax.max`` or ``lax.min``, where it is not traced, may have another dtype (-inf for integers).
      computation: ``computation(accumulator, cell) -> accumulator`` on scalars of the operand's
        dtype, or on pytrees of scalars with the operand's structure. It may capture arrays and
        traced values; they have gradients.
      window_dimensions: r positive integers.
      window_strides: r positive integers; default 1 each.
      padding: "VALID", "SAME", "SAME_LOWER", or r pairs (low, high), which may be negative.
      base_dilation, window_dilation: r positive integers each; default 1 each. As in lax, "SAME"
        and "SAME_LOWER" pad by the size before base dilation.
      ties: where several elements of a window are the maximum (or minimum), which of them has the
        derivative: "first" (as XLA and torch) or "split" (all, in equal shares). Init counts as
        the first element; an init that is the identity (-inf for a maximum) wins no tie. NaNs are
        equal elements here: of several the first has the derivative, or all share it. For max and
        min only.
      associative: True promises that ``computation`` is associative (it need not commute), so that
        long windows cost only a logarithm of their size; the result is then within rounding of
        the written order's. None: true of add, mul, max, min, logaddexp, and, or, xor, which are
        recognised whether they come from ``jax.lax``, ``jax.numpy`` or a function that does just
        that. False: the written order, exactly.

    Returns:
      Array (or pytree of arrays) of the operand's dtype with shape
      ``(n' + low + high - span) // stride + 1`` along each axis, n' = (n - 1) * base_dilation + 1
      and span = (window - 1) * window_dilation + 1; 0 where the window does not fit.
      float16 and bfloat16 accumulate in float32, and so do their gradients, also those of init and
      of captures. A NaN in a maximum or minimum propagates.

    Raises:
      ValueError: a geometry that is malformed, operands of different shapes, an option unknown.
      TypeError: trees or dtypes that do not agree, or a reducer that returns another tree, shape
        or dtype than it was given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pybridge import reduce_window
      >>> x = jnp.array([1.0, 3.0, 2.0, -1.0, 4.0])
      >>> reduce_window(x, 2.5, jax.lax.max, (2,))
      Array([3. , 3. , 2.5, 4. ], dtype=float32)
      >>> f = lambda x, init: reduce_window(x, init, jax.lax.max, (2,)).sum()
      >>> jax.jit(jax.grad(f, argnums=(0, 1)))(x, 2.5)
      (Array([0., 2., 0., 0., 1.], dtype=float32), Array(1., dtype=float32, weak_type=True))

    Reference:
      The operation is that of StableHLO's ``reduce_window``, with the order fixed and init used
      once; https://openxla.org/stablehlo/spec#reduce_window.
    """
    operands, tree = _operands(operand)
    inits = _inits(init_value, tree, operands, computation)
    geometry = _geometry(
        operands[0].shape,
        window_dimensions,
        window_strides,
        padding,
        base_dilation,
        window_dilation,
    )
    if not callable(computation):
        raise TypeError(
            f"reduce_window: computation must be callable, got {type(computation).__name__}."
        )
    dtypes = [x.dtype for x in operands]
    accumulators = [accumulator(d) for d in dtypes]
    axes = varying(*operands, *inits)
    reducer, consts = trace(computation, tree, dtypes, accumulators, axes)
    if not varying(*consts) <= axes:
        axes |= varying(*consts)
        reducer, consts = trace(computation, tree, dtypes, accumulators, axes)
    operands, inits = ([vary(x, axes) for x in xs] for xs in (operands, inits))
    _check_options(ties, associative, reducer)

    if geometry.some_cell is None:
        # Not one cell in any window; also every empty result.
        results = [jnp.broadcast_to(init, geometry.out) for init in inits]
        return tree_unflatten(tree, results)

    alone = len(operands) == 1 and associative is not False
    if alone and reducer.name in ("max", "min"):
        (init,), (x,) = inits, operands
        known = _is_known_identity(init, identity(reducer.name, x.dtype))
        return tree_unflatten(tree, [_extremum(geometry, reducer.name, ties, known, x, init)])

    operands = [x.astype(d) for x, d in zip(operands, accumulators)]
    inits = [x.astype(d) for x, d in zip(inits, accumulators)]
    consts = widened(consts)
    if alone and reducer.name == "add":
        (init,), (x,) = inits, operands
        known = _is_known_identity(init, identity("add", x.dtype))
        results = [_total(geometry, known, x, init)]
    elif (associative or (alone and reducer.associative)) and geometry.count > written.UNROLLED:
        results = _doubled(geometry, reducer, operands, inits, consts)
    else:
        results = _written(geometry, reducer, operands, inits, consts)
    return tree_unflatten(tree, [x.astype(d) for x, d in zip(results, dtypes)])


# Compiled once for each geometry and reducer, also where the caller does not jit.


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _extremum(geometry, name, ties, identity_init, x, init):
    return extremum(geometry, name, ties, identity_init, x, init)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _total(geometry, identity_init, x, init):
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    result = (total if inexact else total.fun)(geometry, x)
    return result if identity_init else init + result


@functools.partial(jax.jit, static_argnums=(0, 1))
def _written(geometry, reducer, operands, inits, consts):
    return written.fold(geometry, reducer, operands, inits, consts)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _doubled(geometry, reducer, operands, inits, consts):
    on_arrays = reducer.on_arrays(geometry.rank)
    op = lambda left, right: on_arrays(consts, left, right)
    folded = doubling.fold(op, operands, geometry)
    starts = [jnp.broadcast_to(init, geometry.out) for init in inits]
    results = op(starts, folded)
    mask = geometry.has_cell()
    if mask is None:
        return results
    return [jnp.where(mask, x, start) for x, start in zip(results, starts)]


def _is_known_identity(init, neutral):
    """Whether init is the identity and known to be so now, not traced."""
    if isinstance(init, jax.core.Tracer):
        return False
    return bool(np.asarray(init) == neutral)


# Arguments


def _operands(operand):
    leaves, tree = tree_flatten(operand)
    if not leaves:
        raise ValueError("reduce_window: operand has no arrays; give at least one.")
    arrays = []
    for leaf in leaves:
        try:
            arrays.append(jnp.asarray(leaf))
        except TypeError as error:
            raise TypeError(
                f"reduce_window: operand must consist of arrays, got {type(leaf).__name__}."
            ) from error
    shapes = [x.shape for x in arrays]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"reduce_window: operand has arrays of different shapes, {shapes}; "
            "give arrays of one shape, e.g. by jnp.broadcast_arrays."
        )
    return arrays, tree


def _inits(init_value, tree, operands, computation):
    leaves, init_tree = tree_flatten(init_value)
    if init_tree != tree:
        raise TypeError(
            f"reduce_window: init_value has the tree {init_tree} and operand has {tree}; "
            "give one scalar for each array of the operand, in the same structure."
        )
    if len(leaves) == 1:
        neutral = _lax_identity(leaves[0], computation, operands[0].dtype)
        if neutral is not None:
            return [jnp.asarray(neutral)]
    return [_init(value, x.dtype) for value, x in zip(leaves, operands)]


def _lax_identity(value, computation, dtype):
    """The identity in ``dtype`` where ``value`` is it in any dtype and lax would take it; or None.

    lax takes -inf for integers under ``lax.max``, a float64 zero for float32 numbers under ``lax.add``,
    and so on, where the value is known beforehand.
    """
    names = {"add": lax.add, "max": lax.max, "min": lax.min}
    name = next((name for name, op in names.items() if op is computation), None)
    if name is None or isinstance(value, jax.core.Tracer) or jnp.shape(value) != ():
        return None
    if name != "add" and jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    own = _is_known_identity(value, identity(name, jnp.result_type(value)))
    return identity(name, dtype) if own else None


def _init(value, dtype):
    shape = jnp.shape(value)
    if shape != ():
        raise ValueError(
            f"reduce_window: init_value must be a scalar, got shape {shape}; "
            "for one init a window, combine it with the result, or use jax.vmap."
        )
    given = jax.dtypes.canonicalize_dtype(jnp.result_type(value))
    # A Python number takes the operand's dtype where that loses nothing of its kind.
    weak = isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)
    weak = weak or getattr(jax.typeof(value), "weak_type", False)
    fits = jnp.result_type(dtype, value) == dtype if weak else given == dtype
    if not fits:
        raise TypeError(
            f"reduce_window: init_value has dtype {given} and operand has dtype {dtype}; they must "
            f"be equal. Cast one: jnp.asarray(init_value, {str(dtype)!r}) or "
            f"operand.astype({str(given)!r})."
        )
    try:
        return jnp.asarray(value, dtype)
    except OverflowError as error:
        raise TypeError(
            f"reduce_window: init_value {value} does not fit the operand's dtype {dtype}."
        ) from error


def _geometry(shape, window_dimensions, strides, padding, base_dilation, window_dilation):
    rank = len(shape)
    window = _integers("window_dimensions", window_dimensions, rank, shape)
    strides = _integers("window_strides", strides, rank, shape)
    base = _integers("base_dilation", base_dilation, rank, shape)
    dilation = _integers("window_dilation", window_dilation, rank, shape)
    pads = _padding(padding, shape, window, strides, dilation)
    axes = zip(shape, window, strides, *(zip(*pads) if pads else ((), ())), base, dilation)
    return Geometry(tuple(Axis(*axis) for axis in axes))


def _integers(name, values, rank, shape):
    if values is None and name != "window_dimensions":
        return (1,) * rank
    try:
        found = tuple(operator.index(v) for v in values)
    except TypeError as error:
        raise TypeError(
            f"reduce_window: {name} must be a sequence of integers, got {values!r}."
        ) from error
    if len(found) != rank:
        raise ValueError(
            f"reduce_window: {name} has {len(found)} entries, {found}, and operand has {rank} "
            f"axes, shape {shape}; give one entry an axis (1 where there is nothing to do)."
        )
    if any(v < 1 for v in found):
        raise ValueError(f"reduce_window: {name} must be positive integers, got {found}.")
    return found


def _padding(padding, shape, window, strides, dilation):
    if isinstance(padding, str):
        return named_padding("reduce_window", padding, shape, window, strides, dilation)
    try:
        found = tuple((operator.index(low), operator.index(high)) for low, high in padding)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "reduce_window: padding must be a string or one pair of integers (low, high) for each "
            f"axis, got {padding!r}."
        ) from error
    if len(found) != len(shape):
        raise ValueError(
            f"reduce_window: padding has {len(found)} pairs, {found}, and operand has {len(shape)} "
            f"axes, shape {shape}; give a pair (low, high) for each."
        )
    return found


def _check_options(ties, associative, reducer):
    if ties not in ("first", "split"):
        raise ValueError(f"reduce_window: ties must be 'first' or 'split', got {ties!r}.")
    if ties == "split" and reducer.name not in ("max", "min"):
        raise ValueError(
            "reduce_window: ties='split' applies to max and min only, and computation is another "
            "reducer; drop it, or give jax.lax.max or jax.lax.min."
        )
    if associative not in (None, True, False):
        raise ValueError(
            f"reduce_window: associative must be None, True or False, got {associative!r}."
        )
