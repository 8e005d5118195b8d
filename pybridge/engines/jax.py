"""The embedded default engine: a form of a Python function, evaluated by JAX's own transformations.

``nested_grad`` of a Python loss needs no form: JAX sees into the loss, and its own composition is
the fastest (``pybridge.nested``). This engine is the form's meaning in ten lines of JAX, the plain
definition that the Julia engine is held against, with the same primitive above it.
"""

import jax
import jax.numpy as jnp

from pybridge import jets


class JaxFunction:
    """A Python function of pytrees whose derivatives go through the form."""

    def __init__(self, f):
        self.f = f
        self.jet_functions = {}
        self.__name__ = getattr(f, "__name__", type(f).__name__)

    def __call__(self, *args):
        return jets.call(engine, self, *args)


class JaxEngine:
    name = "jax"
    complex_derivatives = False

    def eager(self, jitted):
        return jitted

    def trace(self, target, in_tree, in_avals):
        out = jax.eval_shape(target.f, *jax.tree.unflatten(in_tree, in_avals))
        leaves, tree = jax.tree.flatten(out)
        return tree, tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)

    def evaluate(self, operands, *, function, open, sizes, zflags, sflags):
        z, slots = jets.split(operands, open=open, zflags=zflags, sflags=sflags)
        levels = range(len(sizes))
        # A leaf that is shared but has a batched direction becomes batched: promote it once, then
        # every quantity is a derivative of ONE function of the promoted leaves.
        promoted = [
            tuple(
                flags[i] or any(spec[n] is not None and spec[n][i] for spec in sflags[1:])
                for i in levels
            )
            for n, flags in enumerate(zflags)
        ]
        z = [_promote(*leaf, sizes) for leaf in zip(z, zflags, promoted)]
        active = [n for n, leaf in enumerate(z) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        directions = [
            [
                jnp.zeros_like(z[n])
                if spec[n] is None
                else _promote(slot[n], spec[n], promoted[n], sizes)
                for n in active
            ]
            for j, (slot, spec) in enumerate(zip(slots, sflags))
            if j not in (0, open)
        ]

        def leaves_with(values):
            given = dict(zip(active, values))
            return [given.get(n, leaf) for n, leaf in enumerate(z)]

        def h(leaves):
            out = function.target.f(*jax.tree.unflatten(function.in_tree, leaves))
            return jax.tree.leaves(out)

        def mapped(f, *flags):
            # Innermost level first; axis_size serves a level with nothing batched.
            for i in reversed(levels):
                axes = tuple([0 if leaf[i] else None for leaf in group] for group in flags)
                f = jax.vmap(f, axes, axis_size=sizes[i])
            return f

        if open == 0:
            have = [(True,) * len(sizes)] * len(sflags[0])
            g = lambda values: mapped(h, promoted)(leaves_with(values))
        else:
            paired = [n for n, flags in enumerate(sflags[0]) if flags is not None]
            covector = [slots[0][n] for n in paired]

            def pairing(leaves, covector):
                out = h(leaves)
                return sum(jnp.sum(c * out[n]) for c, n in zip(covector, paired))

            def total(values):
                batched = mapped(pairing, promoted, [sflags[0][n] for n in paired])
                return jnp.sum(batched(leaves_with(values), covector))

            have = [promoted[n] for n in active]
            g = jax.grad(total)
        for direction in directions:
            g = _directional(g, direction)
        index = range(len(sflags[0])) if open == 0 else active
        out = dict(zip(index, g([z[n] for n in active])))
        have = dict(zip(index, have))
        return [
            _sum_shared(out[n], have[n], flags, levels)
            for n, flags in enumerate(sflags[open])
            if flags is not None
        ]


def _directional(g, direction):
    return lambda values: jax.jvp(g, (values,), (direction,))[1]


def _promote(leaf, flags, target, sizes):
    axis = 0
    for size, batched, wanted in zip(sizes, flags, target):
        if wanted and not batched:
            leaf = jnp.broadcast_to(
                jnp.expand_dims(leaf, axis), (*leaf.shape[:axis], size, *leaf.shape[axis:])
            )
        axis += wanted
    return leaf


def _sum_shared(leaf, have, wanted, levels):
    kept = [i for i in levels if have[i]]
    shared = tuple(a for a, i in enumerate(kept) if not wanted[i])
    return jnp.sum(leaf, axis=shared, dtype=leaf.dtype) if shared else leaf


engine = JaxEngine()
