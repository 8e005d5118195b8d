"""JAX's transformations with JAX's signatures, for functions that sow.

Outside of ``reap`` and ``plant``, and where nothing is sown, each *is* JAX's. Under a session it flattens
the function the way JAX does and leaves one level (levels.py) in the program. Wherever the arguments are
not what JAX accepts, JAX is called so that JAX's own error is raised.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .equation import bind_traced
from .levels import Forward, Jvp, Reverse, Vmap, unmapped
from .primitive import HarvestError, active, sows_in

_FLOAT0 = jax.dtypes.float0


def _is_inexact(x):
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _arrays(leaves):
    return all(
        isinstance(x, (jax.Array, np.ndarray, np.generic, int, float, complex)) for x in leaves
    )


def _with_aux(out, has_aux):
    if not has_aux:
        return out, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(
            f"expected function with aux output to return a two-element tuple, but got {type(out)}"
        )
    return out


class Flat:
    """A function of some leaves of its arguments, the rest held fixed; remembers its output's trees."""

    def __init__(self, fun, tree, leaves, moving, has_aux):
        self.fun, self.tree, self.leaves, self.moving = fun, tree, leaves, moving
        self.has_aux = has_aux

    def __call__(self, *xs):
        leaves = list(self.leaves)
        for i, x in zip(self.moving, xs):
            leaves[i] = x
        out, aux = _with_aux(self.fun(jax.tree.unflatten(self.tree, leaves)), self.has_aux)
        outs, self.out_tree = jax.tree.flatten(out)
        auxs, self.aux_tree = jax.tree.flatten(aux)
        self.n_out = len(outs)
        self.shapes = [jnp.shape(o) for o in outs]
        self.inexact = [_is_inexact(o) for o in outs]
        return [*outs, *auxs]


def _differentiation(
    label, fun, argnums, has_aux, holomorphic, scalar, result, allow_int=False, reduce_axes=()
):
    """grad and its kin. ``result(value, derivative, aux)`` is what the caller gets."""
    by_jax = {"grad": jax.grad, "value_and_grad": jax.value_and_grad}.get(label)
    by_jax = by_jax or {"jacfwd": jax.jacfwd, "jacrev": jax.jacrev}[label]
    options = {} if label == "jacfwd" else {"allow_int": allow_int}
    options |= {"reduce_axes": reduce_axes} if reduce_axes else {}
    one = hasattr(argnums, "__index__")
    plain = by_jax(fun, argnums, has_aux=has_aux, holomorphic=holomorphic, **options)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        nums = (argnums,) if one else tuple(argnums)
        if (
            active.value is None
            or reduce_axes
            or not all(-len(args) <= n < len(args) for n in nums)
        ):
            return plain(*args, **kwargs)
        nums = tuple(n % len(args) for n in nums)
        chosen = args[nums[0]] if one else tuple(args[n] for n in nums)
        leaves, tree = jax.tree.flatten(chosen)
        if not _arrays(leaves) or not (allow_int or all(map(_is_inexact, leaves))):
            return plain(*args, **kwargs)
        moving = tuple(i for i, x in enumerate(leaves) if _is_inexact(x))

        def on_chosen(chosen):
            full = list(args)
            for n, x in zip(nums, (chosen,) if one else chosen):
                full[n] = x
            return fun(*full, **kwargs)

        flat = Flat(on_chosen, tree, leaves, moving, has_aux)
        operands = [leaves[i] for i in moving]
        closed = jax.make_jaxpr(flat)(*operands)
        if not sows_in(closed.jaxpr) or (scalar and flat.shapes != [()]):
            return plain(*args, **kwargs)
        common = (holomorphic, tree, moving, tuple(map(jnp.shape, operands)), flat.out_tree)
        if label == "jacfwd":
            level = Forward(label, flat.n_out, *common)
        else:
            level = Reverse(label, flat.n_out, scalar, *common)
        outs = bind_traced(level, closed, operands)
        n, m = flat.n_out, len(moving)
        value = jax.tree.unflatten(flat.out_tree, outs[:n])
        rows = [outs[n + o * m : n + (o + 1) * m] for o in range(n)]
        trees = []
        for shape, row in zip(flat.shapes, rows):
            full = [np.zeros((*shape, *np.shape(x)), _FLOAT0) for x in leaves]
            for i, g in zip(moving, row):
                full[i] = g
            trees.append(jax.tree.unflatten(tree, full))
        derivative = trees[0] if scalar else jax.tree.unflatten(flat.out_tree, trees)
        aux = jax.tree.unflatten(flat.aux_tree, outs[n + n * m :])
        return result(value, derivative, aux)

    return wrapped


