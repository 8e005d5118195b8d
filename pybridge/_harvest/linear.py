"""linearize: the linear map of a function that sows, sowing the tangents under the same names.

So that reap(linearize(f)) = linearize(reap(f)) and the same for plant, also for a value that nothing
uses, whose tangent jax.linearize drops as dead code.
"""

import jax
import jax.numpy as jnp

from .calls import sow_again
from .forms import Ask
from .levels import living
from .primitive import Session
from .program import Program


def linearize(fun, *primals, has_aux=False):
    """``jax.linearize`` whose linear map sows the tangent of every value that ``fun`` sows.

    Returns ``(out, lin)`` or ``(out, lin, aux)``. ``reap(lin)(dx)`` gives the tangents, as the values of
    a linear function; ``plant(lin, {name: dv})`` writes one in.

    >>> from pybridge.harvest import linearize, plant, reap, sow
    >>> y, lin = linearize(lambda x: sow(x**2, "y") + 1.0, 3.0)
    >>> dy, named = reap(lin)(1.0)
    >>> float(dy), float(named["y"].value), float(plant(lin, {"y": 5.0})(1.0))
    (6.0, 6.0, 5.0)
    """
    program = Program(fun, Session(), primals, {}, has_aux, numbers=True)
    flat = program.flat
    operand_tree, n_out = jax.tree.structure(primals), flat.n_out
    # A value that the result depends on is sown in place; the others, and those of levels inside, are
    # made outputs of the linear map and sown there.
    in_place = frozenset() if program.levels else frozenset(living(program.jaxpr, n_out))
    outputs = [
        s
        for s in program.spots
        if s.id[0] == "1" and s.primal and s.uid not in in_place and s.role == "value"
    ]
    ask = Ask(frozenset(s.id[1:] for s in outputs), keep=in_place)
    consts, operands = program.consts, program.operands

    def form(*operands):
        outs, vals = program.form.call(consts, operands, ask)
        live = {i: v for i, v in vals.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
        return (outs[:n_out], live), (outs[n_out:], vals)

    (outs, _), push, (aux, vals) = jax.linearize(form, *operands, has_aux=True)
    _sow_outputs(outputs, vals, "p")

    def lin(*tangents):
        leaves, tree = jax.tree.flatten(tangents)
        if tree != operand_tree:
            raise TypeError(
                f"linearized function called with tangents of structure {tree}; accepted: "
                f"{operand_tree}, as the primals"
            )
        douts, dvals = push(*leaves)
        _sow_outputs(outputs, dvals, "t")
        return jax.tree.unflatten(flat.out_tree, douts)

    out = jax.tree.unflatten(flat.out_tree, outs)
    return (out, lin, jax.tree.unflatten(flat.aux_tree, aux)) if has_aux else (out, lin)


def _sow_outputs(spots, vals, letter):
    """Sow values that are outputs of a transformed function, under their own names."""
    for s in spots:
        if s.id[1:] in vals:
            sow_again([s], [vals[s.id[1:]]], (("diff", letter),))
