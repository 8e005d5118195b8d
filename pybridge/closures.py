"""Unwrap a callable into a static skeleton and a pytree of what it captured.

A closure is a callable record: code, and the values it closed over. ``unwrap`` takes the record
apart (cells, defaults, ``functools.partial``, bound methods, attributes of callable objects, pytree
modules) and gives the arrays back as a pytree named as the code names them, with a function that
puts them in again. Differentiating a closure's captures is then differentiating an argument; the
formula is that of the public discussion of nested AD with Lux: "closures are callable NamedTuples".

Nothing is dropped: what may hold an array and cannot be taken apart is an error with its path.
"""

import copy
import dataclasses
import dis
import functools
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np

from pybridge.engines import as_julia

# Captures that are code or text, never values to differentiate.
_STATIC = (
    str,
    bytes,
    bool,
    int,
    type(None),
    type(Ellipsis),
    range,
    slice,
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    np.ufunc,
    np.dtype,
)


def unwrap(f, *, numbers=False, globals=False):
    """``(skeleton, ps)``: what ``f`` captured, and ``f`` with it as an argument.

    ``skeleton(*args, ps)`` equals ``f(*args)``; it takes the captures as its last argument, so
    ``jax.grad(skeleton, argnums=-1)`` differentiates them. What is taken out:

    - from Python functions: closure cells and defaults, in nested functions too;
      ``functools.partial``; bound methods (what ``self`` holds); callable dataclasses, pytree
      modules (Equinox and the like) and other objects with attributes; ``jax.jit`` wrappers are
      looked through. Globals are not captures unless ``globals=True`` says so, which is what a
      function typed into a notebook or a script wants;
    - from a Julia function: fields of closures and callable structs, nested, compositions, ``Fix1``
      and ``Fix2``, ``StatefulLuxLayer``, ``Ref`` and ``Core.Box``.

    Leaves are float and complex arrays. Integer and boolean arrays, keys, strings and plain Python
    numbers stay in the skeleton: they steer shapes and branches.

    Args:
      f: a callable.
      numbers: take plain Python floats and complex numbers out too.
      globals: take out the global values that ``f``, and functions of the same module that it
        calls, read by name.

    Returns:
      The skeleton, and a dict of the captured arrays by name, nested as the captures are. An array
      captured twice is two leaves, and the cotangents of both count.

    Raises:
      TypeError: ``f`` is not callable, or a capture may hold an array and cannot be taken apart
        (its path is named).

    >>> import jax, jax.numpy as jnp
    >>> from pybridge import unwrap
    >>> def linear(w):
    ...     return lambda x: w @ x
    >>> skeleton, ps = unwrap(linear(jnp.array([1.0, 2.0])))
    >>> ps
    {'w': Array([1., 2.], dtype=float32)}
    >>> jax.grad(skeleton, argnums=-1)(jnp.ones(2), ps)
    {'w': Array([1., 1.], dtype=float32)}
    """
    if not callable(f):
        raise TypeError(f"f must be callable; it is {f!r} of type {type(f).__name__}.")
    julia = as_julia(f)
    if julia is not None:
        return julia.unwrap(numbers=numbers)
    part = _Unwrapping(numbers, f if globals else None).take(f, "f")
    ps = part.params if part.params is not None else {}

    def skeleton(*args, **kwargs):
        if not args:
            raise TypeError("the skeleton takes what it had captured as its last argument.")
        *args, params = args
        want, got = jax.tree.structure(ps), jax.tree.structure(params)
        if want != got:
            raise ValueError(f"the skeleton's captures are {want}; given were {got}.")
        return (part.put(params, {}) if part.params is not None else f)(*args, **kwargs)

    return skeleton, ps


@dataclasses.dataclass
class _Part:
    """``params``: a pytree of a value's leaves, None where it has none. ``put(params, made)``: the
    value with them in place; ``made`` maps functions under construction, for those that call
    themselves."""

    params: object
    put: object


