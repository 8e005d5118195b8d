"""Pytrees as the Julia side writes them: skeletons with numbered slots, element types, literals."""

import ast
import ctypes
import dataclasses
import json

import jax
import numpy as np

ELEMENT = {
    "bool": "Bool",
    "int8": "Int8",
    "int16": "Int16",
    "int32": "Int32",
    "int64": "Int64",
    "uint8": "UInt8",
    "uint16": "UInt16",
    "uint32": "UInt32",
    "uint64": "UInt64",
    "float16": "Float16",
    "float32": "Float32",
    "float64": "Float64",
    "complex64": "ComplexF32",
    "complex128": "ComplexF64",
}


@dataclasses.dataclass(frozen=True)
class _Place:
    index: int


def quote(text: str) -> str:
    """A Julia string literal."""
    return json.dumps(text, ensure_ascii=False).replace("$", "\\$")


def tuple_of(items) -> str:
    """A Julia tuple of code strings."""
    return "(" + "".join(f"{item}, " for item in items) + ")"


def named_tuple(items: dict[str, str]) -> str:
    names = tuple_of(f"Symbol({quote(name)})" for name in items)
    return f"NamedTuple{{{names}}}({tuple_of(items.values())})"


def skeleton(tree, like=None) -> str:
    """Julia code of the skeleton of a ``PyTreeDef``.

    A dict is a NamedTuple in sorted key order (JAX's own), a dataclass or namedtuple a NamedTuple
    in field order, a list or tuple a Tuple, None is nothing. Static fields that are numbers, strings
    or bools are constants. Where ``like``, a nest like the tree, has a dict, its order is kept.

    Raises:
      TypeError: a node that Julia has no counterpart for, with its path.
    """
    return _code(jax.tree.unflatten(tree, map(_Place, range(tree.num_leaves))), "args", like)


def _code(node, path, like=None):
    if isinstance(node, _Place):
        return f"Slot{{{node.index + 1}}}()"
    if node is None:
        return "nothing"
    if isinstance(node, bool):
        return "true" if node else "false"
    if isinstance(node, int | float):
        return repr(node)
    if isinstance(node, str):
        return quote(node)
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise TypeError(
                    f"{path} has the key {key!r}: a dict becomes a Julia NamedTuple, whose names "
                    "are strings. Use string keys, or a list or tuple"
                )
        keys = sorted(node) if type(node) is dict else list(node)
        if isinstance(like, dict) and set(like) == set(keys):
            keys = list(like)
        return named_tuple(
            {key: _code(node[key], f"{path}[{key!r}]", _child(like, key)) for key in keys}
        )
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return named_tuple(
            {name: _code(getattr(node, name), f"{path}.{name}") for name in node._fields}
        )
    if isinstance(node, list | tuple):
        return tuple_of(_code(item, f"{path}[{i}]", _child(like, i)) for i, item in enumerate(node))
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        return named_tuple({name: _code(getattr(node, name), f"{path}.{name}") for name in names})
    raise TypeError(
        f"{path} is a {type(node).__name__}, which has no counterpart in Julia; accepted are dicts, "
        "lists, tuples, None, namedtuples and registered dataclasses of arrays"
    )


def _child(like, key):
    try:
        return like[key]
    except (TypeError, KeyError, IndexError):
        return None


def raw(aval) -> jax.ShapeDtypeStruct:
    """The aval that Julia sees: a PRNG key is its uint32 key data."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return aval


def element(dtype, where="the argument") -> str:
    """Julia's name of a dtype."""
    name = np.dtype(dtype).name
    if name not in ELEMENT:
        raise TypeError(
            f"{where} has dtype {name}, which Julia has no number type for; accepted are "
            f"{', '.join(ELEMENT)}"
        )
    return ELEMENT[name]


def dims(shape, axes: str) -> str:
    """A shape as Julia's dims: the same in index order, turned round where memory order is kept."""
    return tuple_of(reversed(shape) if axes == "reversed" else shape)


def taken(answer: str):
    """(key, tree of NumPy arrays) of what the border's ``hold`` answers; copies, in index order."""
    key, node = ast.literal_eval(answer)
    return key, _taken(node)


def _taken(node):
    if node is None:
        return None
    kind, *rest = node
    if kind == "tuple":
        return tuple(_taken(item) for item in rest[0])
    if kind == "dict":
        return {name: _taken(item) for name, item in rest[0].items()}
    dtype, shape, address = rest
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.zeros(shape, dtype)
    data = ctypes.string_at(address, count * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape, order="F").copy(order="C")


def structs_of(description: str, axes: str):
    """(out_tree, out_avals) of what the border's ``describe`` answers."""
    tree = _structs(ast.literal_eval(description), axes)
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(leaves)


def _structs(node, axes):
    if node is None:
        return None
    kind, *rest = node
    if kind == "tuple":
        return tuple(_structs(item, axes) for item in rest[0])
    if kind == "dict":
        return {name: _structs(item, axes) for name, item in rest[0].items()}
    dtype, shape = rest
    shape = shape[::-1] if axes == "reversed" else shape
    # Under jax's default 32-bit mode a Float64 result follows JAX's own rule.
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
