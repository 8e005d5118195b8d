"""The one primitive behind every derivative of a function that JAX cannot see into.

For a function h of leaves z = (z_1 .. z_m) the primitive ``form`` is the multilinear form

    <s_0, D^n h(z)[s_1, .., s_n]>        s_0 a covector of h's output, s_1 .. s_n tangents of z

with exactly *one* slot left open. Slot 0 open is D^n h(z)[s_1 .. s_n] itself: h and its directional
derivatives. Slot j >= 1 open is a cotangent of z: with n = 1 the vjp of h, with n = k + 1 the mixed
derivative T_k of f = <s_0, h>, that is k nested dual numbers over one reverse pass. The form is
symmetric in s_1 .. s_n and linear in each slot, and this closes it under everything JAX does:

- jvp: the derivative along a tangent of z is the form with that tangent appended as a slot; along a
  tangent of s_j it is the same form with the tangent in s_j's place. Sums of forms, nothing else.
- transpose: linear in slot j, so its transpose swaps the open slot with slot j. That is the rule.
- batching: every leaf of every slot, the open one included, carries one flag a vmap level: batched
  or shared. A shared input is the same for all samples; a shared *output* is summed over them. The
  transpose swaps flags with the slots, so a cotangent of shared parameters arrives summed, in one
  call into the engine, at any order, and never as one cotangent a sample.
- dead code: an output leaf that nobody wants is a ``None`` in the open slot.

Who evaluates the form is an engine's business (``pybridge.engines``). The mathematics is that
of Pearlmutter's Hessian-vector products ("Fast exact multiplication by the Hessian", 1994), at any
order.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

# One leaf of a slot: None where it is zero (an input) or unwanted (an output), else one flag a vmap
# level, outermost first: True for batched, False for shared.
Flags = tuple[bool, ...]
Spec = tuple[Flags | None, ...]


class Engine(Protocol):
    """What evaluates a form: see ``engines/jax.py`` and ``engines/julia.py``."""

    name: str
    complex_derivatives: bool

    def trace(self, target, in_tree, in_avals) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
        """The tree and the avals of what ``target`` returns."""

    def evaluate(self, operands, *, function, open, sizes, zflags, sflags) -> list[jax.Array]:
        """Compute the form. Ordinary JAX code, traced when the primitive is lowered."""


# What ``pybridge.harvest.nest`` has opened: harvest's own once that is imported. Before, nobody reaps.
names_under = tuple


@dataclasses.dataclass(eq=False)
class Function:
    """A target of an engine at one input tree and one set of avals; compared by identity."""

    engine: Engine
    target: Any
    in_tree: Any
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_tree: Any
    out_avals: tuple[jax.ShapeDtypeStruct, ...]
    scope: tuple = ()  # what is put before the names that the target sows
    keepalive: list = dataclasses.field(default_factory=list)
    compiled: dict = dataclasses.field(default_factory=dict)

    def __repr__(self):
        return f"{self.engine.name}:{getattr(self.target, '__name__', self.target)}"


def function_of(engine: Engine, target, args) -> tuple[Function, list]:
    """The ``Function`` for these arguments, traced once, and their leaves as JAX arrays.

    The table hangs on the target, so that it lives as long as the target does and no longer.
    """
    named, in_tree = jax.tree.flatten_with_path(args)
    leaves = [_as_array(target, path, leaf) for path, leaf in named]
    in_avals = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    scope = names_under()
    key = (engine, in_tree, in_avals, scope)
    table = target.jet_functions
    if key not in table:
        out_tree, out_avals = engine.trace(target, in_tree, in_avals)
        table[key] = Function(engine, target, in_tree, in_avals, out_tree, out_avals, scope)
    return table[key], leaves


def _as_array(target, path, leaf):
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        where = f"argument {path[0].idx}{jax.tree_util.keystr(path[1:])}"
        raise TypeError(
            f"{getattr(target, '__name__', target)}: {where} is {leaf!r} of type "
            f"{type(leaf).__name__}; accepted are arrays, numbers and None."
        ) from error


# ---- slots ------------------------------------------------------------------------------------


def _inexact(value) -> bool:
    return jax.dtypes.issubdtype(value.dtype, np.inexact)


def is_zero(tangent) -> bool:
    return (
        tangent is None
        or type(tangent) is ad.Zero
        or getattr(tangent, "dtype", None) == jax.dtypes.float0
    )


def split(operands, *, open, zflags, sflags, **_):
    """Operands as (z, slots): a list of leaves, and a list a slot, with None at the open one."""
    rest = iter(operands[len(zflags) :])
    slots = [
        None if j == open else [None if flags is None else next(rest) for flags in spec]
        for j, spec in enumerate(sflags)
    ]
    return list(operands[: len(zflags)]), slots


def bind(function, open, sizes, zflags, sflags, z, slots):
    """Bind the form, ``slots`` as ``split`` gives them: the wanted leaves of the open slot."""
    given = [
        leaf
        for j, spec in enumerate(sflags)
        if j != open
        for leaf, flags in zip(slots[j], spec)
        if flags is not None
    ]
    return form_p.bind(
        *_same_manual_axes([*z, *given]),
        function=function,
        open=open,
        sizes=sizes,
        zflags=zflags,
        sflags=sflags,
    )


def _varying(operand) -> frozenset:
    return jax.typeof(operand).manual_axis_type.varying


def _same_manual_axes(operands):
    # Inside shard_map every operand of one call must vary over the same mesh axes.
    every = frozenset().union(*map(_varying, operands))
    missing = [tuple(sorted(every - _varying(operand))) for operand in operands]
    return [
        lax.pcast(operand, axes, to="varying") if axes else operand
        for operand, axes in zip(operands, missing)
    ]


# ---- the primitive: shapes, jvp, transpose, batching, dead code, lowering -----------------------

form_p = Primitive("form")
form_p.multiple_results = True


def out_structs(operands, *, function, open, sizes, zflags, sflags) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of each result, with the mesh axes it varies over inside ``shard_map``."""
    if open == 0:
        leaves = [(aval.shape, aval.dtype) for aval in function.out_avals]
    else:
        leaves = [(aval.shape, aval.dtype) for aval in function.in_avals]
    mesh = jax.sharding.get_abstract_mesh()
    placed = {}
    if not mesh.empty:
        varying = frozenset().union(*(op.manual_axis_type.varying for op in operands))
        placed = {
            "sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
            "manual_axis_type": jax.sharding.ManualAxisType(varying=varying),
        }
    return [
        jax.ShapeDtypeStruct(batch_shape(flags, sizes) + tuple(shape), dtype, **placed)
        for flags, (shape, dtype) in zip(sflags[open], leaves)
        if flags is not None
    ]


