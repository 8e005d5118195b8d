"""The loop as one primitive, a scan of dynamic length.

Operands: control, consts, carry, xs. The step is a jaxpr ``(consts, carry, x) -> (carry, y)``; row
i of ``xs`` is the x of step i, row i of the results ``ys`` is its y, and both have ``bound`` rows.
The length is found or given:

- with ``cond``, a jaxpr ``(control, carry) -> bool``, the loop runs while it holds and at most
  ``bound`` times; the control operands are cond's constants, and the first result is the length;
- without, the control operand is the length.

``reverse`` runs the steps from the last row to the first. ``checkpoints`` is the user's choice of
what linearisation may keep, or "all" rows (see ``saving``). The rules are in ``rules``.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pybridge._loops import rows, steps
from pybridge._loops.steps import split

loop_p = Primitive("bounded_loop")
loop_p.multiple_results = True


def bind(control, consts, carry, xs, *, cond, step, bound, reverse, checkpoints):
    """Bind the primitive; the counts of its operands follow from the lists."""
    return loop_p.bind(
        *control,
        *consts,
        *carry,
        *xs,
        cond=cond,
        step=step,
        bound=bound,
        reverse=reverse,
        checkpoints=checkpoints,
        counts=(len(control), len(consts), len(carry)),
    )


def parts(operands, counts):
    """control, consts, carry, xs."""
    return split(operands, *counts)


# ---- shapes ----


def _abstract(*avals, cond, step, bound, counts, **_):
    _, _, carry, _ = parts(avals, counts)
    strong = lambda a: a.update(weak_type=False)
    row = lambda a: jax.core.ShapedArray((bound, *a.shape), a.dtype)
    ys = step.out_avals[len(carry) :]
    length = [jax.core.ShapedArray((), jnp.int32)] if cond is not None else []
    effects = step.effects | (cond.effects if cond is not None else frozenset())
    return [*length, *map(strong, carry), *map(row, ys)], effects


loop_p.def_effectful_abstract_eval(_abstract)


# ---- evaluation ----


def _run(*operands, cond, step, bound, reverse, counts, **_):
    control, consts, carry, xs = parts(operands, counts)
    dtypes = [jax.typeof(x).dtype for x in carry]
    settle = lambda outs: [lax.convert_element_type(o, d) for o, d in zip(outs, dtypes)]
    advance_by = rows.in_place(step)
    buffers = [jnp.zeros((bound, *a.shape), a.dtype) for a in step.out_avals[len(carry) :]]

    def going(state):
        i, carry, _ = state
        if cond is None:
            return i < control[0]
        (more,) = jaxpr_as_fun(cond)(*control, *carry)
        return more if bound is None else more & (i < bound)

    def advance(state):
        i, carry, buffers = state
        at = control[0] - 1 - i if reverse else i
        x = [lax.dynamic_index_in_dim(a, at, keepdims=False) for a in xs]
        carry, y = split(advance_by(i < 0, *consts, *carry, *x), len(carry))
        buffers = [lax.dynamic_update_index_in_dim(b, v, at, 0) for b, v in zip(buffers, y)]
        return i + jnp.int32(1), settle(carry), buffers

    n, carry, ys = lax.while_loop(going, advance, (jnp.int32(0), settle(carry), buffers))
    return [*([n] if cond is not None else []), *carry, *ys]


mlir.register_lowering(loop_p, mlir.lower_fun(_run, multiple_results=True))


@steps.remember
def _compiled(params):
    return jax.jit(lambda *operands: loop_p.bind(*operands, **dict(params)))


@loop_p.def_impl
def _evaluate(*operands, **params):
    if jax.config.jax_disable_jit:
        return _run(*operands, **params)
    return _compiled(tuple(sorted(params.items())))(*operands)
