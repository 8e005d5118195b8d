"""The functional form of a program that sows.

A jaxpr with named values becomes a function F: (inputs, eps) -> (outputs, values). ``values`` are the
named values that somebody wants; ``eps`` are perturbations, each added to the named value where it is
sown. F is pure, so JAX's own transformations of it are the answer to every question about derivatives:

    d outputs / d eps          the cotangent of a named value: how the result depends on it
    jvp of values              its tangent
    jacobian of values         its Jacobian

and a transformed F is a functional form again (levels.py), to any order. Planted values enter the same
way, in place of what was sown.

One class an equation that holds jaxprs; each rebuilds it by the public function that made it (jax.jit,
lax.scan, ...), with the named values as further outputs. An equation that holds a sow and has no class
here raises: nothing is dropped.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.extend.core import primitives as prims
from jax.interpreters import ad, batching, mlir

from .lanes import refuse
from .primitive import HarvestError, batch_first, show, sow_p, sown_in_eqn


@dataclasses.dataclass(frozen=True)
class Spot:
    """One array that a form can give: a leaf of a named value, or of a derivative of one.

    ``id`` is the path of equation numbers to it, with a letter for each differentiating level.
    ``steps`` are the transformations it went through, innermost first.
    ``note`` says why it has no derivative, ``blind`` why nothing can be added or planted there.
    """

    id: tuple
    name: tuple
    uid: int
    leaf: int
    tree: object
    mode: str
    where: str
    shape: tuple
    dtype: object
    steps: tuple = ()
    role: str = "value"  # or "taken", "count": marks that go with a value
    note: str = ""
    blind: str = ""
    weak: bool = False  # a recomputation: yields to its double
    dead: bool = False  # no result depends on it

    @property
    def moves(self):
        """Whether it has derivatives."""
        return self.role == "value" and not self.note and jnp.issubdtype(self.dtype, jnp.inexact)

    @property
    def primal(self):
        """Whether it is the named value itself, not a derivative of it."""
        return all(letter in ("", "p") for _, letter, *_ in self.steps)

    def under(self, prefix, step=None, **changes):
        steps = self.steps if step is None else (*self.steps, step)
        return dataclasses.replace(self, id=(prefix, *self.id), steps=steps, **changes)


@dataclasses.dataclass
class Ask:
    """What one call of a form is asked for, all by spot id."""

    want: frozenset = frozenset()
    eps: dict = dataclasses.field(default_factory=dict)
    plants: dict = dataclasses.field(default_factory=dict)
    keep: bool | frozenset = False  # leave the sows (of these uids) in the program, for others

    def under(self, prefix):
        cut = lambda d: {k[1:]: v for k, v in d.items() if k[0] == prefix}
        want = frozenset(k[1:] for k in self.want if k[0] == prefix)
        return Ask(want, cut(self.eps), cut(self.plants), self.keep)

    def arrays(self):
        return self.eps, self.plants

    def with_arrays(self, eps, plants):
        return Ask(self.want, eps, plants, self.keep)

    @property
    def key(self):
        return self.want, frozenset(self.eps), frozenset(self.plants), self.keep


def prefixed(prefix, vals):
    return {(prefix, *k): v for k, v in vals.items()}


tap_p = Primitive("tap")
tap_p.def_impl(lambda x, _: x)
tap_p.def_abstract_eval(lambda x, _: x)


def tap(x, eps):
    """x, with the derivative of x + eps: eps is always zero, and costs nothing.

    A primitive, not a custom_jvp function: where a scan is linearized JAX drops the rules of these in
    it, and a derivative of that linearization would not see eps.
    """
    return tap_p.bind(x, eps)


def _tap_jvp(primals, tangents):
    return tap(*primals), ad.add_tangents(*tangents)


ad.primitive_jvps[tap_p] = _tap_jvp
batching.primitive_batchers[tap_p] = lambda args, dims: (tap(*batch_first(args, dims)), 0)
mlir.register_lowering(tap_p, lambda _ctx, x, _: [x])


def run_eqn(eqn, invals):
    prim = eqn.primitive
    out = prim.bind(*invals, **prim.get_bind_params(eqn.params))
    return list(out) if prim.multiple_results else [out]


# ---- a jaxpr ----

RULES = {}  # primitive -> class of its form


def rule(*names):
    """Register an equation's form under the primitives of these names, where this JAX has them."""

    def register(cls):
        for name in names:
            prim = getattr(prims, name, None) if isinstance(name, str) else name
            if prim is not None:
                RULES[prim] = cls
        return cls

    return register


