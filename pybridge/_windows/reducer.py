"""What the reducer is: traced once on scalars, checked, and recognised by what it computes.

``lax.reduce_window`` calls its computation on scalars; so does this, once for each kind of number,
and maps the result over the windows. A reducer may therefore use scalar code (``lax.cond``,
``jnp.stack([a, b]).max()``), and what it captured becomes an explicit argument with a gradient.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.tree_util import tree_flatten, tree_structure, tree_unflatten

from pybridge._windows.geometry import vary

# Primitives that are associative as reducers; the first four have rules or identities here.
_ASSOCIATIVE = ("add", "mul", "max", "min", "and", "or", "xor")


@dataclass(frozen=True, eq=False)
class Reducer:
    """A reducer on flat scalars: ``jaxpr(consts; *accumulators, *cells) -> accumulators``.

    The consts, what the computation captured, stay outside: they may be traced.

    ``name`` is that of the one primitive it consists of, or "logaddexp", or None.

    Two reducers are equal where their jaxprs are the same program, so that a function traced anew
    at every call (which sees what its closure holds now) is compiled only once.
    """

    jaxpr: core.Jaxpr
    name: str | None

    def __eq__(self, other):
        return isinstance(other, Reducer) and _same_program(self.jaxpr, other.jaxpr)

    def __hash__(self):
        return hash(tuple(eqn.primitive.name for eqn in self.jaxpr.eqns))

    @functools.cached_property
    def has_custom_rules(self):
        """Whether it calls a function with a derivative rule of its own."""
        return _calls_custom_rules(self.jaxpr)

    @property
    def associative(self):
        return self.name is not None

    def on_arrays(self, rank):
        """The reducer on arrays: ``f(consts, accumulators, cells) -> accumulators`` (lists)."""

        def scalar(consts, accumulators, cells):
            # The jaxpr has them as they were captured; they come as `widened` made them.
            own = [x.astype(v.aval.dtype) for x, v in zip(consts, self.jaxpr.constvars)]
            return core.jaxpr_as_fun(core.ClosedJaxpr(self.jaxpr, own))(*accumulators, *cells)

        for _ in range(rank):
            scalar = jax.vmap(scalar, in_axes=(None, 0, 0))
        return scalar


def _calls_custom_rules(jaxpr):
    return any(
        eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        or any(_calls_custom_rules(inner) for inner in core.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def _same_program(a, b):
    """Whether two jaxprs are equal up to the names of their variables."""
    names = {}

    def same_atom(x, y):
        if x.aval != y.aval or isinstance(x, core.Literal) != isinstance(y, core.Literal):
            return False
        if isinstance(x, core.Literal):
            return np.asarray(x.val).tobytes() == np.asarray(y.val).tobytes()
        return names.setdefault(x, y) is y

    def same_atoms(xs, ys):
        return len(xs) == len(ys) and all(same_atom(x, y) for x, y in zip(xs, ys))

    return (
        same_atoms([*a.constvars, *a.invars], [*b.constvars, *b.invars])
        and len(a.eqns) == len(b.eqns)
        and all(
            one.primitive is two.primitive
            and same_atoms(one.invars, two.invars)
            and _same_params(one.params, two.params)
            and same_atoms(one.outvars, two.outvars)
            for one, two in zip(a.eqns, b.eqns)
        )
        and same_atoms(a.outvars, b.outvars)
    )


def _same_params(a, b):
    return a.keys() == b.keys() and all(_same_param(a[k], b[k]) for k in a)


def _same_param(a, b):
    if isinstance(a, core.ClosedJaxpr) and isinstance(b, core.ClosedJaxpr):
        same_consts = len(a.consts) == len(b.consts)
        same_consts = same_consts and all(x is y for x, y in zip(a.consts, b.consts))
        return same_consts and _same_program(a.jaxpr, b.jaxpr)
    if isinstance(a, core.Jaxpr) and isinstance(b, core.Jaxpr):
        return _same_program(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same_param(x, y) for x, y in zip(a, b))
    try:
        return bool(a is b or a == b)
    except (TypeError, ValueError):  # e.g. arrays: taken as different, which costs a compilation
        return False


def trace(computation, tree, dtypes, accumulators, axes):
    """Trace ``computation`` for operands of ``dtypes``, to run on ``accumulators``.

    ``axes``: the axes of a shard_map that its arguments vary over.

    Returns a Reducer and the list of what the computation captured.

    Raises TypeError where it returns another tree, shape or dtype than it was given.
    """
    closed = _trace_as(computation, tree, dtypes, axes)
    if tuple(accumulators) != tuple(dtypes):
        try:
            closed = _trace_as(_returning(computation, accumulators), tree, accumulators, axes)
        except TypeError:
            # It takes the 16-bit type only (lax.add with a captured array of it): it rounds then.
            narrow = _returning(_taking(computation, dtypes), accumulators)
            closed = _trace_as(narrow, tree, accumulators, axes)
    if _is_logaddexp(computation, closed.jaxpr) and jnp.issubdtype(accumulators[0], jnp.floating):
        closed = jax.make_jaxpr(logaddexp)(*(_scalar(accumulators[0], axes),) * 2)
        return Reducer(closed.jaxpr, "logaddexp"), list(closed.consts)
    return Reducer(closed.jaxpr, _sole_primitive(closed.jaxpr)), list(closed.consts)


def _is_logaddexp(computation, jaxpr):
    if computation is jnp.logaddexp:
        return True
    if len(jaxpr.invars) != 2 or len(jaxpr.eqns) != 1:
        return False
    scalars = [_scalar(v.aval.dtype, v.aval.manual_axis_type.varying) for v in jaxpr.invars]
    return _same_program(jax.make_jaxpr(jnp.logaddexp)(*scalars).jaxpr, jaxpr)


def _trace_as(computation, tree, dtypes, axes):
    scalars = tree_unflatten(tree, [_scalar(d, axes) for d in dtypes])
    closed, out = jax.make_jaxpr(computation, return_shape=True)(scalars, scalars)
    if tree_structure(out) != tree:
        raise TypeError(
            f"reduce_window: computation returns the tree {tree_structure(out)}, where operand "
            f"has {tree}; return the accumulators in the operand's structure."
        )
    for got, dtype in zip(tree_flatten(out)[0], dtypes):
        if got.shape != ():
            raise TypeError(
                f"reduce_window: computation returns an array of shape {got.shape} for two "
                "scalars; return a scalar."
            )
        if got.dtype != dtype:
            raise TypeError(
                f"reduce_window: computation returns {got.dtype} for two scalars of {dtype}; "
                f"return {dtype}, e.g. with .astype({dtype})."
            )
    return closed


def _scalar(dtype, axes):
    """What a scalar of the operand is to a trace."""
    if axes:
        return vary(jnp.zeros((), dtype), axes)
    return jax.ShapeDtypeStruct((), dtype)


def _cast(tree, dtypes):
    leaves, structure = tree_flatten(tree)
    return tree_unflatten(structure, [jnp.asarray(x).astype(d) for x, d in zip(leaves, dtypes)])


def _returning(computation, dtypes):
    return lambda a, b: _cast(computation(a, b), dtypes)


def _taking(computation, dtypes):
    return lambda a, b: computation(_cast(a, dtypes), _cast(b, dtypes))


def _sole_primitive(jaxpr):
    """The name of the one associative primitive that a two-argument jaxpr applies, or None."""
    while len(jaxpr.eqns) == 1 and len(jaxpr.invars) == 2:
        (eqn,) = jaxpr.eqns
        swapped = list(eqn.invars) == list(reversed(jaxpr.invars))
        if list(eqn.outvars) != list(jaxpr.outvars):
            return None
        if list(eqn.invars) != list(jaxpr.invars) and not swapped:
            return None
        if eqn.primitive.name in _ASSOCIATIVE:
            return eqn.primitive.name
        inner = eqn.params.get("jaxpr")  # a jitted function such as jnp.maximum
        if eqn.primitive.name not in ("jit", "pjit") or inner is None or swapped or inner.consts:
            return None
        jaxpr = inner.jaxpr
    return None


def logaddexp(a, b):
    """log(exp(a) + exp(b)) of real numbers, with a finite derivative everywhere.

    ``jnp.logaddexp`` has the derivative NaN where both are -inf, which in a longer chain turns the
    derivative of every later, finite sum into NaN too, and (1, 1) at (inf, 0). Here the first of
    equal infinities has it. No custom rule: JAX drops those inside a scan at second order.
    """
    greater, less = jnp.where(a >= b, a, b), jnp.where(a >= b, b, a)
    # Only equal infinities are special: for equal finite numbers the difference has a derivative.
    difference = jnp.where((a == b) & jnp.isinf(a), 0, less - greater)
    return greater + jnp.log1p(jnp.exp(difference))


def accumulator(dtype):
    """float32 for the floating dtypes of 16 bits or less."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def widened(consts):
    """What a reducer captured, 16-bit floats as float32, so that their cotangents are summed in it."""
    return [x.astype(accumulator(x.dtype)) for x in map(jnp.asarray, consts)]


@functools.cache
def identity(name, dtype):
    """The identity of a recognised reducer for numbers of ``dtype``, or None."""
    dtype = jnp.dtype(dtype)
    if name == "add":
        return dtype.type(0)
    if name == "mul":
        return dtype.type(1)
    if name not in ("max", "min"):
        return None
    least = name == "max"
    if dtype == jnp.bool_:
        return dtype.type(not least)
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype.type(jnp.iinfo(dtype).min if least else jnp.iinfo(dtype).max)
    infinity = -jnp.inf if least else jnp.inf
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype.type(complex(infinity, infinity))
    return dtype.type(infinity)
