"""The levels: transformations that label what they make of a named value.

A jaxpr made by jax.grad holds primal and cotangent only, a batching rule never sees out_axes, and a sow
whose result is unused is dead code under grad of jit. So under a session ``pybridge.harvest.grad`` and
its kin leave *one equation* in the program, the transformation and the jaxpr it acts on, and reap
transforms that jaxpr's functional form instead, with the named values as outputs from the start. Writing
F(x, eps) -> (y, v) for the form inside:

    jvp    of F along (dx, 0):   v is .value, dv is .tangent
    vjp    of F at cotangent 1:  v is .value, the cotangent of eps is .cotangent;
                                 the Jacobian of v in x is .jacobian, computed only when wanted
    vmap   of F:                 v laid out by out_axes, eps taken in by the same axis

Each is a functional form again, whose own perturbations are: eps itself for a value; the tangent of eps
for a tangent; the cotangent handed to output v for a cotangent (the transpose of a read is a write). So
levels nest to any order by JAX's own derivative of F and nothing else.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.extend.core import primitives
from jax.interpreters import partial_eval as pe

from .equation import bind_level
from .forms import Ask
from .primitive import HarvestError, show, sows_in, subjaxprs


def holds(jaxpr, prims):
    """Whether any of these primitives is in a jaxpr, however deep."""
    return any(
        e.primitive in prims or any(holds(j, prims) for j in subjaxprs(e.params))
        for e in jaxpr.eqns
    )


def living(jaxpr, n_out):
    """The uids of the sows that the first n_out outputs depend on."""
    used = [True] * n_out + [False] * (len(jaxpr.outvars) - n_out)
    kept, _ = pe.dce_jaxpr(jaxpr, used, instantiate=True)
    return {p["uid"] for p in sows_in(kept)}


# ---- differentiating levels ----


class Differentiation:
    """Planting in the function that a level differentiates: the same level of the planted function."""

    differentiates = True

    def planted(self, form, run, operands, ask):
        p = ask.under("p")
        n = len(form.jaxpr.invars)
        avals = [jax.typeof(x) for x in operands[:n]]
        fn = lambda *xs: run(xs, Ask(plants=p.plants, keep=True))[0]
        return bind_level(self, fn, avals, operands)

    def letter(self, letter, spots, shape=lambda s: s.shape, **changes):
        step = (self.label, letter, self)
        return tuple(s.under(letter, step, shape=shape(s), **changes) for s in spots)


@dataclasses.dataclass(frozen=True)
class Jvp(Differentiation):
    """jvp. Operands: the primals, then one tangent for each primal in ``moving``."""

    n: int
    moving: tuple
    n_out: int  # outputs to differentiate; aux follows
    label: str = "jvp"

    def push(self, fn, operands, eps, deps):
        """jax.jvp of fn(args, eps) -> (outs, aux)."""
        args = operands[: self.n]

        def run(moving, eps):
            full = list(args)
            for i, x in zip(self.moving, moving):
                full[i] = x
            return fn(full, eps)

        primals = ([args[i] for i in self.moving], eps)
        return jax.jvp(run, primals, (list(operands[self.n :]), deps), has_aux=True)

    def plain(self, fn):
        def parts(args, _):
            outs = fn(*args)
            return outs[: self.n_out], outs[self.n_out :]

        def run(*operands):
            out, dout, aux = self.push(parts, operands, {}, {})
            return [*out, *inexact(out, dout), *aux]

        return run

    def spots(self, form, in_avals, out_avals):
        moves = [s for s in form.spots if s.moves]
        return (*self.letter("p", form.spots), *self.letter("t", moves))

    def call(self, form, fn, operands, ask):
        p, t = ask.under("p"), ask.under("t")
        at = p.eps.keys() | t.eps.keys()
        zeros = {s.id: jnp.zeros(s.shape, s.dtype) for s in form.spots if s.id in at}

        def parts(args, eps):
            outs, vals = fn(args, Ask(p.want | t.want, eps, p.plants))
            live = {i: vals[i] for i in t.want}
            return (outs[: self.n_out], live), (outs[self.n_out :], vals)

        (out, _), (dout, dlive), (aux, vals) = self.push(
            parts, operands, zeros | p.eps, zeros | t.eps
        )
        got = {("p", *i): vals[i] for i in p.want} | {("t", *i): dlive[i] for i in t.want}
        return [*out, *inexact(out, dout), *aux], got


def inexact(out, dout):
    """The tangents of the inexact outputs: an integer's is float0, which no equation carries."""
    return [d for o, d in zip(out, dout) if jnp.issubdtype(jnp.result_type(o), jnp.inexact)]


