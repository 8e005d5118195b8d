"""The reference for windowed reductions: a plain loop, central differences, and six reducers."""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax


def sizes(n, window, stride, low, high, base, dilation):
    spread = 0 if n == 0 else (n - 1) * base + 1
    span = (window - 1) * dilation + 1
    return max(0, (spread + low + high - span) // stride + 1)


def loop(xs, inits, op, window, stride=None, padding=None, base=None, dilation=None):
    """Fold each window left to right from init; xs, inits are lists, op takes and returns lists."""
    rank = xs[0].ndim
    stride, base, dilation = ([1] * rank if v is None else v for v in (stride, base, dilation))
    padding = [(0, 0)] * rank if padding is None else padding
    shape = xs[0].shape
    out = [
        sizes(*a[:3], *a[3], *a[4:]) for a in zip(shape, window, stride, padding, base, dilation)
    ]
    results = [np.zeros(out, np.result_type(x, i)) for x, i in zip(xs, inits)]
    for o in itertools.product(*map(range, out)):
        acc = list(inits)
        for k in itertools.product(*map(range, window)):
            at = [o[d] * stride[d] + k[d] * dilation[d] - padding[d][0] for d in range(rank)]
            if all(p >= 0 and p % b == 0 and p // b < n for p, b, n in zip(at, base, shape)):
                cell = tuple(p // b for p, b in zip(at, base))
                acc = op(acc, [x[cell] for x in xs])
        for r, a in zip(results, acc):
            r[o] = a
    return results


def single(op):
    return lambda acc, cell: [op(acc[0], cell[0])]


OURS = {
    "add": lax.add,
    "mul": lax.mul,
    "max": lax.max,
    "min": lax.min,
    "logaddexp": jnp.logaddexp,
    "user": lambda a, b: jnp.sin(a) * b + 0.5 * a,
}
REDUCERS = {
    "add": np.add,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "logaddexp": np.logaddexp,
    "user": lambda a, b: np.sin(a) * b + 0.5 * a,
}


def first(f, point, direction, h=1e-6):
    """The derivative of f at a list of arrays along a list of arrays, by central differences."""
    plus = f(*(p + h * d for p, d in zip(point, direction)))
    minus = f(*(p - h * d for p, d in zip(point, direction)))
    return (plus - minus) / (2 * h)


def second(f, point, one, two, h=1e-4):
    """The second derivative of f along two directions, by central differences."""
    along = lambda *p: first(f, p, one, h)
    return first(along, point, two, h)