CUSTOM = tuple(
    p
    for n in ("custom_jvp_call_p", "custom_vjp_call_p", "custom_vjp_call_jaxpr_p")
    if (p := getattr(prims, n, None)) is not None
)


class JaxprForm:
    """The form of a jaxpr.

    ``inner`` says that a differentiating level stands around it: there a call with a custom derivative
    rule stays as it is, see CustomForm.
    """

    def __init__(self, jaxpr, inner=False):
        self.jaxpr = jaxpr
        self.parts = {}
        for i, eqn in enumerate(jaxpr.eqns):
            if eqn.primitive is sow_p:
                self.parts[i] = SowForm(eqn)
                continue
            held = sown_in_eqn(eqn)
            if not held:
                continue
            if eqn.primitive not in RULES:
                p = held[0]
                raise HarvestError(
                    f"{show(p['path'])} is sown at {p['where']} inside {eqn.primitive.name}, which reap "
                    f"and plant do not look into, so its value would be lost; accepted: jit, scan, while_loop, "
                    f"fori_loop, cond, switch, checkpoint, custom_jvp, custom_vjp and pybridge's own. "
                    f"Return the value from the function instead, or sow it outside. If jax.grad made this "
                    f"equation of a loop, use pybridge.harvest.grad."
                )
            try:
                self.parts[i] = RULES[eqn.primitive](eqn, inner)
            except KeyError as error:
                raise HarvestError(
                    f"{show(held[0]['path'])} is sown inside {eqn.primitive.name}, which jax {jax.__version__} "
                    f"describes by other parameters than reap knows ({error} is not among "
                    f"{', '.join(eqn.params)}). Use the jax that pybridge was tested with."
                ) from error
        share_points(self.parts.values())
        spots = tuple(s.under(f"{i}") for i, form in self.parts.items() for s in form.spots)
        self.spots, self.again = recomputed(spots)

    def call(self, consts, args, ask):
        """(outputs, {id: wanted value})."""
        if self.again:
            too = lambda d: d | {j: d[i] for i, j in self.again if i in d}
            ask = ask.with_arrays(too(ask.eps), too(ask.plants))
        env = dict(zip(self.jaxpr.constvars, consts)) | dict(zip(self.jaxpr.invars, args))
        read = lambda v: v.val if hasattr(v, "val") else env[v]
        vals = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            invals = [read(v) for v in eqn.invars]
            with eqn.ctx.manager:
                if i in self.parts:
                    outs, new = self.parts[i].call(invals, ask.under(f"{i}"))
                    vals.update(prefixed(f"{i}", new))
                else:
                    outs = run_eqn(eqn, invals)
            env.update(zip(eqn.outvars, outs))
        return [read(v) for v in self.jaxpr.outvars], vals


def recomputed(spots):
    """The spots, and pairs of a value's id and the id where jax's grad of a checkpoint computes it again:
    what is added or planted at the first is at the second, too, since both are the value."""
    first, again = {}, []
    key = lambda s: (s.uid, s.leaf, s.shape, tuple(letter for _, letter, *_ in s.steps if letter))
    values = [s for s in spots if s.role == "value" and s.primal and not s.note]
    for s in values:
        if not s.weak:
            first.setdefault(key(s), []).append(s.id)
    several = set()
    for s in values:
        if s.weak:
            ids = first.get(key(s), ())
            again += [(i, s.id) for i in ids if len(ids) == 1]
            several.update(ids if len(ids) > 1 else ())
    why = "a checkpoint computes it again, one of several of that name; use pybridge.harvest.grad"
    spots = tuple(dataclasses.replace(s, blind=why) if s.id in several else s for s in spots)
    return spots, tuple(again)