@dataclasses.dataclass(frozen=True)
class Reverse(Differentiation):
    """grad, value_and_grad, jacrev. Operands: the differentiated arguments.

    The equation's outputs: the outputs, the derivatives (output-major), aux.
    """

    label: str
    n_out: int
    scalar: bool  # one scalar output, and no axis for it
    holomorphic: bool
    arg_tree: object  # of what is differentiated; ``moving`` are its inexact leaves
    moving: tuple
    arg_shapes: tuple  # of those
    out_tree: object

    def plain(self, fn):
        def parts(*args):
            outs = fn(*args)
            out, aux = outs[: self.n_out], outs[self.n_out :]
            return (out[0] if self.scalar else out), (out, aux)

        def run(*args):
            argnums = tuple(range(len(args)))
            by = jax.grad if self.scalar else jax.jacrev
            d, (out, aux) = by(parts, argnums, has_aux=True, holomorphic=self.holomorphic)(*args)
            return [*out, *(d if self.scalar else [g for row in d for g in row]), *aux]

        return run

    def spots(self, form, in_avals, out_avals):
        alive = living(form.jaxpr, self.n_out)
        spots = [dataclasses.replace(s, dead=s.dead or s.uid not in alive) for s in form.spots]
        moves = [s for s in spots if s.moves]
        read = [s for s in moves if not s.blind and not s.dead]
        cts = [
            self.letter(f"c{o}", read, lambda s, a=a: (*a.shape, *s.shape))
            for o, a in enumerate(out_avals[: self.n_out])
        ]
        return (*self.letter("p", spots), *sum(cts, ()), *jacobians(self, moves, in_avals))

    def call(self, form, fn, operands, ask):
        p = ask.under("p")
        cts = [ask.under(f"c{o}") for o in range(self.n_out)]
        read = frozenset().union(*(c.want for c in cts))
        poked = frozenset().union(*(c.eps for c in cts))
        spots = {s.id: s for s in form.spots}
        zeros = {i: jnp.zeros(spots[i].shape, spots[i].dtype) for i in read}

        def parts(args, eps):
            outs, vals = fn(args, Ask(p.want | poked, eps, p.plants))
            return (outs[: self.n_out], {i: vals[i] for i in poked}), (outs, vals)

        _, pull, (outs, vals) = jax.vjp(parts, list(operands), zeros | p.eps, has_aux=True)
        out, aux = [jnp.asarray(y) for y in outs[: self.n_out]], outs[self.n_out :]
        got = {("p", *i): vals[i] for i in p.want}
        derivatives = []
        for o, (y, c) in enumerate(zip(out, cts)):
            rest = [jnp.zeros_like(z) for z in out]
            poke = {i: c.eps.get(i) for i in poked}
            poke = {
                i: jnp.zeros((*y.shape, *spots[i].shape), spots[i].dtype) if e is None else e
                for i, e in poke.items()
            }

            def row(ct, poke, o=o, rest=rest):
                return pull(([*rest[:o], ct, *rest[o + 1 :]], poke))

            if self.scalar:
                d, de = row(jnp.ones_like(y), poke)
            else:
                size = math.prod(y.shape)
                flat = lambda e: e.reshape(size, *e.shape[y.ndim :])  # noqa: B023
                basis = jnp.eye(size, dtype=y.dtype).reshape(size, *y.shape)
                d, de = jax.tree.map(
                    lambda g: g.reshape(*y.shape, *g.shape[1:]),  # noqa: B023
                    jax.vmap(row)(basis, jax.tree.map(flat, poke)),
                )
            derivatives.extend(d)
            got |= {(f"c{o}", *i): de[i] for i in c.want}
        got |= jacobians_of(form, fn, operands, ask, self.holomorphic)
        return [*out, *derivatives, *aux], got


def jacobians(level, moves, in_avals):
    """The spots of dv/dx, one for each argument leaf."""
    return sum(
        (
            level.letter(
                f"j{k}", moves, lambda s, a=a: (*s.shape, *a.shape), blind="it is a Jacobian"
            )
            for k, a in enumerate(in_avals)
        ),
        (),
    )


def jacobians_of(form, fn, operands, ask, holomorphic):
    """dv/dx for the Jacobians wanted, by the mode that has fewer passes to make."""
    inside = ask.under("p")
    wanted = {k: w for k in range(len(operands)) if (w := ask.under(f"j{k}").want)}
    if not wanted:
        return {}
    ids = frozenset().union(*wanted.values())

    def values(*args):
        return fn(args, Ask(ids, inside.eps, inside.plants))[1]

    spots = {s.id: s for s in form.spots}
    rows = sum(math.prod(spots[i].shape) for i in ids)
    columns = sum(math.prod(jnp.shape(operands[k])) for k in wanted)
    if any(spots[i].blind for i in ids):
        forward = True
    elif holds(form.jaxpr, {getattr(primitives, "custom_vjp_call_p", None)}):
        forward = False
    else:
        forward = columns <= rows
    if forward and columns == 1 and not holomorphic:
        (k, ids), *_ = wanted.items()
        x = operands[k]
        along = lambda x: values(*operands[:k], x, *operands[k + 1 :])
        d = jax.jvp(along, (x,), (jnp.ones_like(x),))[1]
        return {(f"j{k}", *i): d[i].reshape(*jnp.shape(d[i]), *jnp.shape(x)) for i in ids}
    by = jax.jacfwd if forward else jax.jacrev
    d = by(values, tuple(wanted), holomorphic=holomorphic)(*operands)
    return {(f"j{k}", *i): d[i][n] for n, k in enumerate(wanted) for i in wanted[k]}