class _Unwrapping:
    def __init__(self, numbers, reads_globals):
        self.numbers = numbers
        self.globals = getattr(reads_globals, "__globals__", None)
        self.open = set()  # ids of values whose parts are being taken: a cycle ends here
        self.cyclic = set()  # those of them that were met again

    def take(self, value, path) -> _Part:
        if isinstance(value, _STATIC) or as_julia(value) is not None:
            return self._static(value)
        if isinstance(value, (jax.Array, np.ndarray, np.generic)):
            return self._array(value, path)
        if isinstance(value, (float, complex)):
            if self.numbers:
                return _Part(jnp.asarray(value), lambda params, made: params)
            return self._static(value)
        if id(value) in self.open:
            # Only a function may contain itself; it is made before its cells are filled.
            self.cyclic.add(id(value))
            return _Part(None, lambda params, made: made.get(id(value), value))
        self.open.add(id(value))
        try:
            part = self._compound(value, path)
        finally:
            self.open.discard(id(value))
        if (
            part.params is not None
            and id(value) in self.cyclic
            and not isinstance(value, types.FunctionType)
        ):
            raise TypeError(
                f"{path} is of type {type(value).__name__}, holds arrays and contains itself (a bound "
                "method kept on its own object does that), so it cannot be rebuilt with others. Pass "
                "the arrays as arguments."
            )
        return part

    def _static(self, value):
        return _Part(None, lambda params, made: value)

    def _array(self, value, path):
        if value.dtype == np.object_:
            raise TypeError(
                f"{path} is a NumPy array of dtype object, which may hold arrays that cannot be "
                "differentiated. Pass a list of arrays instead."
            )
        if jax.dtypes.issubdtype(value.dtype, np.inexact):
            return _Part(jnp.asarray(value), lambda params, made: params)
        return self._static(value)

    def _compound(self, value, path):
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, types.MethodType):
            parts = {"self": value.__self__, "function": value.__func__}
            return self._record(
                parts,
                path,
                lambda new: types.MethodType(new["function"], new["self"]),
                value,
                inline="self",
            )
        if isinstance(value, functools.partial):
            parts = {"function": value.func, "args": value.args, "keywords": dict(value.keywords)}
            rebuild = lambda new: type(value)(new["function"], *new["args"], **new["keywords"])
            return self._record(parts, path, rebuild, value)
        if _is_jitted(value):
            # Tracing sees the same computation without the wrapper, which hides the closure.
            return self.take(value.__wrapped__, path)
        if isinstance(value, (jax.custom_jvp, jax.custom_vjp)):
            return self._rule(value, path)
        if _is_pytree_node(value):
            return self._node(value, path)
        attributes = _attributes(value)
        if attributes:
            part = self._record(attributes, path, lambda new: _copied(value, new), value)
            if part.params is not None and copy.copy(value) is value:
                raise TypeError(
                    f"{path} is of type {type(value).__name__}, holds arrays and cannot be copied. "
                    "Pass the arrays as arguments."
                )
            return part
        return self._opaque(value, path)

    def _record(self, parts, path, rebuild, value, inline=None):
        """A value made of named parts; ``inline`` names the part whose params stand for the whole
        where no other part has any."""
        taken = {name: self.take(part, f"{path}.{name}") for name, part in parts.items()}
        params = {name: part.params for name, part in taken.items() if part.params is not None}
        if not params:
            return self._static(value)
        alone = inline is not None and set(params) == {inline}

        def put(params, made):
            given = {inline: params} if alone else params
            return rebuild({name: part.put(given.get(name), made) for name, part in taken.items()})

        return _Part(params[inline] if alone else params, put)

    def _function(self, f, path):
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or ()))
        names = f.__code__.co_varnames[: f.__code__.co_argcount]
        defaults = dict(zip(names[len(names) - len(f.__defaults__ or ()) :], f.__defaults__ or ()))
        keywords = dict(f.__kwdefaults__ or {})
        filled = {name: cell for name, cell in cells.items() if _is_filled(cell)}
        read = {}
        if self.globals is f.__globals__:
            read = {n: f.__globals__[n] for n in _globals_read(f.__code__) if n in f.__globals__}
        taken = {
            name: self.take(value, f"{path}.{name}")
            for name, value in (
                *((name, cell.cell_contents) for name, cell in filled.items()),
                *defaults.items(),
                *keywords.items(),
                *read.items(),
            )
        }
        params = {name: part.params for name, part in taken.items() if part.params is not None}
        if not params:
            return self._static(f)

        def put(params, made):
            namespace = dict(f.__globals__) if read else f.__globals__
            new = types.FunctionType(
                f.__code__,
                namespace,
                f.__name__,
                closure=tuple(types.CellType() for _ in cells) if cells else None,
            )
            made = {**made, id(f): new}
            value = {name: part.put(params.get(name), made) for name, part in taken.items()}
            namespace.update({name: value[name] for name in read})
            for cell, name in zip(new.__closure__ or (), cells):
                if name in filled:
                    cell.cell_contents = value[name]
            new.__defaults__ = tuple(value[name] for name in defaults) or None
            new.__kwdefaults__ = {name: value[name] for name in keywords} or None
            new.__qualname__, new.__doc__ = f.__qualname__, f.__doc__
            new.__dict__.update(f.__dict__)
            return new

        return _Part(params, put)

    def _node(self, value, path):
        children, treedef = jax.tree.flatten(value, is_leaf=lambda child: child is not value)
        named = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda c: c is not value)
        keys = [_plain_name(entry[0]) for entry, _ in named]
        if len(set(keys)) < len(keys):  # {1: .., "1": ..}
            keys = [jax.tree_util.keystr(entry[:1]) for entry, _ in named]
        taken = [
            self.take(child, path + jax.tree_util.keystr(k))
            for (k, _), child in zip(named, children)
        ]
        if all(part.params is None for part in taken):
            return self._static(value)
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            # Sequences stay sequences where each item has leaves: what users index is what they see.
            names = list(range(len(taken)))
        else:
            names = keys
        held = {name: part.params for name, part in zip(names, taken) if part.params is not None}
        as_sequence = names == list(range(len(taken))) and len(held) == len(taken)
        params = type(value)(held.values()) if as_sequence else held

        def put(params, made):
            get = (lambda name: params[name]) if as_sequence else params.get
            return jax.tree.unflatten(
                treedef, [part.put(get(name), made) for name, part in zip(names, taken)]
            )

        return _Part(params, put)

    def _rule(self, value, path):
        hidden = {name: part for name, part in vars(value).items() if callable(part)}
        for name, part in hidden.items():
            if self.take(part, f"{path}.{name}").params is not None:
                raise TypeError(
                    f"{path} is a {type(value).__name__} whose {name} closes over arrays; its rule "
                    "would not see new ones. Pass them as arguments, or use jax.closure_convert."
                )
        return self._static(value)

    def _opaque(self, value, path):
        for held in _reachable(value):
            if isinstance(held, (jax.Array, np.ndarray)) and jax.dtypes.issubdtype(
                held.dtype, np.inexact
            ):
                raise TypeError(
                    f"{path} is of type {type(value).__name__}, which holds an array of shape "
                    f"{held.shape} and cannot be taken apart. Capture the array itself, a list or a "
                    "dict of arrays, a dataclass, or a registered pytree."
                )
        return self._static(value)


def _is_jitted(value):
    return hasattr(value, "__wrapped__") and hasattr(value, "lower") and hasattr(value, "trace")


def _is_pytree_node(value):
    return not jax.tree_util.all_leaves([value])


def _is_filled(cell):
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _globals_read(code):
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names += _globals_read(inner)
    return dict.fromkeys(names)


def _plain_name(entry):
    """A path entry as a dict key that sorts: ``x`` for ``.x``, ``['x']`` and ``[0]`` alike."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _attributes(value):
    slots = [
        name
        for kind in type(value).__mro__
        for name in _as_names(kind.__dict__.get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    return {
        **{name: getattr(value, name) for name in slots},
        **dict(getattr(value, "__dict__", None) or {}),
    }


def _as_names(slots):
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _copied(value, attributes):
    new = copy.copy(value)
    for name, attribute in attributes.items():
        object.__setattr__(new, name, attribute)
    return new


def _reachable(value):
    first = [held for held in gc.get_referents(value) if not isinstance(held, _STATIC)]
    second = [inner for held in first for inner in gc.get_referents(held)]
    return [*first, *second]