def batch_shape(flags: Flags, sizes) -> tuple[int, ...]:
    return tuple(size for size, batched in zip(sizes, flags) if batched)


@form_p.def_abstract_eval
def _form_abstract_eval(*avals, **params):
    structs = out_structs(avals, **params)
    placed = [
        {}
        if s.sharding is None
        else {"sharding": s.sharding, "manual_axis_type": s.manual_axis_type}
        for s in structs
    ]
    return [jax.core.ShapedArray(s.shape, s.dtype, **kw) for s, kw in zip(structs, placed)]


@form_p.def_impl
def _form_impl(*operands, function, **params):
    config = jax.config
    if config.jax_debug_nans or config.jax_debug_infs or config.jax_disable_jit:
        # The first two run a jitted function that made a NaN again without jit, to find the
        # operation. A jit in here would be that operation, run again without jit, and so on for ever.
        return function.engine.evaluate(operands, function=function, **params)
    # One jitted call a form, kept with the function: a fresh lambda each time would be traced anew.
    key = tuple(params.items())
    if key not in function.compiled:
        jitted = jax.jit(functools.partial(form_p.bind, function=function, **params))
        function.compiled[key] = function.engine.eager(jitted)
    return function.compiled[key](*operands)


def _form_jvp(primals, tangents, *, function, open, sizes, zflags, sflags):
    params = {"open": open, "zflags": zflags, "sflags": sflags}
    z, slots = split(primals, **params)
    dz, dslots = split(tangents, **params)

    def present(tangent, spec):
        return tuple(None if is_zero(t) else flags for t, flags in zip(tangent, spec))

    # Integer results have no derivative: their slot-0 leaves are left out of every term.
    derivable = tuple(
        flags if flags is not None and (open > 0 or _inexact(aval)) else None
        for flags, aval in zip(sflags[open], function.in_avals if open else function.out_avals)
    )

    def term(specs, slots):
        specs = (*specs[:open], derivable, *specs[open + 1 :])
        return bind(function, open, sizes, zflags, specs, z, slots)

    terms = []
    spec = present(dz, zflags)
    if any(flags is not None for flags in spec):
        _refuse_complex(function, spec)
        terms.append(term((*sflags, spec), [*slots, dz]))
    for j, dslot in enumerate(dslots):
        if j == open:
            continue
        spec = present(dslot, sflags[j])
        if any(flags is not None for flags in spec):
            terms.append(
                term((*sflags[:j], spec, *sflags[j + 1 :]), [*slots[:j], dslot, *slots[j + 1 :]])
            )
    out = bind(function, open, sizes, zflags, sflags, z, slots)
    sums = iter([functools.reduce(ad.add_tangents, leaf) for leaf in zip(*terms)])
    kept = [new for new, old in zip(derivable, sflags[open]) if old is not None]
    return out, [
        ad.Zero(jax.typeof(o).to_tangent_aval()) if not terms or flags is None else next(sums)
        for o, flags in zip(out, kept)
    ]


