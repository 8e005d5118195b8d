"""sow, reap, plant: named intermediate values and their derivatives, through every transformation.

``sow`` gives a value inside a function a name and is otherwise the identity. ``reap`` returns the named
values of a function and of what transformations made of it: the derivative of a named value belongs to
the value, whichever of jvp or grad produced it. ``plant`` writes values in at the names.

The names are those of oryx's harvest (itself after Mathematica's Sow and Reap). New are the derivatives:
``grad``, ``value_and_grad``, ``jvp``, ``vmap``, ``jacfwd``, ``jacrev``, ``hessian``, ``linearize``,
``jit`` and ``scan`` of this module take the place of JAX's, with the same signatures. How they work is
in pybridge/_harvest/levels.py.
"""

import functools
import weakref

import jax

from ._harvest import bounded, julia  # noqa: F401 (they teach reap pybridge's own primitives)
from ._harvest.calls import jit, scan
from ._harvest.entries import Entries, Entry, Reaped, Undefined
from ._harvest.forms import Ask
from ._harvest.layout import ATTRIBUTES, Layout
from ._harvest.linear import linearize
from ._harvest.planting import plants_for
from ._harvest.primitive import (
    HarvestError,
    active,
    is_array,
    path_of,
    scopes,
    session_of,
    sows_in,
)
from ._harvest.primitive import sow as _sow
from ._harvest.program import Program, is_number
from ._harvest.wrappers import grad, hessian, jacfwd, jacrev, jvp, value_and_grad, vmap

__all__ = [
    "Entries",
    "Entry",
    "HarvestError",
    "Reaped",
    "Undefined",
    "grad",
    "hessian",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "linearize",
    "nest",
    "plant",
    "reap",
    "scan",
    "sow",
    "value_and_grad",
    "vmap",
]


def sow(value, name, *, mode="strict"):
    """Name ``value``; return it unchanged.

    Args:
      value: an array or a pytree of arrays, of any shape and dtype.
      name: a non-empty string, or a tuple of strings and integers, a path such as ("layer", 3).
      mode: what a second sow of the same name in one run means: "strict", an error; "append", the
        entries are collected in order; "last", the last one counts.

    Returns: ``value``. Go on with this result: a cotangent is that of what follows from it.

    Raises HarvestError (a ValueError) for any other name or mode, or a leaf that is not an array.

    Without ``reap`` it leaves nothing in the compiled program.

    >>> from pybridge.harvest import reap, sow
    >>> f = lambda x: sow(x + 1.0, "y") + 1.0
    >>> f(1.0)
    3.0
    >>> out, named = reap(f)(1.0)
    >>> float(out), float(named["y"].value)
    (3.0, 2.0)
    """
    return _sow(value, name, mode)


def nest(fun, scope):
    """``fun`` with ``scope`` put before every name that it sows.

    ``scope`` is a name or a path, as for :func:`sow`. The same function may so be used many times.
    Names that Julia code sows are prefixed, too.

    >>> from pybridge.harvest import nest, reap, sow
    >>> f = lambda x: sow(x * 2.0, "y")
    >>> _, named = reap(lambda x: nest(f, "a")(x) + nest(f, "b")(x))(1.0)
    >>> float(named["a", "y"].value), float(named["b"]["y"].value)
    (2.0, 2.0)
    """
    path = path_of(scope, "scope")

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with scopes(scopes.value + path):
            return fun(*args, **kwargs)

    return wrapped


def at_work():
    """Whether a reaped or planted function is being traced."""
    return active.value is not None


def sows(fun, args):
    """Whether ``fun(*args)`` sows, in Python or in Julia."""
    return bool(sows_in(jax.make_jaxpr(fun)(*args).jaxpr))


class _Fixed:
    """The arguments that are not arrays, as a static part of a jit's cache key."""

    def __init__(self, tree, leaves, moving):
        self.tree, self.leaves, self.moving = tree, leaves, moving
        # With the types: 1, 1.0 and True are equal, and not the same argument.
        self.key = (tree, leaves, moving, tuple(map(type, leaves)))

    def __eq__(self, other):
        return isinstance(other, _Fixed) and self.key == other.key

    def __hash__(self):
        return hash(self.key)