def _or_aux(has_aux):
    return lambda value, derivative, aux: (derivative, aux) if has_aux else derivative


def grad(fun, argnums=0, has_aux=False, holomorphic=False, allow_int=False, reduce_axes=()):
    """``jax.grad`` whose named values keep ``.value``, ``.cotangent`` and ``.jacobian`` under reap.

    For y = fun(x) and a value v = v(x) sown inside: ``.value`` is v; ``.cotangent`` is dy/dv, of v's
    shape; ``.jacobian`` is dv/dx, of shape v.shape + x.shape, computed when asked for; and for one
    scalar x, ``.tangent`` is the same dv/dx.

    >>> from pybridge.harvest import grad, reap, sow
    >>> g, named = reap(grad(lambda x: sow(x**3, "x3") + 1))(3.0)
    >>> float(named["x3"].value), float(named["x3"].tangent), float(named["x3"].cotangent)
    (27.0, 27.0, 1.0)
    """
    return _differentiation(
        "grad", fun, argnums, has_aux, holomorphic, True, _or_aux(has_aux), allow_int, reduce_axes
    )


def value_and_grad(
    fun, argnums=0, has_aux=False, holomorphic=False, allow_int=False, reduce_axes=()
):
    """``jax.value_and_grad``; named values as with :func:`grad`."""

    def result(value, derivative, aux):
        return ((value, aux) if has_aux else value), derivative

    return _differentiation(
        "value_and_grad", fun, argnums, has_aux, holomorphic, True, result, allow_int, reduce_axes
    )


def jacrev(fun, argnums=0, has_aux=False, holomorphic=False, allow_int=False):
    """``jax.jacrev``; named values as with :func:`grad`, ``.cotangent`` of shape y.shape + v.shape."""
    return _differentiation(
        "jacrev", fun, argnums, has_aux, holomorphic, False, _or_aux(has_aux), allow_int
    )


def jacfwd(fun, argnums=0, has_aux=False, holomorphic=False):
    """``jax.jacfwd``; each named value has ``.value`` and ``.jacobian``, laid out as the result's."""
    return _differentiation("jacfwd", fun, argnums, has_aux, holomorphic, False, _or_aux(has_aux))


def hessian(fun, argnums=0, has_aux=False, holomorphic=False):
    """``jax.hessian``: :func:`jacfwd` of :func:`jacrev`, two levels."""
    inner = jacrev(fun, argnums, has_aux, holomorphic)
    return jacfwd(inner, argnums, has_aux, holomorphic)


def jvp(fun, primals, tangents, has_aux=False):
    """``jax.jvp`` whose named values have ``.value`` and ``.tangent`` under reap.

    ``.tangent`` is the derivative of the named value in the direction of ``tangents``.

    >>> from pybridge.harvest import jvp, reap, sow
    >>> f = lambda x: jvp(lambda x: sow(x**3, "x3") + 1, (x,), (1.0,))
    >>> float(reap(f)(3.0)[1]["x3"].tangent)
    27.0
    """
    plain = functools.partial(jax.jvp, fun, primals, tangents, has_aux=has_aux)
    if active.value is None or not all(isinstance(t, (tuple, list)) for t in (primals, tangents)):
        return plain()
    leaves, tree = jax.tree.flatten(tuple(primals))
    moves, tree_t = jax.tree.flatten(tuple(tangents))
    if tree != tree_t or not _arrays(leaves):
        return plain()
    moving = tuple(i for i, x in enumerate(leaves) if _is_inexact(x))
    flat = Flat(lambda args: fun(*args), tree, leaves, range(len(leaves)), has_aux)
    closed = jax.make_jaxpr(flat)(*leaves)
    if not sows_in(closed.jaxpr):
        return plain()
    level = Jvp(len(leaves), moving, flat.n_out)
    outs = bind_traced(level, closed, [*leaves, *(moves[i] for i in moving)])
    n, m = flat.n_out, flat.n_out + sum(flat.inexact)
    given = iter(outs[n:m])
    dout = [
        next(given) if moved else np.zeros(shape, _FLOAT0)
        for shape, moved in zip(flat.shapes, flat.inexact)
    ]
    y, dy = (jax.tree.unflatten(flat.out_tree, leaves) for leaves in (outs[:n], dout))
    return (y, dy, jax.tree.unflatten(flat.aux_tree, outs[m:])) if has_aux else (y, dy)


