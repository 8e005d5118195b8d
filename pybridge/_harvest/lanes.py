"""Branches and loops whose lanes go different ways under jax.vmap: refused where they sow.

JAX's batching rule then runs every branch for every lane, and every step of the longest loop, and
leaves no mark of which lane they were for: a value read there could be one that was never sown. Under
``pybridge.harvest.vmap`` reap maps the form instead, which knows. So while a reaped function is traced
the rule of each such primitive first looks for what it would hide.
"""

import functools

from jax.extend.core import primitives
from jax.interpreters import batching

from pybridge._loops.primitive import loop_p

from .primitive import HarvestError, active, show, sows_in, subjaxprs


def refuse(params, what):
    """Raise if anything is sown in an equation with these parameters."""
    held = next((p for inner in subjaxprs(params) for p in sows_in(inner)), None)
    if held is not None:
        raise HarvestError(
            f"{show(held['path'])} is sown at {held['where']} inside {what} that differs between the "
            f"lanes of jax.vmap, which leaves no mark of the lanes it was sown for. Use "
            f"pybridge.harvest.vmap, and harvest's grad, jvp and vmap around it, too."
        )


def guard(primitive, what, differs):
    """Let the batching rule refuse; ``differs(dims in, dims out, params)`` tells whether lanes do."""
    rule = batching.fancy_primitive_batchers[primitive]

    @functools.wraps(rule)
    def guarded(axis_data, operands, dims, **params):
        outs, out_dims = rule(axis_data, operands, dims, **params)
        if active.value is not None and differs(dims, out_dims, params):
            refuse(params, what)
        return outs, out_dims

    batching.fancy_primitive_batchers[primitive] = guarded


def _length_differs(dims, out_dims, params):
    return (dims if params["cond"] is None else out_dims)[0] is not None


guard(primitives.cond_p, "a cond or switch with a predicate", lambda dims, *_: dims[0] is not None)
guard(loop_p, "a bounded loop of a length", _length_differs)
