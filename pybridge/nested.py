"""nested_grad and its family: inner derivatives that JAX differentiates further.

The mathematics, for a scalar loss f(x, ps) and g = grad_x f. The pullback of g for a cotangent v is

    (H_xx v, H_px v) = d/de grad_(x, ps) f(x + e v, ps) at e = 0,

one reverse pass at the point x + e v: forward over reverse, with the parameters' part kept. That
formula (for h(x, p) = g(grad_x f), grad_p h = d/da grad_p f(x + a grad g, p)) is what a Julia loss
is differentiated by, at any order, through the primitive of ``pybridge.jets``. A Python loss needs
none of it: JAX's own composition of transformations does the same and is the faster, so it is used.
Inside ``pybridge.reap`` the same composition is made of harvest's transformations, which keep what the
loss sows, and serves a Julia loss that sows, too.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from pybridge import jets
from pybridge.engines import resolve


def nested_grad(loss, x, ps=None, *, engine=None, argnums=0, has_aux=False):
    """The gradient of ``loss`` in ``x``, as a value that JAX differentiates further.

    Args:
      loss: ``loss(x, ps) -> scalar``, or ``loss(x) -> scalar`` where ``ps`` is None. A Python
        callable (evaluated by JAX), a ``pybridge.julia_function``, or a callable Julia object that
        came from juliacall.
      x: a pytree of float arrays or scalars of any shape.
      ps: a pytree of arrays. Integer, boolean and key leaves are passed through; they have no
        derivative, and their cotangents are ``float0``.
      engine: None chooses by ``loss``; "jax" or "julia" insists.
      argnums: as in ``jax.grad``, over (x, ps): 0 (default) for x, 1 for ps, (0, 1) for both.
      has_aux: as in ``jax.grad``: ``loss`` returns ``(scalar, aux)``.

    Returns:
      A pytree like ``x`` (what ``argnums`` names) of the same shapes and dtypes; with ``has_aux``
      the pair ``(gradient, aux)``. It can be differentiated in x and in ps, in forward and in
      reverse mode, to any order, and composes with ``jax.jit``, ``jax.vmap`` and control flow.
      Under ``vmap`` over x with shared ps it is one call into the engine, with one cotangent of ps.

    Raises:
      TypeError: ``loss`` is not callable or belongs to another engine; a leaf that is to be
        differentiated is not a float (its path is named). Complex leaves are an error in Julia;
        in JAX they have what ``jax.grad`` gives, d/d(real) - i d/d(imaginary).
      ValueError: ``loss`` does not return a scalar; a leaf to be differentiated has no elements.
      JuliaError: the Julia function threw, with Julia's message.

    A gradient penalty, differentiated in the parameters:

    >>> import jax, jax.numpy as jnp
    >>> from pybridge import nested_grad
    >>> loss = lambda x, ps: jnp.sum(jnp.tanh(ps["W"] @ x) ** 2)
    >>> penalty = lambda x, ps: jnp.sum(nested_grad(loss, x, ps) ** 2)
    >>> x, ps = jnp.ones(3), {"W": jnp.eye(3) / 2}
    >>> jax.grad(penalty, argnums=1)(x, ps)["W"].shape
    (3, 3)
    """
    out = _value_and_grad(loss, x, ps, engine, argnums, has_aux, value=False)
    (_, aux), grad = out if has_aux else ((None, None), out[1])
    return (grad, aux) if has_aux else grad


def nested_value_and_grad(loss, x, ps=None, *, engine=None, argnums=0, has_aux=False):
    """``(loss(x, ps), grad)``; everything else as ``nested_grad``.

    With ``has_aux`` the result is ``((value, aux), grad)``, as in ``jax.value_and_grad``.

    >>> from pybridge import nested_value_and_grad
    >>> nested_value_and_grad(lambda x: x**2, 3.0)
    (Array(9., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    return _value_and_grad(loss, x, ps, engine, argnums, has_aux, value=True)


def hvp(loss, x, v, ps=None, *, engine=None):
    """The Hessian-vector product H_xx v of ``loss`` in ``x``, forward over reverse.

    Args:
      loss, x, ps, engine: as in ``nested_grad``.
      v: a pytree like ``x``, with its shapes.

    Returns:
      A pytree like ``x``.

    >>> import jax.numpy as jnp
    >>> from pybridge import hvp
    >>> hvp(lambda x: jnp.sum(x**3), jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0]))
    Array([6., 0.], dtype=float32)
    """
    return _mixed(loss, x, v, ps, engine, parameters=False)[0]


def mixed_vjp(loss, x, v, ps=None, *, engine=None):
    """``(H_xx v, H_px v)`` from one pass: the pullback of ``nested_grad`` for the cotangent ``v``.

    Args:
      loss, x, ps, engine: as in ``nested_grad``.
      v: a pytree like ``x``, with its shapes.

    Returns:
      A pytree like ``x`` and one like ``ps`` (None where ``ps`` is None; ``float0`` zeros at leaves
      of ``ps`` that are not floats).

    >>> import jax.numpy as jnp
    >>> from pybridge import mixed_vjp
    >>> mixed_vjp(lambda x, p: p * x**3, 2.0, 1.0, 5.0)     # 6 p x, 3 x^2
    (Array(60., dtype=float32, weak_type=True), Array(12., dtype=float32, weak_type=True))
    """
    return _mixed(loss, x, v, ps, engine, parameters=True)


def nested_jacobian(h, x, ps=None, *, engine=None):
    """The Jacobian of an array-valued ``h(x, ps)`` in ``x``, to be differentiated further.

    Forward mode where x has no more elements than the result, else reverse mode.

    Args:
      h: a function with any pytree of float arrays as its value, on either engine.
      x, ps, engine: as in ``nested_grad``.

    Returns:
      As ``jax.jacobian``: a pytree like ``h``'s value of pytrees like ``x``, each leaf of shape
      ``value.shape + x.shape``.

    >>> import jax.numpy as jnp
    >>> from pybridge import nested_jacobian
    >>> nested_jacobian(lambda x, ps: ps @ x, jnp.ones(2), jnp.ones((3, 2))).shape
    (3, 2)
    """
    _, h = resolve(h, engine, "h")
    args = _arguments(x, ps)
    _check_differentiable(x, "x")
    _check_real(x, "the Jacobian")
    out = jax.eval_shape(h, *args)
    _check_result(out, h)
    size = lambda tree: sum(np.size(leaf) for leaf in jax.tree.leaves(tree))
    by = _transformations()
    jacobian = by.jacfwd if size(x) <= size(out) else by.jacrev
    return jacobian(h)(*args)


def laplacian(loss, x, ps=None, *, engine=None):
    """The trace of the Hessian of ``loss`` in ``x``: the sum of its unmixed second derivatives.

    Args:
      loss, x, ps, engine: as in ``nested_grad``.

    Returns:
      A scalar of ``loss``'s dtype, to be differentiated further. It takes one second-order pass an
      element of x, all in one call into the engine.

    >>> import jax.numpy as jnp
    >>> from pybridge import laplacian
    >>> laplacian(lambda x: jnp.sum(x**4), jnp.array([1.0, 2.0]))     # 12 + 48
    Array(60., dtype=float32)
    """
    engine, loss = resolve(loss, engine)
    args = _arguments(x, ps)
    _check_differentiable(x, "x")
    _check_real(x, "the Laplacian")
    basis, count = _basis(x)
    by = _transformations()
    if engine is not None and not _sows(by, loss, args):
        _check_scalar(jets.result_struct(engine, loss, args), loss)
        directions = (basis, *(None for _ in args[1:]))
        return jets.summed_second_derivative(engine, loss, args, directions, count)
    loss = _scalar(loss)
    gradient = by.grad(lambda x: loss(x, *args[1:]))

    def curvature(e):
        return _inner(e, by.jvp(gradient, (x,), (e,))[1])

    return jnp.sum(by.vmap(curvature)(basis))


def custom_vjp(f):
    """A Julia function as a plain ``jax.custom_vjp`` object, its forward and backward in Julia.

    For those who want just that rule. It refuses forward mode, and under ``vmap`` with shared
    parameters makes one cotangent of them a sample, as every ``custom_vjp`` does; the Julia function
    itself, called as it is, does neither.

    Args:
      f: a ``pybridge.julia_function``, or a callable Julia object that came from juliacall.

    Returns:
      A ``jax.custom_vjp`` of the same signature. Its backward is differentiable again.

    Raises:
      TypeError: ``f`` is a Python callable.
    """
    engine, f = resolve(f, None, "f")
    if engine is None:
        raise TypeError(
            "custom_vjp hands a Julia function to JAX; f is a Python callable, which JAX "
            "differentiates by itself. Use it as it is, or jax.custom_vjp for a rule of your own."
        )

    def primal(*args):
        return f(*args)

    def forward(*args):
        return f(*args), args

    def backward(args, cotangent):
        covector = [None if jets.is_zero(leaf) else leaf for leaf in jax.tree.leaves(cotangent)]
        leaves, tree = jax.tree.flatten(args)
        out = jets.cotangent(engine, f, args, covector)
        return jax.tree.unflatten(tree, _with_float0(leaves, out))

    primal.__name__ = f.__name__
    rule = jax.custom_vjp(primal)
    rule.defvjp(forward, backward)
    return rule


# ---- the two engines -----------------------------------------------------------------------------


def _transformations():
    """JAX's; at work inside ``reap`` or ``plant``, harvest's, which are JAX's where nothing is sown."""
    harvest = sys.modules.get("pybridge.harvest")  # who has not imported it sows nothing
    return jax if harvest is None or not harvest.at_work() else harvest


def _sows(by, loss, args):
    """Whether a Julia loss sows, and somebody reaps: what is in its forms has no Jacobians."""
    return by is not jax and by.sows(loss, args)


def _value_and_grad(loss, x, ps, engine, argnums, has_aux, value):
    """``(value or (value, aux), grad)``; the value is None where neither it nor aux is asked for."""
    engine, loss = resolve(loss, engine)
    args = _arguments(x, ps)
    wanted = _wanted(argnums, len(args))
    for i, what in enumerate(("x", "ps")[: len(args)]):
        if i in wanted:
            _check_differentiable(args[i], what, integers=what == "ps")
    by = _transformations()
    if engine is None or _sows(by, loss, args):
        loss = _scalar(loss, has_aux)
        transform = by.value_and_grad if value or has_aux else by.grad
        out = transform(loss, argnums, has_aux=has_aux, allow_int=True)(*args)
        return out if value or has_aux else (None, out)
    struct = jets.result_struct(engine, loss, args)
    if has_aux:
        if not (isinstance(struct, tuple) and len(struct) == 2):
            raise TypeError(
                f"has_aux=True: {loss.__name__!r} must return a pair (value, aux); "
                f"it returned {_shapes(struct)}."
            )
        _check_scalar(struct[0], loss)
    else:
        _check_scalar(struct, loss)
    covector = [None] * len(jax.tree.leaves(struct))
    covector[0] = jnp.ones((), jax.tree.leaves(struct)[0].dtype)
    out = jets.cotangent(
        engine, loss, args, covector, wanted=[i in wanted for i in range(len(args))]
    )
    leaves, tree = jax.tree.flatten(args)
    grads = jax.tree.unflatten(tree, _with_float0(leaves, out))
    grad = (
        tuple(grads[i] for i in wanted) if isinstance(argnums, (tuple, list)) else grads[wanted[0]]
    )
    return (loss(*args) if value or has_aux else None), grad


def _mixed(loss, x, v, ps, engine, parameters):
    engine, loss = resolve(loss, engine)
    args = _arguments(x, ps)
    _check_differentiable(x, "x")
    v = _check_direction(x, v)
    leaves, tree = jax.tree.flatten(args)
    x_count = len(jax.tree.leaves(x))
    by = _transformations()
    if engine is not None and not _sows(by, loss, args):
        struct = jets.result_struct(engine, loss, args)
        _check_scalar(struct, loss)
        covector = [jnp.ones((), struct.dtype)]
        directions = [(v, *(None for _ in args[1:]))]
        wanted = [True, parameters][: len(args)]
        out = jets.cotangent(engine, loss, args, covector, directions, wanted)
    else:
        loss = _scalar(loss)
        fixed = args[1:]

        def gradient(x):
            if not parameters:
                return by.grad(lambda x: loss(x, *fixed))(x)
            return by.grad(lambda floats: loss(*_merge(floats, args)))(_floats((x, *fixed)))

        products = iter(jax.tree.leaves(by.jvp(gradient, (x,), (v,))[1]))
        active = [_is_float(leaf) and (parameters or n < x_count) for n, leaf in enumerate(leaves)]
        out = [next(products) if on else None for on in active]
    full = jax.tree.unflatten(tree, _with_float0(leaves, out))
    return full[0], full[1] if len(args) > 1 and parameters else None


# ---- arguments, and what is said when they are wrong ------------------------------------------------


def _arguments(x, ps):
    args = (x,) if ps is None else (x, ps)
    for argument, tree in zip(("x", "ps"), args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            _check_leaf(argument + jax.tree_util.keystr(path), leaf)
    return args


def _check_leaf(name, leaf):
    try:
        jax.typeof(leaf)
    except (TypeError, OverflowError) as error:
        kind = f"dtype {leaf.dtype}" if hasattr(leaf, "dtype") else f"type {type(leaf).__name__}"
        raise TypeError(
            f"{name} is of {kind}, which is no JAX value; accepted are numeric arrays, numbers and "
            "None. Put text and objects into a closure; make numbers an array of a JAX dtype."
        ) from error


def _wanted(argnums, count):
    given = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for i in given:
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or not -count <= i < count:
            what = "(x, ps)" if count == 2 else "(x,): ps is None"
            raise ValueError(f"argnums={argnums!r}: accepted are positions in {what}.")
    positions = [int(i) % count for i in given]
    if not positions or len(set(positions)) < len(positions):
        raise ValueError(f"argnums={argnums!r}: name at least one position, and none twice.")
    return positions


def _dtype(leaf):
    """The dtype that the leaf has once it is a JAX array; a key's is an extended one."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    extended = jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
    return dtype if extended else jax.dtypes.canonicalize_dtype(dtype)


def _is_float(leaf):
    return jax.dtypes.issubdtype(_dtype(leaf), np.inexact)


def _floats(tree):
    """The tree with None at every leaf that is not a float."""
    return jax.tree.map(lambda leaf: leaf if _is_float(leaf) else None, tree)


def _merge(floats, tree):
    """The tree with its floats replaced."""
    new = iter(jax.tree.leaves(floats))
    return jax.tree.map(lambda leaf: next(new) if _is_float(leaf) else leaf, tree)


def _check_differentiable(tree, argument, integers=False):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(
            f"{argument} has no leaves, so there is nothing to differentiate; it is {tree!r}."
        )
    for path, leaf in leaves:
        name = argument + jax.tree_util.keystr(path)
        if not _is_float(leaf):
            if integers:
                continue
            raise TypeError(
                f"{name} has dtype {_dtype(leaf)}, which has no derivative; accepted are floats. "
                f"Cast it (jnp.asarray(value, jnp.float32)), or move it into ps, which may hold it."
            )
        if np.size(leaf) == 0:
            raise ValueError(
                f"{name} has shape {np.shape(leaf)}: no elements, so nothing to differentiate."
            )


def _check_direction(x, v):
    want, got = jax.tree.structure(x), jax.tree.structure(v)
    if want != got:
        raise ValueError(f"v must be a pytree like x; x is {want}, v is {got}.")

    def check(path, leaf, direction):
        name = "v" + jax.tree_util.keystr(path)
        _check_leaf(name, direction)
        if np.shape(leaf) != np.shape(direction):
            raise ValueError(
                f"{name} has shape {np.shape(direction)}; x there has shape {np.shape(leaf)}."
            )
        if not jnp.issubdtype(_dtype(direction), np.number):
            raise TypeError(f"{name} has dtype {_dtype(direction)}; accepted are numbers.")
        if jnp.issubdtype(_dtype(direction), np.complexfloating) and not jnp.issubdtype(
            _dtype(leaf), np.complexfloating
        ):
            raise TypeError(f"{name} is complex where x is real.")
        return jnp.asarray(direction, _dtype(leaf))

    return jax.tree_util.tree_map_with_path(check, x, v)


def _check_real(x, what):
    if any(jnp.issubdtype(_dtype(leaf), np.complexfloating) for leaf in jax.tree.leaves(x)):
        raise TypeError(
            f"x is complex, and {what} of a function of complex numbers is not defined here. "
            "Pass real and imaginary parts as two float arrays."
        )


def _check_result(out, h):
    name = getattr(h, "__name__", type(h).__name__)
    leaves = jax.tree_util.tree_leaves_with_path(out)
    if not leaves:
        raise TypeError(f"h {name!r} must return float arrays; it returned {out!r}.")
    for path, leaf in leaves:
        if not jax.dtypes.issubdtype(leaf.dtype, np.floating):
            raise TypeError(
                f"h {name!r} must return float arrays; its result{jax.tree_util.keystr(path)} has "
                f"dtype {leaf.dtype}, which has no derivative. Return it from another function."
            )


def _scalar(loss, has_aux=False):
    def checked(*args):
        out = loss(*args)
        if has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    f"has_aux=True: loss must return a pair (value, aux); it returned {_shapes(out)}."
                )
            _check_scalar(out[0], loss)
        else:
            _check_scalar(out, loss)
        return out

    return checked


def _check_scalar(out, loss):
    name = getattr(loss, "__name__", type(loss).__name__)
    if not hasattr(out, "dtype") and not isinstance(out, (bool, int, float, complex)):
        raise TypeError(
            f"loss {name!r} must return one scalar; it returned {_shapes(out)}. "
            "Return the scalar alone, or (scalar, aux) with has_aux=True."
        )
    if np.shape(out) != ():
        raise ValueError(
            f"loss {name!r} must return a scalar; it returned an array of shape {np.shape(out)}. "
            "Sum or average it, or use nested_jacobian."
        )
    if not jax.dtypes.issubdtype(_dtype(out), np.floating):
        raise TypeError(f"loss {name!r} must return a real float; it returned dtype {_dtype(out)}.")


def _shapes(tree):
    return str(
        jax.tree.map(
            lambda a: f"{_dtype(a)}{list(np.shape(a))}" if hasattr(a, "dtype") else repr(a), tree
        )
    )


def _with_float0(leaves, cotangents):
    """Cotangents with ``float0`` zeros where a leaf has no derivative, as JAX has them."""
    return [
        np.zeros(np.shape(leaf), jax.dtypes.float0) if ct is None and not _is_float(leaf) else ct
        for leaf, ct in zip(leaves, cotangents)
    ]


def _basis(x):
    """The unit vectors of x, stacked along a new first axis of every leaf, and their number."""
    leaves, tree = jax.tree.flatten(x)
    sizes = [np.size(leaf) for leaf in leaves]
    count, start, stacked = sum(sizes), 0, []
    for leaf, size in zip(leaves, sizes):
        rows = jnp.eye(count, size, -start, dtype=_dtype(leaf))
        stacked.append(rows.reshape(count, *np.shape(leaf)))
        start += size
    return jax.tree.unflatten(tree, stacked), count


def _inner(a, b):
    return sum(jnp.sum(p * q) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