def share_points(parts):
    """Let forms that are derivatives of one call, at one point, settle which of them gives its values."""
    points = {}
    for form in parts:
        if getattr(form, "point", None) is not None:
            points.setdefault(form.point, []).append(form)
    for forms in points.values():
        if len(forms) > 1:
            forms[0].share(forms)


class SowForm:
    def __init__(self, eqn):
        self.eqn = eqn
        p = eqn.params
        self.spots = tuple(
            Spot(
                id=(f"{leaf}",),
                shape=v.aval.shape,
                dtype=v.aval.dtype,
                name=p["path"],
                **{k: p[k] for k in ("uid", "tree", "mode", "where", "steps")},
                leaf=leaf,
            )
            for leaf, v in zip(p["leaves"], eqn.invars)
        )

    def call(self, invals, ask):
        outs = [ask.plants.get(s.id, x) for s, x in zip(self.spots, invals)]
        outs = [tap(x, ask.eps[s.id]) if s.id in ask.eps else x for s, x in zip(self.spots, outs)]
        vals = {s.id: jnp.asarray(x) for s, x in zip(self.spots, outs) if s.id in ask.want}
        if ask.keep is True or (ask.keep and self.spots[0].uid in ask.keep):
            outs = sow_p.bind(*outs, **self.eqn.params)
        return outs, vals


# ---- jit, checkpoint and calls: the same inputs, more outputs ----


@functools.lru_cache(maxsize=256)
def form_of(jaxpr, inner=False):
    return JaxprForm(jaxpr, inner)


def closed(jaxpr):
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def labelled(label, spots, **changes):
    return tuple(dataclasses.replace(s, steps=(*s.steps, (label, "")), **changes) for s in spots)


class _Inner:
    """An equation with one jaxpr, called as it stands."""

    label = "call"

    def __init__(self, eqn, inner):
        self.eqn = eqn
        jaxpr = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
        jaxpr, self.consts = closed(jaxpr)
        self.form = form_of(jaxpr, inner)
        self.spots = labelled(self.label, self.form.spots)

    def run(self, ask):
        def run(invals, eps, plants):
            return self.form.call(self.consts, invals, ask.with_arrays(eps, plants))

        return run

    def call(self, invals, ask):
        return self.run(ask)(invals, *ask.arrays())


@rule("call_p", "closed_call_p")
class CallForm(_Inner):
    pass


@rule("jit_p")
class JitForm(_Inner):
    label = "jit"

    def call(self, invals, ask):
        return _jitted(self.form, ask.key, self.eqn.params["name"])(
            self.consts, invals, *ask.arrays()
        )


@functools.lru_cache(maxsize=256)
def _jitted(form, key, name):
    # Kept by form, so that a function called twice with the same question compiles once.
    want, _, _, keep = key

    def run(consts, invals, eps, plants):
        return form.call(consts, invals, Ask(want, eps, plants, keep))

    run.__name__ = name
    return jax.jit(run)


@rule("remat_p")
class RematForm(_Inner):
    label = "checkpoint"

    def __init__(self, eqn, inner):
        super().__init__(eqn, inner)
        if eqn.params["differentiated"]:
            # The backward pass of a checkpoint computes primal values again; the first one counts.
            self.spots = tuple(dataclasses.replace(s, weak=s.primal) for s in self.spots)

    def call(self, invals, ask):
        p = self.eqn.params
        run = jax.checkpoint(self.run(ask), prevent_cse=p["prevent_cse"], policy=p["policy"])
        return run(invals, *ask.arrays())


# ---- loops ----


def like(outs, carry):
    """The first outputs, in the carry's types: a plant may have lost or gained a weak type."""
    outs = [jnp.asarray(o) for o in outs[: len(carry)]]
    return [
        o if o.dtype == c.dtype else lax.convert_element_type(o, c.dtype)
        for o, c in zip(outs, carry)
    ]


