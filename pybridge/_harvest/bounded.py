"""Named values in bounded loops: one more row of the loop's results, or one more carry."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pybridge._loops import primitive as loops

from .forms import Ask, closed, form_of, group, marks, rule


@rule(loops.loop_p)
class BoundedForm:
    """The loop behind bounded_while_loop and its kin.

    A named value is stacked, one row a step up to the stop, then zeros; ``.taken`` marks the rows and
    ``.count`` is the number of steps. Sown with mode="last", or in a loop without a bound, only that of
    the last step is kept, in the carry.
    """

    def __init__(self, eqn, inner):
        p = self.params = eqn.params
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
        if s.id in self.last:
            return dataclasses.replace(s, steps=steps, blind="only its last value is kept")
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
        count, outs, vals = self._run(invals, ask, length)
        for i in marked:
            mark = next(m for m in self.marks if m.id == i)
            whole = count > 0 if mark.shape == () else jnp.arange(self.bound) < count
            vals[i] = count if mark.role == "count" else whole
        return [*([count] if self.params["cond"] is not None else []), *outs], vals

    def _run(self, invals, ask, length):
        """(count, carry and rows, named values); ``length`` is None where the loop knows it."""
        p, spots = self.params, {s.id: s for s in self.form.spots}
        control, consts, carry, xs = loops.parts(invals, p["counts"])
        cond = p["cond"]
        if length is not None:
            control, cond = [length], None
        # Named values of the last step are further carries, all others further rows of results.
        # Perturbations are further rows of input. Planted rows are constants that a counter in the
        # carry reads, since they may decide where the loop stops.
        last, rows = sorted(ask.want & self.last), sorted(ask.want - self.last)
        eps, plants = sorted(ask.eps), sorted(ask.plants)
        start = [jnp.zeros(spots[i].shape, spots[i].dtype) for i in last]
        start += [jnp.int32(0)] if plants else []
        n, m, r = len(consts), len(carry), len(xs)

        def step(*args):
            args = iter(args)
            take = lambda k: [next(args) for _ in range(k)]
            c, held, s, extra, x, e = map(take, (n, len(plants), m, len(start), r, len(eps)))
            planted = {
                i: v if i in self.last else lax.dynamic_index_in_dim(v, extra[-1], keepdims=False)
                for i, v in zip(plants, held)
            }
            inside = ask.with_arrays(dict(zip(eps, e)), planted)
            outs, vals = self.form.call(self.consts, [*c, *s, *x], inside)
            after = [extra[-1] + 1] if plants else []
            return [
                *outs[:m],
                *(vals[i] for i in last),
                *after,
                *outs[m:],
                *(vals[i] for i in rows),
            ]

        consts, carry = [*consts, *(ask.plants[i] for i in plants)], [*carry, *start]
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
