"""Unwrap a callable into a static skeleton and a pytree of what it captured.

A closure is a callable record: code, and the values it closed over. ``unwrap`` takes the record
apart (cells, defaults, ``functools.partial``, bound methods, attributes of callable objects, pytree
modules) and gives the arrays back as a pytree named as the code names them, with a function that
puts them in again. Differentiating a closure's captures is then differentiating an argument; the
formula is that of the public discussion of nested AD with Lux: "closures are callable NamedTuples".

Nothing is dropped: what may hold an array and cannot be taken apart is an error with its path.
"""

import collections
import contextlib
import contextvars
import copy
import dataclasses
import dis
import functools
import gc
import inspect
import logging
import types
import weakref

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from pybridge.engines import as_julia

# Captures that are code, text or for text, never values to differentiate.
_STATIC = (
    str,
    bytes,
    bool,
    int,
    type(None),
    type(Ellipsis),
    range,
    types.ModuleType,
    types.CodeType,
    jex.core.Jaxpr,
    logging.Logger,
    np.ufunc,
    np.dtype,
)

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def unwrap(f, *, numbers=False, globals=False):
    """``(skeleton, ps)``: what ``f`` captured, and ``f`` with it as an argument.

    ``skeleton(*args, ps)`` equals ``f(*args)``; it takes the captures as its last argument, so
    ``jax.grad(skeleton, argnums=-1)`` differentiates them. What is taken out:

    - from Python functions: closure cells and defaults, in nested functions too;
      ``functools.partial``; bound methods (what ``self`` holds); callable dataclasses, pytree
      modules (Equinox and the like) and other objects with attributes; ``jax.jit`` wrappers are
      looked through; Julia objects that came from juliacall. Globals are not captures unless
      ``globals=True`` says so, which is what a function typed into a notebook or a script wants;
    - from a Julia function: fields of closures and callable structs, nested, compositions, ``Fix1``
      and ``Fix2``, ``StatefulLuxLayer``, ``Ref`` and ``Core.Box``.

    Leaves are float and complex arrays. Integer and boolean arrays, keys, strings and plain Python
    numbers stay in the skeleton: they steer shapes and branches.

    Args:
      f: a callable.
      numbers: take plain Python floats and complex numbers out too.
      globals: take out the global values that ``f`` (below ``jax.jit``, ``functools.partial`` and
        decorators), and functions of the same module that it calls, read by name.

    Returns:
      The skeleton, and a dict of the captured arrays by name, nested as the captures are. An array
      captured twice is two leaves, and the cotangents of both count.

    Raises:
      TypeError: ``f`` is not callable, or a capture holds an array that cannot be replaced (its path
        is named): one in a class or function attribute, in the fixed part of a pytree, in a cache, a
        compiled program, a container that JAX does not know, or in a variable that is assigned to.

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
    part = _Unwrapping(numbers, _namespace(f) if globals else None).take(f, "f")
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
    themselves. ``rebuilt``: whether the new value is another object than the old one, as it is where
    there are params, and where the value leads back to a function that has some."""

    params: object
    put: object
    rebuilt: bool = True