def reap(fun, *, lazy=False, attributes=("value", "tangent", "cotangent")):
    """A function that also returns what ``fun`` sowed.

    ``reap(fun)(*args)`` is ``(fun(*args), reaped)``. ``reaped`` maps each name to an :class:`Entry` with
    ``.value``, ``.tangent``, ``.cotangent`` and ``.jacobian``, where the transformations inside ``fun``
    make them defined; :class:`Reaped` and :class:`Entry` say what they are. It is a pytree, so a reaped
    function may be transformed in turn.

    ``fun`` is traced, as under jit. If it is a jitted function the reaped one is compiled and kept, too;
    otherwise use ``jax.jit(reap(fun))`` where speed matters.

    Under JAX's own transformations, what is well defined is there: ``.value`` and ``.cotangent`` under
    jax.grad, ``.value`` and ``.tangent`` under jax.jvp, and under jax.vmap, which keeps its out_axes to
    itself, the batch axis first (in a scan: first in each row, unless harvest.scan returns the values). For the rest, and for two levels or
    more, use those of this module.

    In lax.scan values are stacked; in lax.while_loop the last one counts, with ``.count``; in lax.cond
    and switch the branch taken counts, and ``.taken`` tells for a name that not all of them sow.

    Args:
      fun: any function of pytrees of arrays; arguments that are not arrays, Python's own numbers
        among them, are passed as they are.
      lazy: return a mapping of functions instead. ``reap(fun, lazy=True)["x"]`` takes the arguments of
        ``fun`` and returns the named value; with levels named, as in ``["grad", "x"]``, its derivative
        by them; and ``["x"].cotangent`` and so on are functions, too. Each traces ``fun`` and runs only
        what it needs.
      attributes: what to compute with the run, of "value", "tangent", "cotangent" and "jacobian"; the
        rest is computed, by another run of what it needs, when asked for. Values always are.

    Raises HarvestError if a name is sown twice in one run (unless its mode says otherwise), if a named
    value was removed or is hidden by a transformation, or if ``fun`` has side effects.

    >>> from pybridge.harvest import grad, reap, sow
    >>> f = lambda x: sow(x**3, "x3") + 1.0
    >>> dy, named = reap(grad(f))(2.0)
    >>> float(dy), float(named["x3"].value), float(named["grad", "x3"].jacobian)
    (12.0, 8.0, 12.0)
    >>> float(reap(grad(f), lazy=True)["grad", "x3"](2.0))
    12.0
    """
    if not callable(fun):
        raise HarvestError(f"reap: fun is {fun!r}; accepted: a function. Pass the function itself.")
    if isinstance(attributes, str) or not set(attributes) <= set(ATTRIBUTES):
        raise HarvestError(
            f"reap: attributes is {attributes!r}; accepted: a tuple of {', '.join(ATTRIBUTES)}."
        )
    if lazy:
        return LazyReaped(fun)
    attributes = tuple(attributes)
    jitted = _compiled_reap(fun, attributes) if isinstance(fun, jax.stages.Wrapped) else None
    counting = set()  # the kinds of arguments whose numbers are static

    @functools.wraps(fun)
    def reaped(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        outer = active.value is not None or any(isinstance(x, jax.core.Tracer) for x in leaves)
        if outer or jitted is None:
            return _run_reap(fun, attributes, args, kwargs)
        try:
            hash(tuple(x for x in leaves if not is_array(x)))
        except TypeError:
            return _run_reap(fun, attributes, args, kwargs)
        kind = (tree, tuple(map(type, leaves)))
        try:
            return _call_compiled(jitted, leaves, tree, numbers=kind not in counting)
        except (TypeError, ValueError) as error:
            # A static argument of the jitted function is no array, and JAX does not say which are
            # static. With all numbers left as they are it works, or fails for the same reason.
            if (
                isinstance(error, HarvestError)
                or kind in counting
                or not any(map(is_number, leaves))
            ):
                raise
            try:
                result = _call_compiled(jitted, leaves, tree, numbers=False)
            except (TypeError, ValueError):
                raise error from None
            counting.add(kind)
            return result

    return reaped


def _call_compiled(jitted, leaves, tree, numbers):
    moving = tuple(i for i, x in enumerate(leaves) if is_array(x) or (numbers and is_number(x)))
    operands = [leaves[i] for i in moving]
    rest = list(leaves)
    for i in moving:
        rest[i] = None
    out, named = jitted(_Fixed(tree, tuple(rest), moving), operands)
    named.attach(operands)
    return out, named


def _run_reap(fun, attributes, args, kwargs, attach=True):
    program = Program(fun, session_of(fun), args, kwargs)
    layout = Layout(program)
    eager = layout.eager(attributes)
    outs, store = program.run(eager)
    result = program.result(outs)
    # From these the rest is computed, when asked for.
    later = len(eager) < len(layout.all())
    residual = (program.held(), program.operands if attach else None) if later else None
    program.release()
    return result, Reaped(layout, store, residual, program)


_compiled = weakref.WeakKeyDictionary()  # a jitted function -> {attributes: the reaped one}


def _compiled_reap(fun, attributes):
    """The reaped function, jitted; one for a function, however often it is reaped."""
    table = _compiled.setdefault(fun, {})
    if attributes not in table:
        fun = weakref.ref(fun)  # the table must not keep its own key alive

        def run(fixed, operands):
            leaves = list(fixed.leaves)
            for i, x in zip(fixed.moving, operands):
                leaves[i] = x
            args, kwargs = jax.tree.unflatten(fixed.tree, leaves)
            return _run_reap(fun(), attributes, args, kwargs, attach=False)

        table[attributes] = jax.jit(run, static_argnums=0)
    return table[attributes]


def plant(fun, values):
    """A function that uses ``values`` in place of what ``fun`` sows under their names.

    ``plant(fun, {"x": v})(*args)`` runs ``fun`` with v wherever it sows "x". The result is a
    differentiable function of v: its gradient is the cotangent of "x". In a scan, give a row an
    iteration, each of which the rows after it no longer follow; under vmap, the batch by the axis that reap gives; in a while_loop, one value for all
    iterations; for mode="append", a tuple or list with one value a sow.

    Args:
      fun: the function.
      values: a mapping from names (or tuples, or nested mappings for scopes) to arrays or pytrees of
        the shape and dtype that are sown there, such as what :func:`reap` returned.

    Raises HarvestError for a name that is never sown, and for a wrong structure, shape or dtype.

    >>> from pybridge.harvest import plant, sow
    >>> f = lambda x: sow(x + 1.0, "y") + 1.0
    >>> float(plant(f, {"y": 0.0})(5.0))
    1.0
    """
    if not callable(fun):
        raise HarvestError(
            f"plant: fun is {fun!r}; accepted: a function. Pass the function itself."
        )
    session = session_of(fun)

    @functools.wraps(fun)
    def planted(*args, **kwargs):
        outer = active.value
        program = Program(fun, session, args, kwargs)
        plants = plants_for(Layout(program), values)
        ask = Ask(plants=plants, keep=outer is not None).under("1")
        outs, _ = program.form.call(program.consts, program.operands, ask)
        return program.result(outs)

    return planted


class LazyReaped:
    """A mapping of functions: ``[name]`` takes the arguments of the reaped function."""

    def __init__(self, fun):
        self._fun, self._session = fun, session_of(fun)

    def __getitem__(self, key):
        return LazyEntry(self, key, ())

    def names(self, *args, **kwargs):
        """The names that are sown for these arguments."""
        program = Program(self._fun, self._session, args, kwargs)
        return list(Reaped(Layout(program), {}))


class LazyEntry:
    """A function of the reaped function's arguments that gives one named value, or a derivative."""

    def __init__(self, owner, key, attributes):
        self._owner, self._key, self._attributes = owner, key, attributes

    value = property(lambda self: self._then("value"))
    tangent = property(lambda self: self._then("tangent"))
    cotangent = property(lambda self: self._then("cotangent"))
    jacobian = property(lambda self: self._then("jacobian"))
    taken = property(lambda self: self._then("taken"))
    count = property(lambda self: self._then("count"))

    def _then(self, attribute):
        return LazyEntry(self._owner, self._key, (*self._attributes, attribute))

    def __getitem__(self, key):
        before, after = (k if isinstance(k, tuple) else (k,) for k in (self._key, key))
        return LazyEntry(self._owner, (*before, *after), self._attributes)

    def __call__(self, *args, **kwargs):
        program = Program(self._owner._fun, self._owner._session, args, kwargs)
        layout = Layout(program)
        needed = {}
        reaped = Reaped(layout, _Placeholders(layout, needed))
        self._read(reaped)
        return self._read(Reaped(layout, program.only(list(needed))))

    def _read(self, reaped):
        entry = reaped[self._key]
        if not isinstance(entry, (Entry, Entries)):
            raise HarvestError(
                f"{self._key!r} is a scope, not a name; in it are {list(entry)}. Add one of them."
            )
        if self._attributes:
            for attribute in self._attributes:
                entry = getattr(entry, attribute)
            return entry if not isinstance(entry, Entry) else entry.primal
        if isinstance(entry, Entries):
            return tuple(e.derivative for e in entry)
        return entry.derivative


class _Placeholders(dict):
    """Stands for the values of a dry run, and notes which ones were read."""

    def __init__(self, layout, needed):
        super().__init__(
            {i: jax.ShapeDtypeStruct(s.shape, s.dtype) for i, s in layout.spots.items()}
        )
        self.needed = needed

    def __getitem__(self, key):
        self.needed[key] = True
        return super().__getitem__(key)