ad.primitive_jvps[form_p] = _form_jvp


def _refuse_complex(function, spec):
    if function.engine.complex_derivatives:
        return
    active = [aval for aval, flags in zip(function.in_avals, spec) if flags is not None]
    for what, avals in (("an argument", active), ("the result", function.out_avals)):
        for aval in avals:
            if jax.dtypes.issubdtype(aval.dtype, np.complexfloating):
                raise TypeError(
                    f"{function!r}: {what} has dtype {aval.dtype}, and the derivative of a "
                    f"complex function is not defined on the {function.engine.name} engine. Pass "
                    "real and imaginary parts as two float arrays and combine them inside."
                )


def _form_transpose(cotangents, *operands, function, open, sizes, zflags, sflags):
    undefined = ad.is_undefined_primal
    z, slots = split(operands, open=open, zflags=zflags, sflags=sflags)
    linear = [j for j, slot in enumerate(slots) if j != open and any(map(undefined, slot))]
    if any(map(undefined, z)) or len(linear) != 1:
        raise NotImplementedError(
            f"{function!r} cannot be transposed here: it is linear in one tangent at a time, and "
            "linear_transpose was asked of something that is not a linear function of its input. "
            "Use jax.vjp, or jax.linearize and transpose the linear part."
        )
    (j,) = linear
    # Known leaves of the linear slot are zeros: a rule of somebody's instantiated them.
    wanted = tuple(flags if undefined(leaf) else None for leaf, flags in zip(slots[j], sflags[j]))
    if all(map(is_zero, cotangents)):
        results = [ad.Zero(leaf.aval) for leaf in slots[j] if undefined(leaf)]
    else:
        rest = iter(cotangents)
        cotangent = [None if flags is None else next(rest) for flags in sflags[open]]
        spec = tuple(None if is_zero(ct) else flags for ct, flags in zip(cotangent, sflags[open]))
        specs, slots = list(sflags), list(slots)
        specs[open], specs[j] = spec, wanted
        slots[open], slots[j] = cotangent, None
        results = bind(function, j, sizes, zflags, tuple(specs), z, slots)
    results = iter(results)
    return [next(results) if undefined(operand) else None for operand in operands]


ad.primitive_transposes[form_p] = _form_transpose


def _form_batch(operands, dims, *, function, open, sizes, zflags, sflags):
    size = next(op.shape[d] for op, d in zip(operands, dims) if d is not None)
    operands = [op if d is None else jnp.moveaxis(op, d, 0) for op, d in zip(operands, dims)]
    batched = iter([d is not None for d in dims])
    zflags = tuple((next(batched), *flags) for flags in zflags)
    sflags = tuple(
        tuple(
            None if flags is None else (True if j == open else next(batched), *flags)
            for flags in spec
        )
        for j, spec in enumerate(sflags)
    )
    out = form_p.bind(
        *operands,
        function=function,
        open=open,
        sizes=(size, *sizes),
        zflags=zflags,
        sflags=sflags,
    )
    return out, [0] * len(out)