class _Unwrapping:
    def __init__(self, numbers, namespace):
        self.numbers = numbers
        self.namespace = namespace  # the globals that count as captures
        self.open = set()  # ids of values whose parts are being taken: a cycle ends here
        self.cyclic = set()  # those of them that were met again

    def take(self, value, path) -> _Part:
        if type(value) in weakref.ProxyTypes:  # isinstance would ask the object behind it
            raise TypeError(f"{path} is a weak proxy, which hides its object. Capture the object.")
        julia = as_julia(value)
        if julia is not None:
            return self._julia(julia, value)
        if isinstance(value, _ARRAYS):
            return self._array(value, path)
        if type(value) in (float, complex) and self.numbers:
            return _Part(jnp.asarray(value), lambda params, made: params)
        if isinstance(value, type):
            self._class(value, path)
            return self._static(value)
        if isinstance(value, (*_STATIC, float, complex)):
            # An instance of a subclass (an enum, a unit) may carry more than its number or text.
            return self._static(value) if not _attributes(value) else self._opaque(value, path)
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
        return _Part(None, lambda params, made: value, rebuilt=False)

    def _array(self, value, path):
        if value.dtype == np.object_:
            if _array_within(value.ravel().tolist()) is None:  # names, devices
                return self._static(value)
            raise TypeError(
                f"{path} is a NumPy array of dtype object, which holds arrays that cannot be "
                "differentiated. Pass a list of arrays instead."
            )
        if getattr(value.dtype, "fields", None) or isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"{path} is a {type(value).__name__} of dtype {value.dtype}, which is no JAX value. "
                "Capture its parts as plain arrays."
            )
        if _is_inexact(value):
            return _Part(jnp.asarray(value), lambda params, made: params)
        return self._static(value)

    def _julia(self, function, value):
        # The captures of Julia code in a string are text; those of a Julia object are values.
        if isinstance(function.code, (str, int)):
            return self._static(value)
        skeleton, params = function.unwrap(numbers=self.numbers)
        if not jax.tree.leaves(params):
            return self._static(value)
        return _Part(params, lambda params, made: lambda *args: skeleton(*args, params))

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
        if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            if isinstance(value.__self__, types.ModuleType | None):
                return self._static(value)
            rebuild = lambda new: getattr(new["self"], value.__name__)
            return self._record({"self": value.__self__}, path, rebuild, value, inline="self")
        if isinstance(value, functools.partial):
            parts = {"function": value.func, "args": value.args, "keywords": dict(value.keywords)}
            rebuild = lambda new: type(value)(new["function"], *new["args"], **new["keywords"])
            return self._record(parts, path, rebuild, value)
        if isinstance(value, jex.core.ClosedJaxpr):
            rebuild = lambda new: jex.core.ClosedJaxpr(value.jaxpr, new["consts"])
            return self._record({"consts": list(value.consts)}, path, rebuild, value, "consts")
        if _is_jitted(value):
            # Tracing sees the same computation without the wrapper, which hides the closure.
            return self.take(value.__wrapped__, path)
        if isinstance(value, (jax.custom_jvp, jax.custom_vjp)):
            hidden = {name: part for name, part in vars(value).items() if callable(part)}
            why = "its rule would not see new ones. Pass them as arguments, or use "
            return self._hiding(value, path, hidden, why + "jax.closure_convert.")
        if isinstance(value, functools._lru_cache_wrapper):
            why = "its cache would not see new ones. Take the cache away."
            return self._hiding(value, path, {"function": value.__wrapped__}, why)
        if isinstance(value, weakref.ref):
            why = "it would go on referring to the old ones. Capture the object itself."
            return self._hiding(value, path, {"referent": value()}, why)
        if isinstance(value, contextvars.ContextVar):
            why = "the function reads it for itself. Capture the value."
            return self._hiding(value, path, {"value": value.get(None)}, why)
        if isinstance(value, (jax.stages.Compiled, jax.stages.Lowered)):
            raise TypeError(
                f"{path} is a compiled program, whose constants cannot be replaced. Capture the "
                "function that it was compiled from."
            )
        if _is_pytree_node(value):
            return self._node(value, path)
        self._class(type(value), path)
        attributes = _attributes(value)
        cached = {name for name in attributes if _is_cached_property(type(value), name)}
        seen = attributes.values()
        attributes = {name: part for name, part in attributes.items() if name not in cached}
        if not attributes:
            return self._opaque(value, path, seen)
        rebuild = lambda new: _copied(value, new, cached, path)
        part = self._record(attributes, path, rebuild, value)
        if part.params is not None and rebuild(attributes) is value:
            raise TypeError(
                f"{path} is of type {type(value).__name__}, holds arrays and cannot be copied. "
                "Pass the arrays as arguments."
            )
        self._opaque(value, path, seen)
        return part

    def _record(self, parts, path, rebuild, value, inline=None):
        """A value made of named parts; ``inline`` names the part whose params stand for the whole
        where no other part has any."""
        taken = {name: self.take(part, f"{path}.{name}") for name, part in parts.items()}
        return self._assembled(taken, rebuild, value, inline)

    def _assembled(self, taken, rebuild, value, inline=None):
        if not any(part.rebuilt for part in taken.values()):
            return self._static(value)
        params = _held(taken)
        alone = inline is not None and set(params) == {inline}

        def put(params, made):
            given = {inline: params} if alone else params or {}
            return rebuild({name: part.put(given.get(name), made) for name, part in taken.items()})

        return _Part(params[inline] if alone else params or None, put)

    def _function(self, f, path):
        _refuse_attributes(f, path)
        cells = dict(zip(f.__code__.co_freevars, f.__closure__ or ()))
        names = f.__code__.co_varnames[: f.__code__.co_argcount]
        defaults = dict(zip(names[len(names) - len(f.__defaults__ or ()) :], f.__defaults__ or ()))
        keywords = dict(f.__kwdefaults__ or {})
        filled = {name: cell.cell_contents for name, cell in cells.items() if _is_filled(cell)}
        read = {}
        if self.namespace is f.__globals__:
            read = {n: f.__globals__[n] for n in _globals_read(f.__code__) if n in f.__globals__}
        taken = {
            name: self.take(value, f"{path}.{name}")
            for name, value in {**filled, **defaults, **keywords, **read}.items()
        }
        if not any(part.rebuilt for part in taken.values()):
            return self._static(f)
        for name in _assigned(f.__code__) & filled.keys():
            if taken[name].params is not None:
                raise TypeError(
                    f"{path}.{name} holds arrays and is assigned to (nonlocal), so whoever shares it "
                    "would not see new ones. Return the new value instead."
                )

        def put(params, made):
            params = params or {}
            namespace = dict(f.__globals__) if read else f.__globals__
            # A variable that stays as it is stays shared with whoever else closes over it.
            closure = tuple(
                types.CellType() if name in filled and taken[name].rebuilt else cell
                for name, cell in cells.items()
            )
            new = types.FunctionType(f.__code__, namespace, f.__name__, closure=closure or None)
            made = {**made, id(f): new}
            value = {name: part.put(params.get(name), made) for name, part in taken.items()}
            namespace.update({name: value[name] for name in read})
            for cell, name in zip(closure, cells):
                if name in filled and taken[name].rebuilt:
                    cell.cell_contents = value[name]
            new.__defaults__ = tuple(value[name] for name in defaults) or None
            new.__kwdefaults__ = {name: value[name] for name in keywords} or None
            new.__qualname__, new.__doc__ = f.__qualname__, f.__doc__
            new.__dict__.update(f.__dict__)
            return new

        return _Part(_held(taken) or None, put)

    def _node(self, value, path):
        try:
            named, treedef = _one_level(value)
        except Exception as error:
            raise TypeError(
                f"{path} is of type {type(value).__name__}, which JAX cannot take apart: {error}"
            ) from error
        self._fixed(value, treedef, path)
        self._class(type(value), path)
        keys = [_plain_name(entry[0]) for entry, _ in named]
        if len(set(keys)) < len(keys):  # {1: .., "1": ..}
            keys = [jax.tree_util.keystr(entry[:1]) for entry, _ in named]
        taken = [self.take(child, path + jax.tree_util.keystr(k)) for k, child in named]
        rebuild = lambda new: jax.tree.unflatten(treedef, list(new.values()))
        part = self._assembled(dict(zip(keys, taken)), rebuild, value)
        if type(value) not in (list, tuple) or any(p.params is None for p in (part, *taken)):
            return part
        # Sequences stay sequences where each item has leaves: what users index is what they see.
        return _Part(
            type(value)(part.params for part in taken),
            lambda params, made: part.put(dict(zip(keys, params)), made),
        )

    def _fixed(self, value, treedef, path):
        """The fixed part of a pytree node is compared and hashed by JAX, not replaced."""
        if isinstance(value, (list, tuple, dict)):
            return
        _, fixed = treedef.node_data()
        why = "it is part of the tree's structure. Make it a child (not static, not a meta field)."
        self._hiding(value, path, {"fixed part": fixed}, why)

    def _hiding(self, value, path, parts, why):
        """A value whose parts cannot be replaced: an error where one of them holds arrays."""
        for name, part in parts.items():
            if self.take(part, f"{path}.{name}").params is not None:
                raise TypeError(
                    f"{path} is a {type(value).__name__} whose {name} holds or closes over arrays; "
                    f"{why}"
                )
        return self._static(value)

    def _class(self, kind, path):
        """An error where a class holds arrays: as an attribute, or, if it was made inside a function,
        in what its methods close over. Other classes close over nothing but globals."""
        if id(kind) in self.open:
            return
        self.open.add(id(kind))
        for owner in (*kind.__mro__, *type(kind).__mro__):
            if owner.__module__.partition(".")[0] in _LIBRARIES:
                continue
            for name, attribute in list(vars(owner).items()):
                method = _underlying(attribute)
                held = None
                if isinstance(attribute, type):
                    self._class(attribute, f"{path}.{name}")
                elif not isinstance(method, types.FunctionType):
                    held = _array_within([attribute])
                elif "<locals>" in owner.__qualname__:
                    held = self.take(method, f"{path}.{name}").params
                if held is not None:
                    raise TypeError(
                        f"{path}: attribute {name} of the class {owner.__qualname__} holds or closes "
                        "over arrays, which all its instances share. Keep them on the instance, or "
                        "pass them as arguments."
                    )
        self.open.discard(id(kind))

    def _opaque(self, value, path, seen=()):
        held = np.asarray(value) if _holds_floats(value) else _array_within(value, seen)
        if held is not None:
            raise TypeError(
                f"{path} is of type {type(value).__name__}, which holds an array of shape "
                f"{held.shape} and cannot be taken apart. Capture the array itself, a list or a "
                "dict of arrays, a dataclass, or a registered pytree."
            )
        return self._static(value)