@rule("scan_p")
class ScanForm:
    """lax.scan: the named values are stacked, one row an iteration."""

    label = "scan"

    def __init__(self, eqn, inner):
        p = self.params = eqn.params
        self.jaxpr, self.consts = closed(p["jaxpr"])
        self.form = form_of(self.jaxpr, inner)
        self.spots = tuple(
            dataclasses.replace(
                s, shape=(p["length"], *s.shape), steps=(*s.steps, (self.label, ""))
            )
            for s in self.form.spots
        )

    def call(self, invals, ask):
        p = self.params
        n, m = p["num_consts"], p["num_consts"] + p["num_carry"]
        fixed, init, xs = invals[:n], invals[n:m], invals[m:]

        def body(carry, x):
            row, eps, plants = x
            outs, vals = self.form.call(
                self.consts, [*fixed, *carry, *row], ask.with_arrays(eps, plants)
            )
            return like(outs, carry), (outs[m - n :], vals)

        init = [jnp.asarray(c) for c in init]
        more = {k: p[k] for k in ("unroll", "_split_transpose") if k in p}
        carry, (ys, vals) = lax.scan(
            body, init, (xs, *ask.arrays()), length=p["length"], reverse=p["reverse"], **more
        )
        return [*carry, *ys], vals


def group(spot_id):
    """All leaves of one sow share this id."""
    return spot_id[:-1]


def marks(spots, roles):
    """A mark of each of ``roles`` for each sow that has none from further inside."""
    have = {(group(s.id), s.role) for s in spots}
    out = {}
    for s in spots:
        for role, dtype in roles.items():
            key = (group(s.id), role)
            if s.role == "value" and key not in have and key not in out:
                out[key] = dataclasses.replace(
                    s, id=(*group(s.id), role), role=role, shape=(), dtype=jnp.dtype(dtype)
                )
    return tuple(out.values())


@rule("while_p")
class WhileForm:
    """lax.while_loop: each named value of the last iteration, and how many iterations there were.

    Sows in the condition count the last evaluation of it. Nothing can be added to a value in the loop:
    reverse mode does not exist there.
    """

    def __init__(self, eqn, inner):
        p = self.params = eqn.params
        cond, self.cond_consts = closed(p["cond_jaxpr"])
        body, self.body_consts = closed(p["body_jaxpr"])
        self.cond_form, self.body_form = form_of(cond, inner), form_of(body, inner)
        step, blind = ("while", ""), "a while_loop has no reverse mode"
        if cond.outvars[0].aval.shape:
            refuse({"jaxprs": (cond, body)}, "a while_loop of a length")
        in_cond = tuple(s.under("cond", step, blind=blind) for s in self.cond_form.spots)
        in_body = tuple(s.under("body", step, blind=blind) for s in self.body_form.spots)
        self.marks = marks(in_body, {"taken": bool, "count": jnp.int32})
        self.spots = (*in_cond, *in_body, *self.marks)

    def call(self, invals, ask):
        p = self.params
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        cond_in, body_in, init = invals[:n], invals[n:m], [jnp.asarray(c) for c in invals[m:]]
        marked = {s.id for s in self.marks} & ask.want
        ask = dataclasses.replace(ask, want=ask.want - marked)
        of_cond, of_body = ask.under("cond"), ask.under("body")

        def test(carry):
            (go,), vals = self.cond_form.call(self.cond_consts, [*cond_in, *carry], of_cond)
            return go, vals

        def step(count, carry, _):
            outs, vals = self.body_form.call(self.body_consts, [*body_in, *carry], of_body)
            return count + 1, like(outs, carry), vals

        # A value must be in the carry before the first iteration: zeros, marked by "taken".
        empty = {
            s.id: jnp.zeros(s.shape, s.dtype) for s in self.body_form.spots if s.id in of_body.want
        }
        start = (jnp.int32(0), init, empty)
        if of_cond.want:  # the condition's values leave with the carry, so test at the body's end

            def both(c):
                count, carry, vals = step(*c[2:])
                return (*test(carry), count, carry, vals)

            _, seen, count, carry, vals = lax.while_loop(
                lambda c: c[0], both, (*test(init), *start)
            )
        else:
            seen = {}
            count, carry, vals = lax.while_loop(lambda c: test(c[1])[0], lambda c: step(*c), start)
        vals = {**prefixed("cond", seen), **prefixed("body", vals)}
        return carry, vals | {i: count > 0 if i[-1] == "taken" else count for i in marked}


