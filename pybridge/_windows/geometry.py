"""Where the windows lie.

One axis of a windowed reduction is a *line*: the operand's cells spread out by the base dilation,
with padding before and after, cut to the positions that some window covers. Output ``o`` sees the
positions ``o * stride + k * dilation`` for ``k`` in ``range(window)``; a position holds a cell or,
where padding or a dilation hole is, nothing. A window of several axes is a product of such lines,
and so is the question whether a position holds a cell.

All of it is known before any array is: the classes here are static and hashable.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class Axis:
    """One axis: the operand's size and what the caller asked for along it."""

    size: int
    window: int
    stride: int = 1
    low: int = 0
    high: int = 0
    base: int = 1
    dilation: int = 1

    @property
    def span(self):
        """The positions from a window's first to its last, both counted."""
        return (self.window - 1) * self.dilation + 1

    @functools.cached_property
    def out(self):
        """How many windows there are."""
        spread = 0 if self.size == 0 else (self.size - 1) * self.base + 1
        room = spread + self.low + self.high - self.span
        return 0 if room < 0 else room // self.stride + 1

    @property
    def length(self):
        """The line's length: no position beyond the last window's last."""
        return (self.out - 1) * self.stride + self.span if self.out else 0

    @functools.cached_property
    def cells(self):
        """The operand's cells that lie on the line, as (first, last + 1).

        Negative padding and a stride that leaves a rest cut cells away here, by a slice: XLA's own
        handling of negative padding differs between eager and compiled code.
        """
        first = -(-max(-self.low, 0) // self.base)
        last = min(self.size - 1, (self.length - 1 - self.low) // self.base)
        return (first, last + 1) if first <= last else (0, 0)

    @functools.cached_property
    def pads(self):
        """Positions without a cell before the line's first cell and after its last."""
        first, end = self.cells
        if first == end:
            return self.length, 0
        before = first * self.base + self.low
        return before, self.length - before - (end - 1 - first) * self.base - 1

    @functools.cached_property
    def full(self):
        """Whether every position of every window holds a cell."""
        return self.pads == (0, 0) and (self.base == 1 or self.length == 1)

    def holds(self, position):
        """Whether a position (an integer or an array of them) of the line holds a cell."""
        before, after = self.pads
        inside = (position >= before) & (position < self.length - after)
        return inside & ((position - before) % self.base == 0)

    def first_offset(self, output, xp=np):
        """The first k whose position holds a cell, for each output; ``window`` where none does."""
        before, _ = self.pads
        missing = before - output * self.stride
        first = xp.maximum(missing + self.dilation - 1, 0) // self.dilation
        found = xp.full_like(output, self.window)
        # Positions with a cell repeat every `base` steps of k, so those many candidates suffice.
        for k in range(min(self.base, self.window) - 1, -1, -1):
            hit = self.holds(output * self.stride + (first + k) * self.dilation)
            found = xp.where(hit & (first + k < self.window), first + k, found)
        return found

    @functools.cached_property
    def _first_offsets(self):
        return self.first_offset(np.arange(self.out))

    @functools.cached_property
    def every_window_has_a_cell(self):
        return self.full or bool((self._first_offsets < self.window).all())

    @functools.cached_property
    def some_cell(self):
        """(output, offset) of one window and its first cell; None where no window has any."""
        if self.full:
            return (0, 0) if self.out else None
        outputs = np.flatnonzero(self._first_offsets < self.window)
        if outputs.size == 0:
            return None
        return int(outputs[0]), int(self._first_offsets[outputs[0]])


@dataclass(frozen=True)
class Geometry:
    """The axes together."""

    axes: tuple[Axis, ...]

    @property
    def rank(self):
        return len(self.axes)

    @property
    def shape(self):
        return tuple(a.size for a in self.axes)

    @property
    def out(self):
        return tuple(a.out for a in self.axes)

    @property
    def window(self):
        return tuple(a.window for a in self.axes)

    @property
    def count(self):
        """Positions in a window."""
        return math.prod(self.window)

    @property
    def full(self):
        return all(a.full for a in self.axes)

    @property
    def every_window_has_a_cell(self):
        return all(a.every_window_has_a_cell for a in self.axes)

    @property
    def some_cell(self):
        """The position on the line of one window's first cell; None where no window has a cell."""
        found = [a.some_cell for a in self.axes]
        if any(f is None for f in found):
            return None
        return tuple(o * a.stride + k * a.dilation for a, (o, k) in zip(self.axes, found))

    def line(self, x, fill):
        """The operand on its line, ``fill`` where there is no cell."""
        starts, stops = zip(*(a.cells for a in self.axes)) if self.axes else ((), ())
        if starts != (0,) * self.rank or stops != x.shape:
            x = lax.slice(x, starts, stops)
        config = []
        for a in self.axes:
            before, after = a.pads
            empty = a.cells[0] == a.cells[1]
            config.append((before, after, 0 if empty else a.base - 1))
        if any(c != (0, 0, 0) for c in config):
            x = lax.pad(x, jnp.asarray(fill, x.dtype), config)
        return x

    def holds(self, offset):
        """Whether the window's position at ``offset`` holds a cell: bool, shape ``out``.

        ``offset`` has one integer an axis, traced or not. None where all hold one.
        """
        mask = None
        for axis, (a, k) in enumerate(zip(self.axes, offset)):
            if a.full:
                continue
            outputs = lax.broadcasted_iota(jnp.int32, self.out, axis)
            here = a.holds(outputs * a.stride + k * a.dilation)
            mask = here if mask is None else mask & here
        return mask

    def has_cell(self):
        """Whether a window has any cell: bool, shape ``out``; None where all have."""
        mask = None
        for axis, a in enumerate(self.axes):
            if a.every_window_has_a_cell:
                continue
            outputs = lax.broadcasted_iota(jnp.int32, self.out, axis)
            here = a.first_offset(outputs, jnp) < a.window
            mask = here if mask is None else mask & here
        return mask

    def offsets(self):
        """The window's positions in the written order: row-major."""
        return itertools.product(*(range(a.window) for a in self.axes))


def named_padding(caller, padding, shape, window, strides, dilation):
    """The pairs (low, high) that a padding's name stands for."""
    if padding.upper() not in ("VALID", "SAME", "SAME_LOWER"):
        raise ValueError(
            f"{caller}: padding {padding!r} is unknown; give 'VALID', 'SAME', 'SAME_LOWER' or a "
            "pair (low, high) for each axis."
        )
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilation)]
    pads = lax.padtype_to_pads(shape, spans, strides, padding)
    return [(int(low), int(high)) for low, high in pads]