# ---- what cannot be replaced, and so must hold no array --------------------------------------------


def _refuse_attributes(f, path):
    for name, attribute in f.__dict__.items():
        if name != "__wrapped__" and _array_within([attribute]) is not None:
            raise TypeError(
                f"{path}: the function {f.__name__} has an attribute {name} that holds an array. Pass "
                "the array as an argument, or close over it."
            )


# Whose classes hold constants and caches of their own, no user's values.
_LIBRARIES = (
    "abc",
    "builtins",
    "dataclasses",
    "enum",
    "equinox",
    "jax",
    "jaxlib",
    "numpy",
    "typing",
)
_MOST_SEARCHED = 100_000
# What leads out of a value into the rest of the program.
_ELSEWHERE = (types.ModuleType, types.CodeType, types.FrameType, type)


def _array_within(value, seen=()):
    """A float or complex array that ``value`` leads to at any depth, or None; ``seen`` are parts
    looked at already."""
    visited = {id(part) for part in seen} | {id(value)}
    queue = collections.deque([value])
    while queue and len(visited) < _MOST_SEARCHED:
        for held in _referents(queue.popleft()):
            if id(held) in visited or isinstance(held, (*_ELSEWHERE, str, bytes, int)):
                continue
            visited.add(id(held))
            if isinstance(held, _ARRAYS) or _holds_floats(held):
                array = held if isinstance(held, _ARRAYS) else np.asarray(held)
                if _is_inexact(array):
                    return array
                continue
            queue.append(held)
    return None