def _prefix(axes, tree):
    """A prefix tree of axes, one axis a leaf."""
    return jax.tree.leaves(
        jax.tree.broadcast(axes, tree, is_leaf=lambda a: a is None), is_leaf=lambda a: a is None
    )


def vmap(
    fun,
    in_axes=0,
    out_axes=0,
    axis_name=None,
    axis_size=None,
    spmd_axis_name=None,
    sum_match=False,
    *,
    sow_axes=None,
):
    """``jax.vmap`` whose named values are laid out as the outputs are, by ``out_axes``.

    Where the outputs differ in ``out_axes``, or a named value has too small a rank for it,
    ``sow_axes`` (an integer) says which axis of the named values is the batch.

    >>> import jax.numpy as jnp
    >>> from pybridge.harvest import reap, sow, vmap
    >>> f = lambda x: sow(x**3, "x3") + 1
    >>> out, named = reap(vmap(f, in_axes=0, out_axes=-1))(jnp.ones((3, 7)))
    >>> out.shape, named["x3"].value.shape
    ((7, 3), (7, 3))
    """
    names = {"axis_name": axis_name, "spmd_axis_name": spmd_axis_name}
    names |= {"sum_match": sum_match} if sum_match else {}
    plain = jax.vmap(fun, in_axes, out_axes, axis_size=axis_size, **names)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        if active.value is None:
            return plain(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        spec = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        try:
            axes = _prefix(spec, args) + [0] * len(jax.tree.leaves(kwargs))
            moving = tuple(i for i, a in enumerate(axes) if a is not None)
            operands = [leaves[i] for i in moving]
            mapped = tuple(axes[i] for i in moving)
            avals = [unmapped(x, a) for x, a in zip(operands, mapped)]
            sizes = {np.shape(x)[a] for x, a in zip(operands, mapped)}
            sizes |= set() if axis_size is None else {axis_size}
            (size,) = sizes
        except (ValueError, TypeError, IndexError, ZeroDivisionError):
            return plain(*args, **kwargs)  # what JAX does not accept, JAX explains
        flat = Flat(lambda ak: fun(*ak[0], **ak[1]), tree, leaves, moving, False)
        env = None if axis_name is None else [(axis_name, size)]
        closed = jax.make_jaxpr(flat, axis_env=env)(*avals)
        if not sows_in(closed.jaxpr):
            return plain(*args, **kwargs)
        out = _prefix(out_axes, jax.tree.unflatten(flat.out_tree, [0] * flat.n_out))
        level = Vmap(mapped, tuple(out), _sow_axis(out, sow_axes), size, tuple(names.items()))
        return jax.tree.unflatten(flat.out_tree, bind_traced(level, closed, operands))

    return wrapped


def _sow_axis(out_axes, sow_axes):
    if sow_axes is not None:
        return sow_axes
    found = {a for a in out_axes if a is not None} or {0}
    if len(found) > 1:
        raise HarvestError(
            f"vmap: out_axes is {tuple(out_axes)}, so the layout of the named values is not determined; "
            f"accepted: one axis for all outputs, or sow_axes. Give vmap(..., sow_axes=<integer>)."
        )
    return found.pop()
