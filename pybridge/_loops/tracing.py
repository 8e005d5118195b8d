"""From the user's functions to the operands and jaxprs of the primitive."""

import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import keystr, tree_flatten_with_path

from pybridge._loops import steps
from pybridge._loops.steps import invert, merge, select, split


class Traced(NamedTuple):
    """A loop ready to be bound. Leaves of the carry that the body hands on unchanged are constants
    of the loop: they cost nothing, forward or in reverse."""

    cond: ClosedJaxpr
    step: ClosedJaxpr
    control: list
    consts: list
    carry: list
    rebuild: object  # (final carry) -> the user's pytree


def trace(cond_fun, body_fun, init_val):
    """Trace a loop's functions at the types of its carry, which may first have to grow: a Python
    number that the body turns into a float32 starts as a float32."""
    leaves, restore, tree, paths = _flatten(init_val)
    while True:
        avals = [jax.typeof(x) for x in leaves]
        body = steps.trace(_flat_body(body_fun, restore, tree), avals)
        grown = [_grow(x, a, b) for x, a, b in zip(leaves, avals, body.out_avals)]
        if all(g is x for g, x in zip(grown, leaves)):
            break
        leaves = grown
    _check_carry(avals, body.out_avals, paths)
    cond = steps.trace(lambda *flat: _predicate(cond_fun(restore(flat))), avals)

    step, consts = _hoist(body)
    cond, control = _hoist(cond)
    handed_on = steps.forwarded(step)
    fixed = tuple(i == len(consts) + j for j, i in enumerate(handed_on))
    kept = select(fixed, leaves)
    n = len(consts), len(control)

    def loop_step(*args):
        consts, same, carry = split(args, n[0], len(kept))
        outs = jaxpr_as_fun(step)(*consts, *merge(fixed, same, carry))
        return select(invert(fixed), outs)

    def loop_cond(*args):
        control, same, carry = split(args, n[1], len(kept))
        return jaxpr_as_fun(cond)(*control, *merge(fixed, same, carry))

    carry = select(invert(fixed), leaves)
    typed = lambda *groups: [jax.typeof(x) for group in groups for x in group]
    cond, control = _drop_unused(
        steps.trace(loop_cond, typed(control, kept, carry)), control + kept
    )
    step, consts = _drop_unused(steps.trace(loop_step, typed(consts, kept, carry)), consts + kept)
    cond, step = _as_before(cond_fun, body_fun, cond, step)
    rebuild = lambda carry: restore(merge(fixed, kept, carry))
    return Traced(cond, step, control, consts, carry, rebuild)


_BEFORE = weakref.WeakKeyDictionary()  # body_fun -> a weak reference to cond_fun, cond, step


def _as_before(cond_fun, body_fun, cond, step):
    """The jaxprs of the last trace of these functions, if they are the same programs still: what is
    compiled is remembered by their identity. The functions are traced anew all the same, since what
    they close over may have changed."""
    try:
        other, *last = _BEFORE.get(body_fun, (None, None, None))
        _BEFORE[body_fun] = weakref.ref(cond_fun), cond, step
    except TypeError:  # a callable that cannot be hashed or referred to weakly
        return cond, step
    text = lambda closed: (str(closed), closed.in_avals)
    if other is None or other() is not cond_fun or last[0].consts or last[1].consts:
        return cond, step
    if list(map(text, last)) == list(map(text, (cond, step))):
        _BEFORE[body_fun] = other, *last
        return last
    return cond, step


def keeps_all(closed):
    """Whether dead code stays, too: harvest's own once that is imported, for named values."""
    del closed
    return False


def _drop_unused(closed, consts):
    """Without the leading inputs that nothing is computed from."""
    if closed.effects or keeps_all(closed):
        return closed, consts
    everything = (True,) * len(closed.out_avals)
    used = steps.needs(closed, everything)[: len(consts)]
    keep = tuple(used) + (True,) * (len(closed.in_avals) - len(consts))
    return steps.restrict(closed, keep, everything), select(used, consts)


def _flatten(init_val):
    """The leaves as arrays of plain dtypes, and how to put them back together.

    Typed keys travel as their data, since rows of keys cannot be filled with zeros.
    """
    paths, tree = tree_flatten_with_path(init_val)
    leaves, impls = [], []
    for path, leaf in paths:
        try:
            leaf = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"init_val{keystr(path)} is {leaf!r}, a {type(leaf).__name__}: the carry of a loop "
                "holds arrays and numbers; let cond_fun and body_fun close over anything else"
            ) from error
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        impls.append(jax.random.key_impl(leaf) if is_key else None)
        leaves.append(jax.random.key_data(leaf) if is_key else leaf)

    def restore(flat):
        wrap = lambda x, impl: x if impl is None else jax.random.wrap_key_data(x, impl=impl)
        return jax.tree.unflatten(tree, list(map(wrap, flat, impls)))

    return leaves, restore, tree, [keystr(path) for path, _ in paths]


def _flat_body(body_fun, restore, tree):
    def flat(*leaves):
        out = body_fun(restore(leaves))
        if jax.tree.structure(out) != tree:
            raise TypeError(
                f"body_fun returns {jax.tree.structure(out)} where init_val is {tree}: the carry "
                "must keep its structure"
            )
        return _flatten(out)[0]

    return flat


def _grow(x, before, after):
    """A weakly typed start, a Python number, takes the type that the body gives it."""
    if not before.weak_type:
        return x
    return jax.lax.convert_element_type(x, after.dtype)


def _check_carry(before, after, paths):
    show = lambda a: f"{a.dtype}[{','.join(map(str, a.shape))}]"
    wrong = [
        f"  init_val{path} is {show(a)}, body_fun returns {show(b)}"
        for path, a, b in zip(paths, before, after)
        if (a.shape, a.dtype) != (b.shape, b.dtype)
    ]
    if wrong:
        raise TypeError(
            "\n".join(["body_fun changes the type of the carry:", *wrong])
            + "\nThe carry must keep shapes and dtypes: convert what body_fun returns, or start "
            "from the type it returns."
        )


def _predicate(out):
    aval = jax.typeof(out) if jax.tree.structure(out) == jax.tree.structure(0) else None
    if aval is None or aval.shape != () or aval.dtype != jnp.bool_:
        given = out if aval is None else aval.str_short()
        raise TypeError(f"cond_fun must return a boolean scalar; it returns {given}")
    return (out,)


def _hoist(closed):
    """The jaxpr with the values it closes over, tracers among them, as leading inputs."""
    consts = list(closed.consts)
    fun = lambda *args: jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, args[: len(consts)]))(
        *args[len(consts) :]
    )
    return steps.trace(fun, [*map(jax.typeof, consts), *closed.in_avals]), consts
