"""jit and scan: what they hold of named values that nothing uses becomes their output.

jax.grad of a jit or a scan removes such a value as dead code. So under a session the function inside is
called by its form, with these values as further outputs, and they are sown again beside the call.
"""

import functools
import inspect
import itertools
import types

import jax
from jax import lax

from .forms import Ask, form_of, group
from .levels import living
from .primitive import active, is_array, sow_p
from .wrappers import Flat


def with_ignored(fun, *args, **kwargs):
    """``fun(*args, **kwargs)``; what it sows and does not use leaves it as outputs."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    moving = [i for i, x in enumerate(leaves) if is_array(x)]
    operands = [leaves[i] for i in moving]
    flat = Flat(lambda ak: fun(*ak[0], **ak[1]), tree, leaves, moving, False)
    closed = jax.make_jaxpr(flat)(*operands)
    form = form_of(closed.jaxpr)
    used = living(closed.jaxpr, flat.n_out)
    # What is marked, differentiated or under a custom rule is more than its value, and stays inside.
    more = lambda s: s.role != "value" or s.note or any(letter for _, letter, *_ in s.steps)
    # So does all of a name that is sown more than once, since its order counts.
    inside = {s.name for s in form.spots if s.uid in used or more(s)}
    stay = {s.uid for s in form.spots if s.name in inside}
    out = [s for s in form.spots if s.uid not in stay]
    if not out:
        outs = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *operands)
        return jax.tree.unflatten(flat.out_tree, outs)
    ask = Ask(frozenset(s.id for s in out), keep=frozenset(stay))
    outs, vals = form.call(closed.consts, operands, ask)
    for _, leaves in itertools.groupby(out, lambda s: group(s.id)):
        leaves = list(leaves)
        sow_again(leaves, [vals[s.id] for s in leaves], leaves[0].steps)
    return jax.tree.unflatten(flat.out_tree, outs)


def sow_again(spots, values, steps):
    """Sow leaves of one value, outputs of a transformed function, under the name it had inside."""
    kept = {k: getattr(spots[0], k) for k in ("uid", "tree", "mode", "where")}
    leaves = tuple(s.leaf for s in spots)
    sow_p.bind(*values, path=spots[0].name, leaves=leaves, steps=steps, **kept)


def scan(f, init, xs=None, length=None, reverse=False, unroll=1, _split_transpose=False):
    """``jax.lax.scan``; a value sown in ``f`` that nothing uses has its ``.value`` also under jax.grad.

    >>> import jax, jax.numpy as jnp
    >>> from pybridge.harvest import reap, scan, sow
    >>> step = lambda c, t: (c * t, sow(c + t, "sum"))
    >>> f = lambda x: scan(step, x, jnp.array([2.0, 3.0]))[0]
    >>> reap(jax.grad(f))(1.0)[1]["sum"].value
    Array([3., 5.], dtype=float32)
    """
    run = functools.partial(
        lax.scan,
        f,
        length=length,
        reverse=reverse,
        unroll=unroll,
        _split_transpose=_split_transpose,
    )
    return run(init, xs) if active.value is None else with_ignored(run, init, xs)


class Jitted:
    """A function of ``jax.jit`` that keeps what it sows, also where nothing uses it."""

    def __init__(self, jitted):
        functools.update_wrapper(self, jitted)
        self._jitted = jitted
        self.lower, self.trace, self.eval_shape = jitted.lower, jitted.trace, jitted.eval_shape

    def __call__(self, *args, **kwargs):
        if active.value is None:
            return self._jitted(*args, **kwargs)
        return with_ignored(self._jitted, *args, **kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name):
        return getattr(self._jitted, name)

    def __repr__(self):
        return repr(self._jitted)


def jit(*fun, **options):
    """``jax.jit``; a value sown in the function that nothing uses has its ``.value`` also under jax.grad.

    >>> import jax
    >>> from pybridge.harvest import jit, reap, sow
    >>> f = jit(lambda x: (sow(x**2, "square"), x * 3)[1])
    >>> float(reap(jax.grad(f))(2.0)[1]["square"].value)
    4.0
    """
    jitted = jax.jit(*fun, **options)
    return Jitted(jitted) if fun else lambda fun: Jitted(jitted(fun))


jit.__signature__ = inspect.signature(jax.jit)