@dataclasses.dataclass(frozen=True)
class Forward(Differentiation):
    """jacfwd. Operands and outputs as in Reverse; pushing the basis makes every Jacobian."""

    label: str
    n_out: int
    holomorphic: bool
    arg_tree: object
    moving: tuple
    arg_shapes: tuple
    out_tree: object

    def plain(self, fn):
        def parts(*args):
            outs = fn(*args)
            return outs[: self.n_out], (outs[: self.n_out], outs[self.n_out :])

        def run(*args):
            d, (out, aux) = self.push(parts, args)
            return [*out, *(g for row in d for g in row), *aux]

        return run

    def push(self, parts, args):
        argnums = tuple(range(len(args)))
        return jax.jacfwd(parts, argnums, has_aux=True, holomorphic=self.holomorphic)(*args)

    def spots(self, form, in_avals, out_avals):
        moves = [s for s in form.spots if s.moves]
        return (*self.letter("p", form.spots), *jacobians(self, moves, in_avals))

    def call(self, form, fn, operands, ask):
        p = ask.under("p")
        wanted = {k: w for k in range(len(operands)) if (w := ask.under(f"j{k}").want)}
        ids = frozenset().union(*wanted.values())

        def parts(*args):
            outs, vals = fn(args, Ask(p.want | ids, p.eps, p.plants))
            return (outs[: self.n_out], {i: vals[i] for i in ids}), (outs, vals)

        (d, dvals), (outs, vals) = self.push(parts, operands)
        got = {("p", *i): vals[i] for i in p.want}
        got |= {(f"j{k}", *i): dvals[i][k] for k in wanted for i in wanted[k]}
        return [*outs[: self.n_out], *(g for row in d for g in row), *outs[self.n_out :]], got


# ---- the mapping level ----


@dataclasses.dataclass(frozen=True)
class Vmap:
    """vmap, with an axis for the named values. Operands: the mapped leaves only."""

    in_axes: tuple
    out_axes: tuple
    sow_axis: int
    size: int
    names: tuple  # of jax.vmap's other options, as pairs
    label: str = "vmap"

    differentiates = False

    def axis(self, spot):
        """The batch axis in the mapped value of a spot inside."""
        if spot.role != "value":
            return 0
        rank = len(spot.shape) + 1
        if not -rank <= self.sow_axis < rank:
            raise HarvestError(
                f"vmap: the named values are laid out by out_axes = {self.sow_axis}, but "
                f"{show(spot.name)} (sown at {spot.where}) has shape {spot.shape} inside, so accepted is "
                f"{-rank} to {rank - 1}. Give pybridge.harvest.vmap(..., sow_axes=...) an axis of its own."
            )
        return self.sow_axis % rank

    def map(self, fn, **axes):
        return jax.vmap(fn, axis_size=self.size, **axes, **dict(self.names))

    def plain(self, fn):
        return self.map(lambda *xs: fn(*xs), in_axes=self.in_axes, out_axes=list(self.out_axes))

    def spots(self, form, in_avals, out_avals):
        out = []
        for s in form.spots:
            a = self.axis(s)
            shape = (*s.shape[:a], self.size, *s.shape[a:])
            out.append(dataclasses.replace(s, shape=shape, steps=(*s.steps, (self.label, ""))))
        return tuple(out)

    def axes(self, form, ids):
        return {s.id: self.axis(s) for s in form.spots if s.id in ids}

    def call(self, form, fn, operands, ask):
        def run(args, eps, plants):
            return fn(args, ask.with_arrays(eps, plants))

        of = lambda ids: self.axes(form, ids)
        return self.map(
            run,
            in_axes=(list(self.in_axes), of(ask.eps), of(ask.plants)),
            out_axes=(list(self.out_axes), of(ask.want)),
        )(list(operands), *ask.arrays())

    def planted(self, form, run, operands, ask):
        n, plants = len(operands), sorted(ask.plants)
        of = self.axes(form, ask.plants)

        def fn(*xs):
            inside = Ask(plants=dict(zip(plants, xs[n:])), keep=True)
            return run(xs[:n], inside)[0]

        level = dataclasses.replace(self, in_axes=(*self.in_axes, *(of[i] for i in plants)))
        spots = {s.id: s for s in form.spots}
        avals = [unmapped(x, a) for x, a in zip(operands, self.in_axes)]
        avals += [jax.ShapeDtypeStruct(spots[i].shape, spots[i].dtype) for i in plants]
        name = dict(self.names)["axis_name"]
        env = None if name is None else [(name, self.size)]
        return bind_level(level, fn, avals, [*operands, *(ask.plants[i] for i in plants)], env)


def unmapped(x, axis):
    """The abstract value of one slice of x."""
    aval = jax.typeof(x)
    axis %= aval.ndim
    shape = (*aval.shape[:axis], *aval.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)
