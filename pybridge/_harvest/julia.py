"""Named values of Julia functions: `NestedGradients.sow` in Julia code, reaped under the same names.

A call into Julia is a form (pybridge/jets.py), and what is sown in it is hidden from JAX. Julia has the
functional form itself (julia/src/harvested.jl): the function of (arguments, eps) to (result, values). It
is a Julia function like any other, so a call of it in the place of the form gives the values and, through
the same primitive, every derivative of them.
"""

import dataclasses
import weakref

import jax
import jax.numpy as jnp

from pybridge import jets

from .forms import Spot, prefixed, rule, run_eqn
from .primitive import HIDDEN, HarvestError, active, new_uid, scopes, show, sown_in_eqn, sows_in

jets.names_under = lambda: () if active.value is None else scopes.value


@dataclasses.dataclass
class Sown:
    """What a Julia function sows, for arguments of given shapes."""

    target: object  # the harvested function
    quiet: object  # the function itself, known to sow nothing: for the program that reap runs
    names: tuple
    uids: dict
    structs: dict  # name -> pytree of shapes and dtypes
    influential: dict  # name -> whether the result depends on it


_known = weakref.WeakKeyDictionary()  # jets.Function -> Sown, or None
_harvested = weakref.WeakKeyDictionary()  # target -> its harvested function


def is_julia(function):
    return function.engine.name == "julia"


def sown_by(function):
    """The Sown of a function, or None where it sows nothing."""
    if function not in _known:
        harvested = function.target in set(_harvested.values())
        _known[function] = None if harvested else _ask(function)
    return _known[function]


def _ask(function):
    # Here, not above: reap alone imports no Julia.
    from pybridge.engines.julia import JuliaFunction
    from pybridge.julia import structure
    from pybridge.julia.errors import JuliaError
    from pybridge.julia.runtime import runtime

    target = function.target
    if target not in _harvested:
        like = None if target.like is None else lambda: (*target.like(), None)
        _harvested[target] = JuliaFunction(
            f"NestedGradients.Harvested(Base.get_extension(NestedGradients, "
            f":NestedGradientsPythonCallExt).function_of({target.id}).call)",
            using=("NestedGradients",),
            name=target.__name__,
            axes=target.axes,
            like=like,
        )
    harvested = _harvested[target]
    args = jax.tree.unflatten(function.in_tree, function.in_avals)
    leaves, tree = jax.tree.flatten((*args, None))
    try:
        out_tree, out_avals = harvested.engine.trace(harvested, tree, tuple(leaves))
    except JuliaError:
        if target.result is None or "sow" in str(target.code):
            raise
        return None  # not to be run on made-up values, which is what its result= is for
    _, values = jax.tree.unflatten(out_tree, out_avals)
    if not values:
        return None
    names = tuple(values)
    eps = {n: v for n, v in values.items() if _moves(v)}
    alive = dict.fromkeys(names, False)
    if eps:
        examples = [
            f"example({structure.element(a.dtype)}, {structure.dims(a.shape, target.axes)})"
            for a in jax.tree.leaves((*args, eps))
        ]
        skeleton = structure.skeleton(
            jax.tree.structure((*args, eps)), harvested.like and harvested.like()
        )
        question = (
            f"let z = NestedGradients.fill({skeleton}, {structure.tuple_of(examples)}); "
            f"NestedGradients.influential(function_of({harvested.id}).call, Base.front(z), last(z)) end"
        )
        answer = runtime().ask(f"join({question}, ' ')", target.__name__)
        alive |= dict(zip(sorted(eps), (word == "true" for word in answer.split())))
    uids = {n: new_uid() for n in names}
    quiet = dataclasses.replace(function, keepalive=[], compiled={})
    _known[quiet] = None
    return Sown(harvested, quiet, names, uids, values, alive)


def _moves(struct):
    return all(jnp.issubdtype(s.dtype, jnp.inexact) for s in jax.tree.leaves(struct))