def _holds_floats(value):
    """Whether it is a buffer of floats: ``array.array``, a ctypes array, a memoryview of one."""
    try:
        return any(code in memoryview(value).format for code in "efd")
    except (TypeError, ValueError):
        return False


def _referents(value):
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    return gc.get_referents(value)


def _is_inexact(array):
    return jax.dtypes.issubdtype(array.dtype, np.inexact)


# ---- the parts of functions and objects -------------------------------------------------------------


def _held(taken):
    return {name: part.params for name, part in taken.items() if part.params is not None}


def _namespace(f):
    """The globals of the function that the user wrote, below wrappers and decorators."""
    inner = f
    while not isinstance(inner, types.FunctionType) or hasattr(inner, "__wrapped__"):
        below = _underlying(inner)
        if below is inner:
            raise TypeError(
                f"globals=True looks into functions; f is of type {type(f).__name__}, whose methods "
                "read globals that cannot be replaced. Pass a function, or leave globals out."
            )
        inner = below
    return inner.__globals__


def _underlying(f):
    for name in ("__wrapped__", "__func__", "func", "fget"):
        below = getattr(f, name, None)
        if callable(below):
            return below
    return f


def _is_jitted(value):
    return hasattr(value, "__wrapped__") and hasattr(value, "lower") and hasattr(value, "trace")


def _one_level(value):
    """A pytree's children with their paths, and its structure; a child may be the value itself."""
    asked = []

    def is_leaf(_):
        asked.append(True)
        return len(asked) > 1  # all but the root

    return jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)


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


def _assigned(code):
    """The free variables that the code, or a function defined in it, assigns to."""
    stores = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("STORE_DEREF", "DELETE_DEREF") and i.argval in code.co_freevars
    }
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            stores |= _assigned(inner) & set(code.co_freevars)
    return stores


def _plain_name(entry):
    """A path entry as a dict key that sorts: ``x`` for ``.x``, ``['x']`` and ``[0]`` alike."""
    for attribute in ("name", "key", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def _attributes(value):
    held = {}
    for kind in type(value).__mro__:
        for name in _as_names(kind.__dict__.get("__slots__", ())):
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{name}"  # a private name, as Python mangles it
            slot = kind.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    held[name] = slot.__get__(value)
    try:
        return {**held, **object.__getattribute__(value, "__dict__")}
    except AttributeError:
        return held


def _as_names(slots):
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_cached_property(kind, name):
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _copied(value, attributes, cached, path):
    """A copy with these attributes; what it had computed and kept, it computes again."""
    try:
        new = copy.copy(value)
        for name in cached:
            del new.__dict__[name]
        for name, attribute in attributes.items():
            object.__setattr__(new, name, attribute)
    except Exception as error:
        raise TypeError(
            f"{path} is of type {type(value).__name__}, holds arrays and cannot be copied "
            f"({type(error).__name__}: {error}). Pass the arrays as arguments."
        ) from error
    return new