@rule("cond_p")
class CondForm:
    """lax.cond and lax.switch: the values of the branch that was taken; the others are zeros, and
    marked. A name that several branches sow alike is one value."""

    def __init__(self, eqn, inner):
        self.branches = [closed(b) for b in eqn.params["branches"]]
        self.forms = [form_of(j, inner) for j, _ in self.branches]
        alike = {}
        for b, form in enumerate(self.forms):
            nth = {}
            for s in form.spots:
                k = (s.name, s.leaf, s.shape, s.dtype, s.tree, s.role, s.steps, s.mode)
                nth[k] = nth.get(k, -1) + 1
                alike.setdefault((*k, nth[k]), {})[b] = s
        self.ids = {}  # spot id -> {branch: id there}
        spots = []
        for by_branch in alike.values():
            b, s = next(iter(by_branch.items()))
            spots.append(s.under(f"{b}", ("cond", "")))
            self.ids[spots[-1].id] = {b: s.id for b, s in by_branch.items()}
        partial = [s for s in spots if len(self.ids[s.id]) < len(self.forms)]
        self.marks = {
            m.id: next(self.ids[s.id] for s in partial if group(s.id) == group(m.id))
            for m in marks(partial, {"taken": bool})
        }
        self.spots = (*spots, *marks(partial, {"taken": bool}))

    def call(self, invals, ask):
        index, *ops = invals
        wanted = {s.id: s for s in self.spots if s.id in ask.want and s.id in self.ids}

        def branch(b):
            here = {k: ids[b] for k, ids in self.ids.items() if b in ids}
            cut = lambda d: {here[k]: v for k, v in d.items() if k in here}

            def run(ops, eps, plants):
                inside = Ask(
                    frozenset(here[k] for k in wanted if k in here), cut(eps), cut(plants), ask.keep
                )
                outs, vals = self.forms[b].call(self.branches[b][1], ops, inside)
                given = {
                    k: vals[here[k]] if k in here else jnp.zeros(s.shape, s.dtype)
                    for k, s in wanted.items()
                }
                return [jnp.asarray(o) for o in outs], given

            return run

        outs, vals = lax.switch(
            index, [branch(b) for b in range(len(self.forms))], ops, *ask.arrays()
        )
        b = jnp.clip(index, 0, len(self.forms) - 1)
        for i in self.marks.keys() & ask.want:
            vals[i] = functools.reduce(jnp.logical_or, [b == k for k in self.marks[i]])
        return outs, vals


# ---- custom derivative rules ----


@rule(*CUSTOM)
class CustomForm:
    """custom_jvp and custom_vjp: the call keeps its rule, and the named values come from the function
    itself, run beside it (under jit XLA merges the two).

    Inside a differentiating level the rule may run in the function's place, so there the call also
    keeps its sows: those of whatever ran remain in the program, are read in a second pass over it
    (program.py), and take precedence over the function's.
    """

    def __init__(self, eqn, inner):
        self.eqn, self.inner = eqn, inner
        jaxpr, self.consts = closed(eqn.params["call_jaxpr"])
        self.form = form_of(jaxpr, inner)
        self.label = "custom_jvp" if "jvp_jaxpr_fun" in eqn.params else "custom_vjp"
        note = (
            f"it is sown inside a {self.label} function or its rule, where only .value is defined"
        )
        self.spots = tuple(
            dataclasses.replace(s, note=note, weak=inner)
            for s in labelled(self.label, self.form.spots)
        )

    def call(self, invals, ask):
        if ask.plants:
            name = next(s.name for s in self.spots if s.id in ask.plants)
            raise HarvestError(
                f"plant: {show(name)} is sown inside a {self.label} function, whose rule a planted value "
                f"would contradict. Plant at a name outside of it."
            )
        if self.inner or ask.keep:
            vals = self.form.call(self.consts, invals, ask)[1] if ask.want else {}
            return run_eqn(self.eqn, invals), vals
        outs, vals = self.form.call(self.consts, invals, ask)
        if any(isinstance(x, jax.core.Tracer) for x in invals):  # somebody may differentiate
            quiet = lambda *xs: self.form.call(self.consts, xs, Ask())[0]
            params = {**self.eqn.params, "call_jaxpr": jax.make_jaxpr(quiet)(*invals)}
            outs = run_eqn(self.eqn.replace(params=params), invals)
        return outs, vals
