"""Named values in bounded loops: one more row of the loop's results, or one more carry."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pybridge._loops import primitive as loops
from pybridge._loops import tracing

from .forms import Ask, closed, form_of, group, marks, rule
from .primitive import HarvestError, active, show, sows_in

# A value that is sown and not used is dead code of the loop, and is reaped all the same.
tracing.keeps_all = lambda closed: active.value is not None and bool(sows_in(closed.jaxpr))


@rule(loops.loop_p)
class BoundedForm:
    """The loop behind bounded_while_loop and its kin.

    A named value is stacked, one row a step up to the stop, then zeros; ``.taken`` marks the rows and
    ``.count`` is the number of steps. Sown with mode="last", or in a loop without a bound, only that of
    the last step is kept, in the carry, and a cotangent is that of the last value.
    """

    def __init__(self, eqn, inner):
        p = self.params = eqn.params
        in_cond = sows_in(p["cond"].jaxpr) if p["cond"] is not None else ()
        if in_cond:
            raise HarvestError(
                f"{show(in_cond[0]['path'])} is sown at {in_cond[0]['where']} in the condition of a bounded "
                f"loop, where its value leaves with no step. Sow it in the body, or use lax.while_loop."
            )
        jaxpr, self.consts = closed(p["step"])
        self.form = form_of(jaxpr, inner)
        self.bound = p["bound"]
        self.last = {s.id for s in self.form.spots if self.bound is None or s.mode == "last"}
        spots = [self._spot(s) for s in self.form.spots]
        self.marks = tuple(
            dataclasses.replace(m, shape=(self.bound,))
            if m.role == "taken" and not self._only_last(m)
            else m
            for m in marks(spots, {"taken": bool, "count": jnp.int32})
        )
        self.spots = (*spots, *self.marks)

    def _only_last(self, mark):
        return any(group(i) == group(mark.id) for i in self.last)

    def _spot(self, s):
        steps = (*s.steps, ("bounded_loop", ""))
        if self.bound is None:
            no_reverse = "a loop without max_steps has no reverse mode"
            return dataclasses.replace(s, steps=steps, blind=no_reverse)
        if s.id in self.last:
            return dataclasses.replace(s, steps=steps)
        return dataclasses.replace(s, steps=steps, shape=(self.bound, *s.shape))

    def call(self, invals, ask):
        marked = {m.id for m in self.marks} & ask.want
        ask = dataclasses.replace(ask, want=ask.want - marked)
        length = None
        if ask.eps and self.params["cond"] is not None:
            # Rows for a loop that finds its own length do not go through vmap. So find the length
            # first, by a loop that nothing differentiates, and then give it.
            still = lambda tree: jax.tree.map(lax.stop_gradient, tree)
            length, _, _ = self._run(still(invals), Ask(plants=still(ask.plants)), None)
        if ask.eps:
            steps = invals[0] if length is None else length
            ask = ask.with_arrays(self._within(steps, ask.eps), ask.plants)
        count, outs, vals = self._run(invals, ask, length)
        vals = self._within(count, vals)
        for i in marked:
            mark = next(m for m in self.marks if m.id == i)
            whole = count > 0 if mark.shape == () else jnp.arange(self.bound) < count
            vals[i] = count if mark.role == "count" else whole
        return [*([count] if self.params["cond"] is not None else []), *outs], vals

    def _within(self, count, arrays):
        """Zeros in the rows past the stop: of lanes under vmap the longest one's steps fill them."""

        def cut(a):
            rows = jnp.arange(self.bound).reshape(-1, *[1] * (a.ndim - 1))
            return jnp.where(rows < count, a, jnp.zeros_like(a))

        return {i: a if i in self.last else cut(a) for i, a in arrays.items()}

    def _run(self, invals, ask, length):
        """(count, carry and rows, named values); ``length`` is None where the loop knows it."""
        p, spots = self.params, {s.id: s for s in self.form.spots}
        control, consts, carry, xs = loops.parts(invals, p["counts"])
        cond = p["cond"]
        if length is not None:
            control, cond = [length], None
        # Named values of the last step are further carries, all others further rows of results.
        # Perturbations are further rows of input; that of a last value is a constant, added in the
        # last step. Planted rows are constants, too, since they may decide where the loop stops. A
        # counter in the carry tells both the step.
        last, rows = sorted(ask.want & self.last), sorted(ask.want - self.last)
        eps, plants = sorted(ask.eps.keys() - self.last), sorted(ask.plants)
        at_last = sorted(ask.eps.keys() & self.last)
        held = [*(ask.plants[i] for i in plants), *(ask.eps[i] for i in at_last)]
        held += [control[0]] if at_last else []  # by now the length
        start = [jnp.zeros(spots[i].shape, spots[i].dtype) for i in last]
        # A transposed loop runs from the last row: what counts as last is what it meets first.
        only_first = last and p["reverse"]
        counts = bool(held or only_first)
        start += [jnp.int32(0)] if counts else []
        n, m, r = len(consts), len(carry), len(xs)

        def step(*args):
            args = iter(args)
            take = lambda k: [next(args) for _ in range(k)]
            c, h, s, extra, x, e = map(take, (n, len(held), m, len(start), r, len(eps)))
            planted = {
                i: v if i in self.last else lax.dynamic_index_in_dim(v, extra[-1], keepdims=False)
                for i, v in zip(plants, h)
            }
            poked = dict(zip(eps, e))
            for i, v in zip(at_last, h[len(plants) :]):
                poked[i] = jnp.where(extra[-1] == h[-1] - 1, v, jnp.zeros_like(v))
            inside = ask.with_arrays(poked, planted)
            outs, vals = self.form.call(self.consts, [*c, *s, *x], inside)
            after = [extra[-1] + 1] if counts else []
            if only_first:
                first = extra[-1] == 0
                vals |= {i: jnp.where(first, vals[i], old) for i, old in zip(last, extra)}
            return [
                *outs[:m],
                *(vals[i] for i in last),
                *after,
                *outs[m:],
                *(vals[i] for i in rows),
            ]

        consts, carry = [*consts, *held], [*carry, *start]
        xs = [*xs, *(ask.eps[i] for i in eps)]
        drop_row = lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
        avals = [*map(_aval, [*consts, *carry]), *(drop_row(_aval(x)) for x in xs)]
        if cond is not None and start:
            run, k = p["cond"], len(control) + m
            test = lambda *a: jax.core.eval_jaxpr(run.jaxpr, run.consts, *a[:k])
            cond = jax.make_jaxpr(test)(*map(_aval, [*control, *carry]))
        outs = loops.bind(
            control,
            consts,
            carry,
            xs,
            cond=cond,
            step=jax.make_jaxpr(step)(*avals),
            bound=self.bound,
            reverse=p["reverse"],
            checkpoints=p["checkpoints"],
        )
        count, outs = (control[0], outs) if cond is None else (outs[0], outs[1:])
        k = m + len(start)
        ys, found = outs[k : len(outs) - len(rows)], outs[len(outs) - len(rows) :]
        return count, [*outs[:m], *ys], dict(zip(last, outs[m:])) | dict(zip(rows, found))


def _aval(x):
    a = jax.typeof(x)
    return jax.ShapeDtypeStruct(a.shape, a.dtype)
