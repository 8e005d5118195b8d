"""Pooling layers on ``reduce_window``: exact derivatives of every order, ties by one rule.

Names and defaults are those of torch's functional pooling: ``stride`` defaults to the window,
channels come first, averages count padding. Each layer takes any number of leading axes (batch, or
none), and either layout.

Shapes, with ``span = (kernel - 1) * dilation + 1`` along each spatial axis of length n::

    out = floor((n + low + high - span) / stride) + 1

With ``ceil_mode=True`` the division rounds up, and a last window that would begin beyond the
operand and its padding before it is dropped. A window hanging over the padded operand's end sees
only what is there: the overhang is never counted in an average.
"""

import math
import operator

import jax.numpy as jnp
from jax import lax

from pybridge._windows.geometry import Axis, named_padding
from pybridge.windows import reduce_window

__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "logsumexp_pool",
    "lp_pool",
    "max_pool",
    "min_pool",
    "sum_pool",
]


def max_pool(
    x,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    *,
    ceil_mode=False,
    return_indices=False,
    channels="first",
    ties="first",
):
    """The maximum of each window.

    Args:
      x: real array, (..., C, *spatial) or, with ``channels="last"``, (..., *spatial, C).
      kernel_size: positive integers, one a spatial axis; a single integer means all axes but the
        first (the batch) and the channels.
      stride: as kernel_size; default the kernel's.
      padding: an integer, integers, or pairs (low, high), one a spatial axis; or "VALID", "SAME",
        "SAME_LOWER". Padding never is the maximum.
      dilation: as kernel_size; the distance between a window's elements.
      ceil_mode: round the output's size up instead of down.
      return_indices: also return where each maximum is: int32, its flat row-major index within the
        operand's spatial axes (of equal elements, the first).
      channels: "first" or "last".
      ties: "first" or "split", see ``reduce_window``.

    Returns:
      Array of x's dtype; with return_indices, a pair.

    Raises:
      ValueError, TypeError: arguments that are malformed, or padding so wide that a window holds
        no element.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pybridge import max_pool
      >>> x = jnp.array([[5.0, 3.0, 1.0, 2.0, 5.0]])
      >>> max_pool(x, (2,), 1)
      Array([[5., 3., 2., 5.]], dtype=float32)
      >>> jax.grad(lambda x: max_pool(x, (2,), 1).sum())(x)
      Array([[1., 1., 0., 1., 1.]], dtype=float32)

    Reference:
      torch.nn.functional.max_pool2d.
    """
    layout = _Layout("max_pool", x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    return _extremum(layout, lax.max, ties, return_indices)


def min_pool(
    x,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    *,
    ceil_mode=False,
    return_indices=False,
    channels="first",
    ties="first",
):
    """The minimum of each window; everything else as for ``max_pool``.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import min_pool
      >>> min_pool(jnp.array([[5, 3, 1, 2]]), (2,), return_indices=True)
      (Array([[3, 1]], dtype=int32), Array([[1, 2]], dtype=int32))
    """
    layout = _Layout("min_pool", x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    return _extremum(layout, lax.min, ties, return_indices)


def sum_pool(
    x, kernel_size, stride=None, padding=0, dilation=1, *, ceil_mode=False, channels="first"
):
    """The sum of each window; arguments as for ``max_pool``.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import sum_pool
      >>> sum_pool(jnp.array([[1.0, 2.0, 3.0]]), (2,), ceil_mode=True)
      Array([[3., 3.]], dtype=float32)
    """
    layout = _Layout("sum_pool", x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    return layout.reduce(layout.x, 0, lax.add)


def avg_pool(
    x,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    *,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
    channels="first",
):
    """The mean of each window; arguments as for ``max_pool``, and:

    Args:
      count_include_pad: divide by the number of elements and padding in the window (True, as in
        torch), or of elements alone. What hangs over the padded operand in ceil_mode is neither.
      divisor_override: divide by this number instead.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import avg_pool
      >>> x = jnp.array([[2.0, 4.0, 6.0]])
      >>> avg_pool(x, (2,), ceil_mode=True)
      Array([[3., 6.]], dtype=float32)
      >>> avg_pool(x, (3,), padding=1, count_include_pad=False)
      Array([[3.]], dtype=float32)

    Reference:
      torch.nn.functional.avg_pool2d.
    """
    layout = _Layout("avg_pool", x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    wide = _widened("avg_pool", layout.x)
    total = layout.reduce(wide, 0, lax.add)
    if divisor_override is not None:
        if divisor_override == 0:
            raise ValueError("avg_pool: divisor_override must not be 0.")
        count = divisor_override
    else:
        count = layout.counts(count_include_pad).astype(jnp.finfo(wide.dtype).dtype)
    return (total / count).astype(layout.x.dtype)


def lp_pool(
    x,
    norm_type,
    kernel_size,
    stride=None,
    padding=0,
    dilation=1,
    *,
    ceil_mode=False,
    channels="first",
):
    """The power mean without the mean, (sum of x^p)^(1/p), of each window.

    As in torch the powers are of x, not of its magnitude: p = 1 is ``sum_pool``, p = inf is
    ``max_pool``, and an odd p may meet a negative sum, whose root is NaN. Where the sum is 0 the
    derivative is taken as 0, as torch documents.

    Args:
      norm_type: p, a number of at least 1, or ``inf``; the others as for ``max_pool``.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import lp_pool
      >>> lp_pool(jnp.array([[3.0, -4.0, 0.0, 2.0]]), 2, (2,))
      Array([[5., 2.]], dtype=float32)

    Reference:
      torch.nn.functional.lp_pool2d.
    """
    if not isinstance(norm_type, int | float) or not norm_type >= 1:
        raise ValueError(f"lp_pool: norm_type must be a number of at least 1, got {norm_type!r}.")
    if math.isinf(norm_type):
        return max_pool(
            x, kernel_size, stride, padding, dilation, ceil_mode=ceil_mode, channels=channels
        )
    layout = _Layout("lp_pool", x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    p = int(norm_type) if norm_type == int(norm_type) else norm_type
    total = layout.reduce(_widened("lp_pool", layout.x) ** p, 0, lax.add)
    if p != 1:
        zero = total == 0
        total = jnp.where(zero, 0, jnp.where(zero, 1, total) ** (1 / p))
    return total.astype(layout.x.dtype)


def logsumexp_pool(
    x, kernel_size, stride=None, padding=0, dilation=1, *, ceil_mode=False, channels="first"
):
    """log(sum of exp(x)) of each window, a smooth maximum; arguments as for ``max_pool``.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import logsumexp_pool
      >>> logsumexp_pool(jnp.array([[0.0, 0.0, 100.0, 0.0]]), (2,))
      Array([[  0.6931472, 100.       ]], dtype=float32)
    """
    name = "logsumexp_pool"
    layout = _Layout(name, x, kernel_size, stride, padding, dilation, ceil_mode, channels)
    if not jnp.issubdtype(layout.x.dtype, jnp.floating):
        raise TypeError(f"{name}: x must be of a floating dtype, got {layout.x.dtype}; cast it.")
    return layout.reduce(layout.x, -jnp.inf, jnp.logaddexp)


def adaptive_max_pool(x, output_size, *, return_indices=False, channels="first"):
    """The maximum of each of ``output_size`` windows that cover a spatial axis of any length.

    Window i of m along an axis of length n is [floor(i n / m), ceil((i + 1) n / m)), as in torch;
    neighbours may overlap by one element and differ in length by one.

    Args:
      x, channels, return_indices: as for ``max_pool``.
      output_size: positive integers, one a spatial axis (None keeps the axis); a single integer
        means all axes but the first (the batch) and the channels.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import adaptive_max_pool
      >>> adaptive_max_pool(jnp.arange(5.0)[None], (2,))
      Array([[2., 4.]], dtype=float32)

    Reference:
      torch.nn.functional.adaptive_max_pool2d.
    """
    layout = _Adaptive("adaptive_max_pool", x, output_size, channels)
    lowest = _lowest(layout.x.dtype, lax.max)
    spread = layout.gather(layout.x, lowest)
    values = layout.reduce(spread, lowest, lax.max)
    if not return_indices:
        return values
    indices = layout.gather(_flat_index(layout.x.shape, layout.spatial), -1)
    take = _later_is_better(lax.max)
    pair = layout.reduce((lax.stop_gradient(spread), indices), (lowest, -1), take)
    return values, pair[1]


def adaptive_avg_pool(x, output_size, *, channels="first"):
    """The mean of each of ``output_size`` windows; arguments as for ``adaptive_max_pool``.

    Example:
      >>> import jax.numpy as jnp
      >>> from pybridge import adaptive_avg_pool
      >>> adaptive_avg_pool(jnp.arange(5.0)[None], (2,))
      Array([[1., 3.]], dtype=float32)

    Reference:
      torch.nn.functional.adaptive_avg_pool2d.
    """
    layout = _Adaptive("adaptive_avg_pool", x, output_size, channels)
    wide = _widened("adaptive_avg_pool", layout.x)
    total = layout.reduce(layout.gather(wide, 0), 0, lax.add)
    ones = jnp.ones(wide.shape, jnp.finfo(wide.dtype).dtype)
    counts = layout.reduce(layout.gather(ones, 0), 0, lax.add)
    return (total / counts).astype(layout.x.dtype)


def _widened(name, x):
    """x for a sum that 16-bit numbers could not hold, though its mean or root be finite."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(f"{name}: x must be of a floating dtype, got {x.dtype}; cast it.")
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


# Maximum and minimum with indices


def _extremum(layout, op, ties, return_indices):
    x = layout.x
    lowest = _lowest(x.dtype, op)
    values = layout.reduce(x, lowest, op, ties=ties)
    if not return_indices:
        return values
    indices = _flat_index(x.shape, layout.spatial)
    operands = (lax.stop_gradient(x), indices)
    return values, layout.reduce(operands, (lowest, -1), _later_is_better(op))[1]


def _later_is_better(op):
    """A reducer of (value, index) that keeps the first extreme element, or the first NaN."""

    def take(a, b):
        later = (b[0] > a[0]) if op is lax.max else (b[0] < a[0])
        later |= (b[0] != b[0]) & (a[0] == a[0])
        later |= a[1] < 0  # nothing yet: init's index
        later &= b[1] >= 0  # a filler of an adaptive window
        return jnp.where(later, b[0], a[0]), jnp.where(later, b[1], a[1])

    return take


def _lowest(dtype, op):
    if jnp.issubdtype(dtype, jnp.floating):
        return -math.inf if op is lax.max else math.inf
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return int(limits.min if op is lax.max else limits.max)
    raise TypeError(f"pooling by maximum or minimum needs real numbers, got {dtype}.")


def _flat_index(shape, spatial):
    """Each element's flat row-major index within the spatial axes: int32, of the whole shape."""
    flat = jnp.zeros(shape, jnp.int32)
    step = 1
    for axis in reversed(spatial):
        flat += step * lax.broadcasted_iota(jnp.int32, shape, axis)
        step *= shape[axis]
    return flat


# Layouts


class _Layout:
    """Where the windows of a pooling layer lie on an array of any layout."""

    def __init__(self, name, x, kernel_size, stride, padding, dilation, ceil_mode, channels):
        self.x = jnp.asarray(x)
        kernel = _given(name, "kernel_size", kernel_size, self.x.ndim)
        self.spatial = _spatial_axes(name, self.x, len(kernel), channels)
        stride = kernel if stride is None else _given(name, "stride", stride, None, len(kernel))
        dilation = _given(name, "dilation", dilation, None, len(kernel))
        sizes = [self.x.shape[axis] for axis in self.spatial]
        self.padded = _pads(name, padding, sizes, kernel, stride, dilation)

        self.window = [1] * self.x.ndim
        self.stride, self.dilation = list(self.window), list(self.window)
        self.padding = [(0, 0)] * self.x.ndim
        for i, axis in enumerate(self.spatial):
            low, high = self.padded[i]
            span = (kernel[i] - 1) * dilation[i] + 1
            room = sizes[i] + low + high - span
            out = room // stride[i] + 1
            if ceil_mode and room % stride[i]:
                # One more window, unless it would begin beyond the operand's last element.
                if out * stride[i] < sizes[i] + low:
                    out += 1
                high = max(high, (out - 1) * stride[i] + span - sizes[i] - low)
            if out < 1:
                raise ValueError(
                    f"{name}: kernel_size {tuple(kernel)} with dilation {tuple(dilation)} spans "
                    f"more than the padded size along spatial axis {i} ({sizes[i]} + {low} + "
                    f"{self.padded[i][1]}); give a smaller kernel or more padding."
                )
            lies = Axis(sizes[i], kernel[i], stride[i], low, high, 1, dilation[i])
            if not lies.every_window_has_a_cell:
                raise ValueError(
                    f"{name}: padding {self.padded[i]} along spatial axis {i} of size {sizes[i]} "
                    "leaves a window without any element; give less padding."
                )
            self.window[axis], self.stride[axis] = kernel[i], stride[i]
            self.dilation[axis], self.padding[axis] = dilation[i], (low, high)

    def reduce(self, operand, init, op, **options):
        return reduce_window(
            operand,
            init,
            op,
            self.window,
            self.stride,
            self.padding,
            None,
            self.dilation,
            **options,
        )

    def counts(self, include_padding):
        """How many elements, and padding if asked for, each window has."""
        total = jnp.ones((1,) * self.x.ndim, jnp.int32)
        for i, axis in enumerate(self.spatial):
            size = self.x.shape[axis]
            low, high = self.padding[axis]
            counted, pads = size, (low, high)
            if include_padding:
                # The operand with the padding asked for; ceil_mode's overhang is what remains.
                counted = size + sum(self.padded[i])
                pads = (0, low + high + size - counted)
            along = reduce_window(
                jnp.ones(counted, jnp.int32),
                0,
                lax.add,
                (self.window[axis],),
                (self.stride[axis],),
                [pads],
                None,
                (self.dilation[axis],),
            )
            total = total * along.reshape([-1 if a == axis else 1 for a in range(self.x.ndim)])
        return total


class _Adaptive:
    """Windows of almost equal length, gathered so that each becomes one of equal length."""

    def __init__(self, name, x, output_size, channels):
        self.x = jnp.asarray(x)
        if isinstance(output_size, int):
            output_size = (output_size,) * max(self.x.ndim - 2, 1)
        self.spatial = _spatial_axes(name, self.x, len(output_size), channels)
        sizes = [self.x.shape[axis] for axis in self.spatial]
        kept = [n if m is None else m for m, n in zip(output_size, sizes)]
        self.outputs = _given(name, "output_size", kept, None, len(kept))
        if 0 in sizes:
            raise ValueError(f"{name}: x has an empty spatial axis, shape {self.x.shape}.")
        self.lengths = [
            max(-(-(i + 1) * n // m) - i * n // m for i in range(m))
            for n, m in zip(sizes, self.outputs)
        ]

    def gather(self, x, fill):
        """x with every window's elements side by side, ``fill`` after a shorter window's."""
        for axis, m, length in zip(self.spatial, self.outputs, self.lengths):
            n = x.shape[axis]
            if m * length == n:
                continue
            begin = jnp.array([i * n // m for i in range(m)])[:, None]
            end = jnp.array([-(-(i + 1) * n // m) for i in range(m)])[:, None]
            at = begin + jnp.arange(length)[None, :]
            inside = (at < end).reshape(-1)
            x = jnp.take(x, jnp.minimum(at, end - 1).reshape(-1), axis=axis, mode="clip")
            inside = inside.reshape([-1 if a == axis else 1 for a in range(x.ndim)])
            x = jnp.where(inside, x, jnp.asarray(fill, x.dtype))
        return x

    def reduce(self, operand, init, op):
        window = [1] * self.x.ndim
        for axis, length in zip(self.spatial, self.lengths):
            window[axis] = length
        return reduce_window(operand, init, op, window, window)


# Arguments


def _given(name, argument, value, ndim, count=None):
    """One positive integer a spatial axis."""
    try:
        if isinstance(value, int):
            found = (value,) * (count if count is not None else max(ndim - 2, 1))
        else:
            found = tuple(operator.index(v) for v in value)
    except TypeError as error:
        raise TypeError(
            f"{name}: {argument} must be an integer or a sequence of them, got {value!r}."
        ) from error
    if count is not None and len(found) != count:
        raise ValueError(
            f"{name}: {argument} has {len(found)} entries, {found}, for {count} spatial axes."
        )
    if any(v < 1 for v in found):
        raise ValueError(f"{name}: {argument} must be positive, got {found}.")
    return found


def _spatial_axes(name, x, count, channels):
    if channels not in ("first", "last"):
        raise ValueError(f"{name}: channels must be 'first' or 'last', got {channels!r}.")
    if x.ndim < count + 1:
        raise ValueError(
            f"{name}: x of shape {x.shape} has {x.ndim} axes; {count} spatial axes and one for "
            "the channels need more. Add an axis, e.g. x[None]."
        )
    last = x.ndim if channels == "first" else x.ndim - 1
    return tuple(range(last - count, last))


def _pads(name, padding, sizes, kernel, stride, dilation):
    if isinstance(padding, str):
        return named_padding(name, padding, sizes, kernel, stride, dilation)
    try:
        if isinstance(padding, int):
            padding = (padding,) * len(sizes)
        pairs = [(p, p) if isinstance(p, int) else tuple(p) for p in padding]
        pairs = [(operator.index(low), operator.index(high)) for low, high in pairs]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name}: padding must be an integer, integers, pairs (low, high) or a string, "
            f"got {padding!r}."
        ) from error
    if len(pairs) != len(sizes):
        raise ValueError(
            f"{name}: padding has {len(pairs)} entries, {pairs}, for {len(sizes)} spatial axes."
        )
    if any(p < 0 for pair in pairs for p in pair):
        raise ValueError(f"{name}: padding must not be negative, got {pairs}; slice x instead.")
    return pairs
