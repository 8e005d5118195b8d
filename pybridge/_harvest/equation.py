"""The equation that a level leaves in a program: a transformation and the jaxpr it acts on.

Under JAX's own transformations it is what it computes, and its rules are those of the code inside, where
the sows then leave their marks one by one. Reap transforms the form of the jaxpr inside instead.
"""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .forms import Ask, form_of, rule
from .primitive import RULE_NOTE, active

level_p = Primitive("harvest_level")
level_p.multiple_results = True


def bind_level(level, fn, avals, operands, axis_env=None):
    """Leave ``level`` of the flat function ``fn`` in the program as one equation."""
    closed = jax.make_jaxpr(fn, axis_env=axis_env)(*avals)
    return bind_traced(level, closed, operands)


def bind_traced(level, closed, operands):
    early, more = None, ()
    if active.value is not None and active.value.early and level.differentiates:
        early = Early(level, closed, operands)
        more = early.take_consts()
    return level_p.bind(
        *closed.consts,
        *operands,
        *more,
        jaxpr=closed.jaxpr,
        counts=(len(closed.consts), len(operands)),
        level=level,
        early=early,
    )


def split(operands, counts):
    """constants, operands, and the constants of what was made early."""
    n, m = counts[0], sum(counts)
    return operands[:n], operands[n:m], operands[m:]


def _plain(jaxpr, counts, level, early):
    """What the equation computes, by JAX's own transformation."""
    del early

    def run(*operands):
        consts, operands, _ = split(operands, counts)
        return level.plain(lambda *xs: jax.core.eval_jaxpr(jaxpr, consts, *xs))(*operands)

    return run


# ---- the rules ----


@level_p.def_impl
def _impl(*operands, **params):
    return _plain(**params)(*operands)


@level_p.def_abstract_eval
def _abstract(*avals, **params):
    with active(None):  # for the shapes alone: what jax.vmap would hide is not asked for here
        outs = jax.eval_shape(_plain(**params), *avals)
    return [jax.core.ShapedArray(o.shape, o.dtype, weak_type=o.weak_type) for o in outs]


def _jvp_rule(primals, tangents, **params):
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def run(*moved):
        full = list(primals)
        for i, x in zip(moving, moved):
            full[i] = x
        return _plain(**params)(*full)

    outs, douts = jax.jvp(run, [primals[i] for i in moving], [tangents[i] for i in moving])
    still = lambda d: getattr(d, "dtype", None) == jax.dtypes.float0
    return outs, [ad.Zero(jax.typeof(d)) if still(d) else d for d in douts]


def _batch_rule(operands, dims, **params):
    outs = jax.vmap(_plain(**params), in_axes=tuple(dims), out_axes=0)(*operands)
    return outs, [0] * len(outs)


ad.primitive_jvps[level_p] = _jvp_rule
batching.primitive_batchers[level_p] = _batch_rule
mlir.register_lowering(
    level_p,
    lambda ctx, *xs, **params: mlir.lower_fun(_plain(**params), multiple_results=True)(ctx, *xs),
)


# ---- the form ----


@rule(level_p)
class LevelForm:
    """The equation as a form: the level of the form inside."""

    def __init__(self, eqn, inner):
        p = eqn.params
        self.level, self.counts, self.early = p["level"], p["counts"], p["early"]
        self.form = form_of(p["jaxpr"], inner or self.level.differentiates)
        self.spots = spots_of(self.level, self.form)
        if self.early is not None:
            self.spots += self.early.late_spots(inner)

    def call(self, invals, ask):
        consts, operands, more = split(invals, self.counts)
        if self.early is not None and not ask.keep and not ask.plants:
            return self.early.call(consts, operands, more, ask)
        run = lambda args, ask: self.form.call(consts, args, ask)
        if ask.keep:
            return self.level.planted(self.form, run, operands, ask), {}
        return self.level.call(self.form, run, operands, ask)


def spots_of(level, form):
    jaxpr = form.jaxpr
    return level.spots(form, [v.aval for v in jaxpr.invars], [v.aval for v in jaxpr.outvars])


class Early:
    """The level's form, traced when the equation was bound.

    A custom derivative rule may close over a value that is being traced, and is run when a level
    differentiates. By then the trace of the function around is over. So where that happens
    (program.py), the function is traced once more with each level's form made at once.
    """

    def __init__(self, level, closed, operands):
        self.level = level
        form = form_of(closed.jaxpr, True)
        spots = spots_of(level, form)
        lazy = lambda s: any(letter.startswith("j") for _, letter, *_ in s.steps)
        now = frozenset(s.id for s in spots if not lazy(s))
        later = frozenset(s.id for s in spots if lazy(s))
        self.eps = {
            s.id: jax.ShapeDtypeStruct(s.shape, s.dtype)
            for s in spots
            if s.moves and not s.blind and s.id in now
        }

        def run(consts, operands, eps, want):
            inside = lambda args, ask: form.call(consts, args, ask)
            return level.call(form, inside, operands, Ask(want, eps))

        given = (closed.consts, list(operands))
        self.main, self.tree = _trace(lambda c, o, e: run(c, o, e, now), *given, self.eps)
        self.late, self.late_tree = _trace(lambda c, o: run(c, o, {}, later)[1], *given)

    def take_consts(self):
        """The constants of both programs, which belong to the trace around and leave by the equation."""
        consts = (*self.main.consts, *self.late.consts)
        self.main, self.late = self.main.jaxpr, self.late.jaxpr
        return consts

    def late_spots(self, inner):
        """What rules sowed."""
        form = form_of(self.main, inner)
        return tuple(s.under("rule", note=s.note or RULE_NOTE) for s in form.spots)

    def call(self, consts, operands, more, ask):
        n = len(self.main.constvars)
        ids = [*ask.want]
        eps = {
            i: ask.eps[i] if i in ask.eps else jnp.zeros(e.shape, e.dtype)
            for i, e in self.eps.items()
        }
        inputs = jax.tree.leaves((consts, list(operands), eps))
        found, by_rules = form_of(self.main).call(more[:n], inputs, ask_of_rules(ask))
        outs, vals = jax.tree.unflatten(self.tree, found)
        if any(i not in vals and i[0] != "rule" for i in ids):
            late = jax.tree.leaves((consts, list(operands)))
            found, _ = form_of(self.late).call(more[n:], late, Ask())
            vals |= jax.tree.unflatten(self.late_tree, found)
        vals |= {("rule", *i): v for i, v in by_rules.items()}
        return outs, {i: vals[i] for i in ids}


def ask_of_rules(ask):
    return Ask(ask.under("rule").want)


def _trace(fun, *args):
    closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
    return closed, jax.tree.structure(shape)
