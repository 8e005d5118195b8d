"""A function, traced once under a session, ready to answer what it is asked for.

Two passes. The first traces the function; its form (forms.py) has the named values of everything that
runs as written. Code that runs only once a level differentiates, the rules of custom_jvp and custom_vjp,
comes into being when the form itself is traced; the second pass reads the sows in that trace.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval as pe

from .equation import level_p
from .forms import Ask, form_of
from .levels import holds
from .primitive import RULE_NOTE, Call, HarvestError, active, is_array, show, subjaxprs
from .wrappers import Flat

_HELD = object()  # a constant that belonged to a trace


def is_number(x):
    return isinstance(x, (np.generic, bool, int, float, complex))


class Program:
    """``fun(*args, **kwargs)`` as a program: ``run(want)`` gives outputs and wanted values by id.

    Numbers that are Python's own stay so: ``fun`` may count with them. ``numbers`` traces them, too.
    """

    def __init__(self, fun, session, args, kwargs, has_aux=False, numbers=False):
        leaves, tree = jax.tree.flatten((args, kwargs))
        moving = [i for i, x in enumerate(leaves) if is_array(x) or (numbers and is_number(x))]
        self.operands = [leaves[i] for i in moving]
        self.flat = Flat(lambda ak: fun(*ak[0], **ak[1]), tree, leaves, moving, has_aux)
        self.session, self.call = session, Call(session)
        try:
            self._trace()
            if self.stale:
                self.call = Call(session, early=True)
                self._trace()
        except HarvestError:
            session.renew()
            raise

    def _trace(self):
        with active(self.call):
            closed = jax.make_jaxpr(self.flat)(*self.operands)
        self.jaxpr, self.consts = closed.jaxpr, list(closed.consts)
        _no_side_effects(self.jaxpr)
        self.avals = [jax.typeof(x) for x in (*self.consts, *self.operands)]
        self.form = form_of(self.jaxpr)
        self.levels, self.stale = holds(self.jaxpr, {level_p}), False
        spots = tuple(s.under("1") for s in self.form.spots)
        if self.levels:
            self.eager = frozenset(s.id for s in self.form.spots if not is_lazy(s))
            closed, form, _ = self._second(self.eager, self.consts, self.operands)
            # A traced value that is no input was closed over by a derivative rule; see equation.Early.
            self.stale = any(isinstance(c, jax.core.Tracer) for c in closed.consts)
            spots += tuple(s.under("2", note=s.note or RULE_NOTE) for s in form.spots)
        self.spots = _strongest(spots)
        _none_missing(spots, self.call.sown)
        self.call.sown.clear()  # what it holds of the traces

    def _second(self, want, consts, operands):
        def run(consts, operands):
            outs, vals = self.form.call(consts, operands, Ask(want))
            return outs, vals

        with active(self.call):
            closed, shape = jax.make_jaxpr(run, return_shape=True)(consts, operands)
        return closed, form_of(closed.jaxpr), jax.tree.structure(shape)

    def run(self, want, consts=None, operands=None):
        """([output leaves], {id: value}) with every sow consumed."""
        consts = self.consts if consts is None else consts
        operands = self.operands if operands is None else operands
        ask = Ask(frozenset(want))
        first, second = ask.under("1").want, ask.under("2").want
        if not self.levels:
            outs, vals = self.form.call(consts, operands, Ask(first))
            return outs, {("1", *k): jnp.asarray(v) for k, v in vals.items()}
        closed, form, tree = self._second(
            first | (self.eager if second else set()), consts, operands
        )
        flat, late = form.call(closed.consts, [*consts, *operands], Ask(second))
        outs, vals = jax.tree.unflatten(tree, flat)
        found = {("1", *k): vals[k] for k in first} | {("2", *k): v for k, v in late.items()}
        return outs, {k: jnp.asarray(v) for k, v in found.items()}

    def only(self, want, consts=None, operands=None):
        """The wanted values and nothing else: what they do not need is neither kept nor run."""
        consts = self.consts if consts is None else consts
        operands = self.operands if operands is None else operands
        closed, shape = jax.make_jaxpr(lambda c, o: self.run(want, c, o)[1], return_shape=True)(
            consts, operands
        )
        used = [True] * len(closed.jaxpr.outvars)
        jaxpr, used_consts, used_in = pe.dce_jaxpr_consts(closed.jaxpr, used)
        inputs = [x for x, u in zip([*consts, *operands], used_in) if u]
        kept = [c for c, u in zip(closed.consts, used_consts) if u]
        flat = jax.core.eval_jaxpr(jaxpr, kept, *inputs)
        return jax.tree.unflatten(jax.tree.structure(shape), [jnp.asarray(v) for v in flat])

    def held(self):
        """The constants that belong to a trace, which must leave it as results."""
        return [c for c in self.consts if isinstance(c, jax.core.Tracer)]

    def with_held(self, held):
        """All constants, those of the trace given anew."""
        held = iter(held)
        return [next(held) if c is _HELD else c for c in self.consts]

    def release(self):
        """Forget what belongs to the trace; the program itself may outlive it."""
        self.consts = [_HELD if isinstance(c, jax.core.Tracer) else c for c in self.consts]
        self.operands = self.flat = None

    def result(self, outs):
        outs = [
            o if getattr(o, "dtype", None) == jax.dtypes.float0 else jnp.asarray(o) for o in outs
        ]
        return jax.tree.unflatten(self.flat.out_tree, outs)


def is_lazy(spot):
    """Jacobians are computed when asked for."""
    return any(letter.startswith("j") for _, letter, *_ in spot.steps)


def _strongest(spots):
    """Without the recomputations, and without a custom function's own values where its rule sows them."""
    strong = {s.name for s in spots if not s.weak}
    return tuple(s for s in spots if not s.weak or s.name not in strong)


