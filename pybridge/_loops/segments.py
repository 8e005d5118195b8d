"""A fold along a trajectory by loops within loops, which linearise by the rules of the loop.

The derivative of a reverse fold (see ``trajectory``) asks for pairs of a state and an r, and these
arise in opposite directions, so no schedule of single states serves it. Here the steps are cut into
segments, those into segments, and so on. Each loop keeps a state and an r for each of its own turns,
and what its inner loops keep is computed again for one turn at a time: with d levels that is
d times the d-th root of the number of steps, for d times the work.
"""

import itertools
import math

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from pybridge._loops import steps
from pybridge._loops.primitive import bind
from pybridge._loops.steps import split

# More loops within loops would take longer to compile than they save.
MOST_LEVELS = 4


def levels(bound, slots):
    """The bounds of as few loops as keep no more than ``slots`` steps in all, or else of those that
    keep the fewest. Together they reach ``bound``."""
    choices = []
    for depth in range(1, MOST_LEVELS + 1):
        left, chosen = bound, []
        for below in reversed(range(depth)):
            power = below + 1
            near = max(1, int(left ** (1 / power)) - 1)
            chosen.append(next(k for k in itertools.count(near) if k**power >= left))
            left = -(-left // chosen[-1])
        choices.append(tuple(chosen))
    fitting = [chosen for chosen in choices if sum(chosen) <= slots]
    return fitting[0] if fitting else min(choices, key=sum)


_LENGTH = jax.core.ShapedArray((), jnp.int32)


@steps.remember
def fold_in_segments(advance, fold, n, levels, reverse):
    """``(length, consts, x, r) -> r`` over steps in segments, and those in segments, and so on."""
    c, x, r = split(fold.in_avals, *n)
    if not levels:
        return steps.trace(lambda length, *args: jaxpr_as_fun(fold)(*args), [_LENGTH, *c, *x, *r])
    inside = math.prod(levels[1:])
    inner = fold_in_segments(advance, fold, n, levels[1:], reverse)

    def segment(*args):
        (length,), consts, carry, (k, *start) = split(args, 1, n[0], len(r))
        return jaxpr_as_fun(inner)(_steps_in(k, length, inside), *consts, *start, *carry)

    segment = steps.trace(segment, [_LENGTH, *c, *r, _LENGTH, *x])

    def run(*args):
        (length,), consts, x, r = split(args, 1, *n)
        starts = _walk(length, consts, x, advance, levels, starts=True)
        return _over_segments(length, consts, r, starts, segment, levels, reverse)

    return steps.trace(run, [_LENGTH, *c, *x, *r])


def _walk(length, consts, x, advance, levels, starts=False):
    """The state after ``length`` steps, or the states at the starts of the outermost segments."""
    if not levels:
        return jaxpr_as_fun(advance)(*consts, *x)
    inside = math.prod(levels[1:])

    def segment(*args):
        (length,), consts, x, (k,) = split(args, 1, *n)
        after = _walk(_steps_in(k, length, inside), consts, x, advance, levels[1:])
        return [*after, *x] if starts else after

    n = len(consts), len(x)
    segment = steps.trace(segment, [_LENGTH, *advance.in_avals, _LENGTH])
    outs = _over_segments(length, consts, x, [], segment, levels, False)
    return outs[n[1] :] if starts else outs


def _steps_in(k, length, inside):
    return jnp.clip(length - k * inside, 0, inside)


def _over_segments(length, consts, carry, rows, segment, levels, reverse):
    inside = math.prod(levels[1:])
    count = -(-length // inside)
    rows = [jnp.arange(levels[0], dtype=jnp.int32), *rows]
    return bind(
        [count], [length, *consts], carry, rows, cond=None, step=segment,
        bound=levels[0], reverse=reverse, checkpoints="all",
    )  # fmt: skip