batching.primitive_batchers[form_p] = _form_batch


def _form_dce(used, eqn):
    if not any(used):
        return [False] * len(eqn.invars), None
    keep = iter(used)
    specs = list(eqn.params["sflags"])
    open = eqn.params["open"]
    specs[open] = tuple(
        flags if flags is not None and next(keep) else None for flags in specs[open]
    )
    outvars = [var for var, keep_it in zip(eqn.outvars, used) if keep_it]
    params = {**eqn.params, "sflags": tuple(specs)}
    return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params)


pe.dce_rules[form_p] = _form_dce


def _form_lowering(ctx, *operands, function, **params):
    # A compiled program may outlive every other reference to its function (jax.clear_caches).
    ctx.module_context.add_keepalive(function)

    def evaluate(*operands):
        return function.engine.evaluate(operands, function=function, **params)

    return mlir.lower_fun(evaluate, multiple_results=True)(ctx, *operands)


mlir.register_lowering(form_p, _form_lowering)


# ---- what the rest of the package binds --------------------------------------------------------


def call(engine: Engine, target, *args):
    """``target(*args)`` as a JAX value: the form of order 0, with its one slot open."""
    function, z = function_of(engine, target, args)
    out = bind(function, 0, (), ((),) * len(z), (((),) * len(function.out_avals),), z, [None])
    return jax.tree.unflatten(function.out_tree, out)


def result_struct(engine: Engine, target, args):
    """The pytree of shapes and dtypes that ``target(*args)`` has."""
    function, _ = function_of(engine, target, args)
    return jax.tree.unflatten(function.out_tree, function.out_avals)


def cotangent(engine: Engine, target, args, covector, directions=(), wanted=None):
    """The cotangent of ``args``: the form with slot 1 open, from one reverse pass.

    Args:
      args: a tuple of pytrees, what ``target`` is called with.
      covector: a list over the leaves of ``target``'s result, None where it is zero.
      directions: k tuples like ``args``, with None in place of an argument whose direction is
        zero. With k of them the result is T_k of <covector, target>.
      wanted: one bool an argument; None wants all.

    Returns:
      A list over the leaves of ``args``: a cotangent, or None where it was not wanted or the leaf
      is not a float.
    """
    function, z = function_of(engine, target, args)
    spec = tuple(
        () if _inexact(leaf) and (wanted is None or wanted[owner]) else None
        for leaf, owner in zip(z, _owners(args))
    )
    _refuse_complex(function, spec)
    slots = [list(covector), None, *(_direction(args, z, d) for d in directions)]
    sflags = [_given(slots[0]), spec, *map(_given, slots[2:])]
    out = iter(bind(function, 1, (), ((),) * len(z), tuple(sflags), z, slots))
    return [None if flags is None else next(out) for flags in spec]


def summed_second_derivative(engine: Engine, target, args, directions, count):
    """sum_i D^2 h(z)[e_i, e_i] over ``count`` directions stacked along axis 0, in one call.

    A level of its own for the directions, and a result that is shared over it: the engine sums.
    """
    function, z = function_of(engine, target, args)
    direction = _direction(args, z, directions)
    mapped = tuple(None if d is None else (True,) for d in direction)
    _refuse_complex(function, mapped)
    sflags = (((False,),) * len(function.out_avals), mapped, mapped)
    slots = [None, direction, direction]
    out = bind(function, 0, (count,), ((False,),) * len(z), sflags, z, slots)
    return jax.tree.unflatten(function.out_tree, out)


def _owners(args):
    return [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _direction(args, z, direction):
    leaves = []
    for arg, d in zip(args, direction):
        leaves += [None] * len(jax.tree.leaves(arg)) if d is None else jax.tree.leaves(d)
    return [
        None if is_zero(d) or not _inexact(leaf) else jnp.asarray(d, leaf.dtype)
        for d, leaf in zip(leaves, z)
    ]


def _given(slot):
    return tuple(None if leaf is None else () for leaf in slot)