def _effects(jaxpr):
    """The equations that act on the world or on memory."""
    for eqn in jaxpr.eqns:
        inner = [j for j in subjaxprs(eqn.params) if j.effects]
        if inner:
            for j in inner:
                yield from _effects(j)
        elif eqn.effects and eqn.primitive.name not in ("debug_callback", "debug_print"):
            yield eqn.primitive.name, [type(e).__name__ for e in eqn.effects]


def _no_side_effects(jaxpr):
    for name, kinds in _effects(jaxpr):
        if all(k == "NamedAxisEffect" for k in kinds):
            continue
        raise HarvestError(
            f"the function has a side effect ({name}: {', '.join(kinds)}), but what reap and plant run is "
            f"a traced copy of it, possibly in part and more than once; accepted: pure functions, and "
            f"jax.debug.print. Keep {name} outside of the function, or return what it acts on."
        )


def _none_missing(spots, sown):
    """Every sow that ran in Python is in the program, or its loss is an error.

    By name and place, not one by one: JAX may trace a function more than once. Where one place may
    sow a name many times: if any of one trace is there, all of them are, or with mode="last" the last.
    """
    found, uids = {(s.name, s.where) for s in spots}, {s.uid for s in spots}
    many = [(name, trace, uid) for name, _, uid, mode, trace in sown if mode != "strict"]
    for name, where, uid, mode, trace in sown:
        partly = False
        if mode != "strict" and uid not in uids:
            there = [u for n, t, u in many if (n, t) == (name, trace) and u in uids]
            partly = there and (mode == "append" or max(there) < uid)
        if (name, where) not in found or partly:
            raise _lost(name, where)


def _lost(name, where):
    return HarvestError(
        f"{show(name)} was sown at {where}, but its value is not in the program: jax.grad or jax.linearize "
        f"of a jit, loop or checkpoint removes a named value that nothing uses, and a function that was only "
        f"traced (jax.eval_shape, a loop of no steps) runs nothing. Use pybridge.harvest.grad (value_and_grad, jacrev, "
        f"linearize) in place of jax's, and go on with the value that sow returns."
    )