def phases(line, axis, stride):
    """Reshape one axis of length n to (ceil(n / stride), stride)."""
    n = line.shape[axis]
    rows = -(-n // stride)
    config = [(0, 0, 0)] * line.ndim
    config[axis] = (0, rows * stride - n, 0)
    zero = jnp.zeros((), line.dtype)
    padded = lax.pad(line, zero, config) if rows * stride != n else line
    return lax.reshape(padded, (*line.shape[:axis], rows, stride, *line.shape[axis + 1 :]))


def cells(line, axes):
    """One array of shape ``out`` for each position of the window, in row-major order.

    Array k holds, for each output, what the line holds at the window's k-th position.
    """
    found = []
    for offset in itertools.product(*(range(a.window) for a in axes)):
        starts = [k * a.dilation for k, a in zip(offset, axes)]
        stops = [s + (a.out - 1) * a.stride + 1 for s, a in zip(starts, axes)]
        found.append(lax.slice(line, starts, stops, [a.stride for a in axes]))
    return found


def transposable_cells(line, axes):
    """``cells``, for expressions that reverse mode transposes.

    The transpose of a slice with a stride is a padded array as large as the operand, one an
    offset. Here a strided axis is first split into its phases, so that each array is a slice
    without a stride and the transpose adds shifted arrays phase by phase and interleaves them once.
    """
    parts = {(): line}
    for axis, a in enumerate(axes):
        grown = {}
        places = [divmod(k * a.dilation, a.stride) for k in range(a.window)]
        needed = sorted({phase for _, phase in places})
        for key, part in parts.items():
            by_phase = _split_phases(part, axis, a.stride, needed)
            for k, (row, phase) in enumerate(places):
                piece = lax.slice_in_dim(by_phase[phase], row, row + a.out, axis=axis)
                grown[(*key, k)] = piece
        parts = grown
    return list(parts.values())


def _split_phases(line, axis, stride, needed):
    """The line's elements at positions congruent to each needed phase."""
    if stride == 1:
        return {0: line}
    rows = phases(line, axis, stride)
    # lax.split, since its transpose is one concatenation rather than a sum of padded arrays.
    sizes, at = [], 0
    for phase in needed:
        sizes += [phase - at, 1] if phase > at else [1]
        at = phase + 1
    if at < stride:
        sizes.append(stride - at)
    pieces = lax.split(rows, sizes, axis=axis + 1)
    found, at = {}, 0
    for piece, size in zip(pieces, sizes):
        if at in needed:
            found[at] = lax.squeeze(piece, (axis + 1,))
        at += size
    return found


def cell_at(line, axes, offset):
    """What the line holds at a traced offset, for each output: shape ``out``."""
    starts, sizes = [], []
    for axis, a in reversed(list(enumerate(axes))):
        if a.stride > 1:
            line = phases(line, axis, a.stride)
    for a, k in zip(axes, offset):
        position = jnp.asarray(k, jnp.int32) * a.dilation
        starts.append(position // a.stride)
        sizes.append(a.out)
        if a.stride > 1:
            starts.append(position % a.stride)
            sizes.append(1)
    found = lax.dynamic_slice(line, starts, sizes)
    return lax.reshape(found, tuple(a.out for a in axes))


def varying(*arrays):
    """The mesh axes of an enclosing ``shard_map`` that any of the arrays varies over."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))


def vary(x, axes):
    """x, varying over ``axes`` too: as a loop carries it out, so it must go in."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