def _params(eqn_params):
    """What is sown in a form, as the parameters of sow equations are."""
    function = eqn_params["function"]
    if not is_julia(function):
        return _in_python(function)
    sown = sown_by(function)
    if sown is None:
        return ()
    return tuple(
        {
            "path": (*function.scope, n),
            "uid": sown.uids[n],
            "where": f"the Julia function {function!r}",
        }
        for n in sown.names
    )


def _in_python(function):
    """What a Python function behind a form sows: reason to refuse it, the form hides it for nothing."""
    if function not in _known:
        args = jax.tree.unflatten(function.in_tree, function.in_avals)
        _known[function] = sows_in(jax.make_jaxpr(function.target.f)(*args).jaxpr)
    return _known[function]


HIDDEN[jets.form_p] = _params


@rule(jets.form_p)
class JuliaForm:
    """A form of a Julia function that sows.

    The call itself (slot 0 open, no direction) is a call of the harvested function. A derivative that
    was bound as such, as nested_grad binds it, is made again from that call by jax.vjp and jax.jvp.
    """

    def __init__(self, eqn, inner):
        del inner
        p = self.params = eqn.params
        self.eqn, self.function = eqn, p["function"]
        if not is_julia(self.function):
            name, where = (sown_in_eqn(eqn)[0][k] for k in ("path", "where"))
            raise HarvestError(
                f"{show(name)} is sown at {where} inside a form of the Python function {self.function!r}. Call "
                f"the function itself, or give it to pybridge.nested_grad."
            )
        self.sown = sown_by(self.function)
        self.n = len(p["sflags"]) - 1
        self.base = {s.id: s for s in self._spots()}
        spots = tuple(self.base.values())
        for label, letter in self._levels():
            moving = [s for s in spots if s.moves and (letter == "t" or not (s.blind or s.dead))]
            spots = (
                *(s.under("p", (label, "p")) for s in spots),
                *(s.under(letter, (label, letter)) for s in moving),
            )
        self.spots = spots

        self.point = (self.function, tuple(map(id, eqn.invars[: len(p["zflags"])])))

    @staticmethod
    def share(forms):
        """jax.grad leaves the call and its cotangent, two forms of one call: the second has it all."""
        forms = sorted(forms, key=lambda f: (f.n, f.params["open"]))
        orders = [(f.n, f.params["open"]) for f in forms]
        if orders != [(0, 0), (1, 1)]:
            raise HarvestError(
                f"{show(forms[0].spots[0].name)} is sown in the Julia function {forms[0].function!r}, under "
                f"transformations of jax's that leave {len(forms)} derivatives of one call and not what "
                f"they belong to. Use those of pybridge.harvest (grad, jvp, vmap)."
            )
        forms[0].spots = ()

    def _levels(self):
        reverse = self.params["open"] > 0
        return [("grad", "c")] * reverse + [("jvp", "t")] * (self.n - reverse)

    def _spots(self):
        for name in self.sown.names:
            leaves, tree = jax.tree.flatten(self.sown.structs[name])
            for i, struct in enumerate(leaves):
                yield Spot(
                    id=(f"={name}", f"{i}"),
                    name=(*self.function.scope, name),
                    uid=self.sown.uids[name],
                    leaf=i,
                    tree=tree,
                    mode="strict",
                    where=f"the Julia function {self.function!r}",
                    shape=(*self.params["sizes"], *struct.shape),
                    dtype=struct.dtype,
                    steps=(("julia", ""), *[("vmap", "")] * len(self.params["sizes"])),
                    blind="" if _moves(self.sown.structs[name]) else "it holds integers",
                    dead=not self.sown.influential[name],
                )

    def call(self, invals, ask):
        if ask.plants:
            raise HarvestError(
                f"plant: {show(next(iter(self.base.values())).name)} is sown in the Julia function {self.function!r}, and "
                f"nothing can be planted there. Pass the value to the function as an argument."
            )
        if not ask.want and not ask.eps:
            if ask.keep:
                return run_eqn(self.eqn, invals), {}
            quiet = {**self.eqn.params, "function": self.sown.quiet}
            return run_eqn(self.eqn.replace(params=quiet), invals), {}
        p = self.params
        z, slots = jets.split(invals, open=p["open"], zflags=p["zflags"], sflags=p["sflags"])
        read = any("c" in i for i in ask.want)

        def whole(z, slots, eps):
            run = self._call
            if p["open"] > 0:
                run = self._reversed(run, slots[0], read)
            for j in range(1, self.n + 1):
                if j != p["open"]:
                    run = self._along(run, slots[j])
            outs, vals = run(z, eps)
            if p["open"] == 0:
                outs = [y for y, flags in zip(outs, p["sflags"][0]) if flags is not None]
            return outs, {i: vals[i] for i in ask.want}

        for level in reversed(range(len(p["sizes"]))):
            whole = self._mapped(whole, level)
        return whole(z, slots, ask.eps)

    def _mapped(self, whole, level):
        """One level of jax.vmap: operands, results and values have its axis first, if at all."""
        p = self.params
        axis = lambda spec: [None if not (flags and flags[level]) else 0 for flags in spec]
        slots = [None if j == p["open"] else axis(spec) for j, spec in enumerate(p["sflags"])]
        every = jax.vmap(whole, in_axes=(axis(p["zflags"]), slots, 0), axis_size=p["sizes"][level])
        shared = [not flags[level] for flags in p["sflags"][p["open"]] if flags is not None]

        def run(*args):
            outs, vals = every(*args)
            return [jnp.sum(y, 0) if s else y for y, s in zip(outs, shared)], vals

        return run

    def _zeros(self):
        levels = len(self.params["sizes"])
        return {
            i: jnp.zeros(s.shape[levels:], s.dtype)
            for i, s in self.base.items()
            if s.moves and not s.blind and not s.dead
        }

    # Each of these is a function of (leaves of the arguments, eps) to (result leaves, values), all by id.

    def _call(self, z, eps):
        args = jax.tree.unflatten(self.function.in_tree, z)
        given = None
        if eps:
            eps = self._zeros() | eps
            given = {
                name: jax.tree.unflatten(
                    jax.tree.structure(struct),
                    [eps[f"={name}", f"{i}"] for i in range(len(jax.tree.leaves(struct)))],
                )
                for name, struct in self.sown.structs.items()
                if (f"={name}", "0") in eps
            }
        out, values = jets.call(self.function.engine, self.sown.target, *args, given)
        vals = {
            (f"={name}", f"{i}"): v
            for name, value in values.items()
            for i, v in enumerate(jax.tree.leaves(value))
        }
        return jax.tree.leaves(out), vals

    def _reversed(self, inner, covector, read):
        """The cotangent of the arguments, as jets' slot ``open`` is, and of the values."""
        wanted = [
            n
            for n, flags in enumerate(self.params["sflags"][self.params["open"]])
            if flags is not None
        ]

        def run(z, eps):
            pokes = cut("c", eps)
            read_eps = (self._zeros() if read else {}) | cut("p", eps)

            def parts(active, e):
                full = list(z)
                for n, x in zip(wanted, active):
                    full[n] = x
                outs, vals = inner(full, e)
                return (outs, {i: vals[i] for i in pokes}), (outs, vals)

            _, pull, (outs, vals) = jax.vjp(parts, [z[n] for n in wanted], read_eps, has_aux=True)
            cts = [jnp.zeros_like(y) if c is None else c for y, c in zip(outs, covector)]
            dz, de = pull((cts, pokes))
            return dz, prefixed("p", vals) | prefixed("c", de)

        return run

    def _along(self, inner, slot):
        """The derivative in the direction of one slot."""
        moving = [n for n, s in enumerate(slot) if s is not None]

        def run(z, eps):
            p, t = cut("p", eps), cut("t", eps)
            zeros = {i: jnp.zeros_like(e) for i, e in (p | t).items()}

            def parts(active, e):
                full = list(z)
                for n, x in zip(moving, active):
                    full[n] = x
                return inner(full, e)

            primals = ([z[n] for n in moving], zeros | p)
            tangents = ([slot[n] for n in moving], zeros | t)
            (_, vals), (outs, dvals) = jax.jvp(parts, primals, tangents)
            return outs, prefixed("p", vals) | prefixed("t", dvals)

        return run


def cut(letter, by_id):
    return {i[1:]: v for i, v in by_id.items() if i[0] == letter}
