"""Loops with a bound: called like ``jax.lax.while_loop``, differentiable in both modes."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from pybridge._loops import primitive, tracing

__all__ = ["bounded_fori_loop", "bounded_scan_until", "bounded_while_loop"]

_ON_LIMIT = ("return", "nan", "raise")


def bounded_while_loop(
    cond_fun,
    body_fun,
    init_val,
    max_steps,
    *,
    checkpoints="auto",
    on_limit="return",
    return_steps=False,
):
    """Repeat ``body_fun`` while ``cond_fun`` holds, at most ``max_steps`` times; differentiable.

    The value is that of::

        val, steps = init_val, 0
        while steps < max_steps and cond_fun(val):
            val, steps = body_fun(val), steps + 1

    Unlike ``jax.lax.while_loop`` it has a reverse mode, and unlike a scan of ``max_steps`` masked
    steps its gradient costs what the steps taken cost. It composes to any order with ``jit``,
    ``grad``, ``jvp``, ``vjp``, ``vmap`` and ``checkpoint``, and both functions may close over
    traced values, which get gradients too. Under ``vmap`` lanes may stop at different times; a lane
    that has stopped is not evaluated on stale values. Derivatives are those of the steps taken: the
    number of steps counts as a constant. Inside ``jax.shard_map`` derivatives need its
    ``check_vma=False``.

    Args:
      cond_fun: function from the carry to a boolean scalar.
      body_fun: function from the carry to a carry of the same structure, shapes and dtypes.
      init_val: the initial carry, a pytree of arrays and numbers of any shapes. Integer, boolean
        and key leaves are allowed and have no gradient.
      max_steps: the most steps to take, a Python or NumPy integer of at least 0 and below 2**31.
        None means no bound, and then there is forward mode only.
      checkpoints: what the forward pass keeps for the reverse pass. ``"auto"`` keeps what makes
        the gradient fastest while it fits a budget of 16 MiB, which lanes of ``vmap`` share, and
        checkpoints beyond it: then time grows by a factor of the logarithm of ``max_steps``. An
        integer of at least 1 is the number of carries that may be kept at once. Reverse mode over
        reverse mode, once it checkpoints, may need more than either: up to about
        ``16 * max_steps**(1/4)`` carries.
      on_limit: what to do if the loop ends at ``max_steps`` with ``cond_fun`` still true.
        ``"return"`` the carry, fill its floating-point leaves with ``"nan"``, or ``"raise"`` an
        error when the loop has run.
      return_steps: also return the number of steps taken.

    Returns:
      The final carry, or a tuple of it and the number of steps, an int32 scalar.

    Raises:
      TypeError: ``max_steps`` is not an integer; a leaf of ``init_val`` is not an array;
        ``cond_fun`` does not return a boolean scalar; ``body_fun`` changes the carry's structure, a
        shape or a dtype.
      ValueError: ``max_steps`` is negative, or 2**31 or more; an option is not among those accepted; reverse mode of
        a loop with ``max_steps=None``.
      RuntimeError: with ``on_limit="raise"``, the limit was reached. From compiled code it arrives
        within the error that jax makes of it, when the result is waited for.

    Example: Newton's method for a square root, and its derivative.

    >>> import jax
    >>> def sqrt(a):
    ...     far = lambda x: abs(x * x - a) > 1e-6 * a
    ...     return bounded_while_loop(far, lambda x: (x + a / x) / 2, a, max_steps=50)
    >>> print(f"{sqrt(9.0):.4f} {jax.grad(sqrt)(9.0):.4f}")
    3.0000 0.1667

    The method: the forward loop saves what each step's derivative needs, a second loop runs the
    steps' vector-Jacobian products from the last to the first (Griewank and Walther, Evaluating
    Derivatives, 2nd edition, 2008, chapters 3 and 12).
    """
    _check_callable(cond_fun=cond_fun, body_fun=body_fun)
    bound = _check_bound(max_steps)
    _check_on_limit(on_limit)
    _check_checkpoints(checkpoints)
    loop = tracing.trace(cond_fun, body_fun, init_val)
    if bound == 0:
        steps, carry = jnp.int32(0), loop.carry
    else:
        steps, *carry = primitive.bind(
            loop.control,
            loop.consts,
            loop.carry,
            [],
            cond=loop.cond,
            step=loop.step,
            bound=bound,
            reverse=False,
            checkpoints=checkpoints,
        )
    if on_limit != "return" and bound is not None:
        (more,) = jaxpr_as_fun(loop.cond)(*loop.control, *carry)
        carry = _at_limit(on_limit, more & (steps == bound), carry, bound)
    out = loop.rebuild(carry)
    return (out, steps) if return_steps else out


def bounded_fori_loop(
    lower,
    upper,
    body_fun,
    init_val,
    max_steps=None,
    *,
    checkpoints="auto",
    on_limit="return",
    return_steps=False,
):
    """``jax.lax.fori_loop`` whose bounds may be traced and whose gradient costs the steps taken.

    The value is that of::

        val = init_val
        for i in range(lower, min(upper, lower + max_steps)):
            val = body_fun(i, val)

    Args:
      lower: the first index, an integer scalar, traced or not.
      upper: one past the last index, an integer scalar, traced or not.
      body_fun: function from the index and the carry to the next carry.
      init_val: the initial carry, as for :func:`bounded_while_loop`.
      max_steps: the most steps to take. None means ``upper - lower`` where both are Python or NumPy
        integers, and otherwise no bound and forward mode only.
      checkpoints, on_limit, return_steps: as for :func:`bounded_while_loop`; the limit is reached
        where ``upper - lower`` is more than ``max_steps``.

    Returns:
      The final carry, or a tuple of it and the number of steps, an int32 scalar.

    Raises:
      TypeError: ``lower`` or ``upper`` is not an integer scalar.
      ValueError: ``lower`` or ``upper`` does not fit the index's dtype. Otherwise as
        :func:`bounded_while_loop`.

    Example: the gradient of a power whose exponent is traced.

    >>> import jax
    >>> power = lambda x, n: bounded_fori_loop(0, n, lambda i, y: y * x, 1.0, max_steps=10)
    >>> print(jax.jit(jax.grad(power))(2.0, 3))
    12.0
    """
    for name, value in (("lower", lower), ("upper", upper)):
        aval = jax.typeof(value) if isinstance(value, jax.Array) else np.asarray(value)
        if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.integer):
            raise TypeError(f"{name} is {value!r}: it must be an integer scalar")
    _check_callable(body_fun=body_fun)
    static = all(isinstance(b, (int, np.integer)) for b in (lower, upper))
    if max_steps is None and static:
        max_steps = max(0, int(upper) - int(lower))
    dtype = jnp.result_type(lower, upper)
    for name, value in (("lower", lower), ("upper", upper)):
        fits = not isinstance(value, (int, np.integer)) or int(value) in _range(dtype)
        if not fits:
            raise ValueError(f"{name} is {value}: it does not fit the index's dtype, {dtype}")
    lower, upper = lax.convert_element_type(lower, dtype), lax.convert_element_type(upper, dtype)
    out = bounded_while_loop(
        lambda state: state[0] < upper,
        lambda state: (state[0] + jnp.ones((), dtype), body_fun(state[0], state[1])),
        (lower, init_val),
        max_steps,
        checkpoints=checkpoints,
        on_limit=on_limit,
        return_steps=return_steps,
    )
    if return_steps:
        (_, val), steps = out
        return val, steps
    return out[1]


def bounded_scan_until(
    cond_fun,
    body_fun,
    init_val,
    max_steps,
    *,
    checkpoints="auto",
    on_limit="return",
    return_steps=False,
):
    """A bounded loop that also stacks an output of every step, up to the stop.

    The value is that of::

        val, ys = init_val, zeros of max_steps rows
        while steps < max_steps and cond_fun(val):
            val, ys[steps] = body_fun(val)
            steps = steps + 1

    Args:
      cond_fun: function from the carry to a boolean scalar.
      body_fun: function from the carry to a pair: the next carry, and the step's output, a pytree
        of arrays.
      init_val: the initial carry, as for :func:`bounded_while_loop`.
      max_steps: the most steps to take, a Python or NumPy integer of at least 0 and below 2**31.
      checkpoints, on_limit, return_steps: as for :func:`bounded_while_loop`.

    Returns:
      ``(val, ys)``, or ``((val, ys), steps)``. Each leaf of ``ys`` has a leading axis of length
      ``max_steps``; its rows from ``steps`` on are zero.

    Raises:
      TypeError: ``max_steps`` is None or ``body_fun`` does not return a pair; otherwise as
        :func:`bounded_while_loop`.

    Example: the trajectory of a halving, up to its stop.

    >>> go = lambda x: x > 1.0
    >>> (x, xs), n = bounded_scan_until(go, lambda x: (x / 2, x), 6.0, 5, return_steps=True)
    >>> print(x, xs, n)
    0.75 [6.  3.  1.5 0.  0. ] 3
    """
    _check_callable(cond_fun=cond_fun, body_fun=body_fun)
    bound = _check_bound(max_steps)
    if bound is None:
        raise TypeError(
            "max_steps is None: bounded_scan_until stacks that many rows, so it must be an integer"
        )

    def pair(val):
        out = body_fun(val)
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(f"body_fun must return a pair (carry, output); it returned {out!r}")
        return out

    rows = jax.eval_shape(lambda val: pair(val)[1], init_val)
    ys = jax.tree.map(lambda a: jnp.zeros((bound, *a.shape), a.dtype), rows)

    def advance(state):
        val, i, ys = state
        val, y = pair(val)
        write = lambda buffer, row: lax.dynamic_update_index_in_dim(buffer, row, i, 0)
        return val, i + jnp.int32(1), jax.tree.map(write, ys, y)

    if bound == 0:
        advance = lambda state: (pair(state[0])[0], *state[1:])
    out = bounded_while_loop(
        lambda state: cond_fun(state[0]),
        advance,
        (init_val, jnp.int32(0), ys),
        bound,
        checkpoints=checkpoints,
        on_limit=on_limit,
        return_steps=return_steps,
    )
    (val, _, ys), steps = out if return_steps else (out, None)
    return ((val, ys), steps) if return_steps else (val, ys)


# ---- the limit ----


def _at_limit(on_limit, hit, carry, bound):
    def check(hit):
        if np.any(hit):
            raise RuntimeError(
                f"a bounded loop took max_steps={bound} steps and cond_fun still holds: raise "
                'max_steps, or use on_limit="return" or on_limit="nan"'
            )
        return np.zeros(np.shape(hit), np.bool_)

    if on_limit == "raise":
        if not isinstance(hit, jax.core.Tracer):
            check(hit)
            return carry
        flag = jax.ShapeDtypeStruct((), np.bool_)
        hit = jax.pure_callback(check, flag, hit, vmap_method="expand_dims")

    # A factor, so that it reaches the gradient too: as NaN and not as a silent zero, or as the
    # error, which a gradient that does not need the value would otherwise drop as dead code.
    spoil = lambda x: x * jnp.where(hit, jnp.nan, 1).astype(x.dtype)
    carry = [spoil(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in carry]
    return lax.optimization_barrier((carry, hit))[0] if on_limit == "raise" else carry


# ---- arguments ----


def _check_callable(**functions):
    for name, value in functions.items():
        if not callable(value):
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: it must be a function")


def _check_bound(max_steps):
    if max_steps is None:
        return None
    try:
        if isinstance(max_steps, (bool, np.bool_)):
            raise TypeError
        bound = operator.index(max_steps)
    except TypeError:
        raise TypeError(
            f"max_steps is {max_steps!r}, a {type(max_steps).__name__}: it must be a Python or NumPy "
            "integer, known when the loop is traced, or None (forward mode only)"
        ) from None
    if not 0 <= bound < 2**31:
        raise ValueError(f"max_steps is {bound}: it must be at least 0 and below 2**31")
    return bound


def _range(dtype):
    return range(int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max) + 1)


def _check_on_limit(on_limit):
    if not isinstance(on_limit, str) or on_limit not in _ON_LIMIT:
        accepted = ", ".join(map(repr, _ON_LIMIT))
        raise ValueError(f"on_limit is {on_limit!r}: it must be one of {accepted}")


def _check_checkpoints(checkpoints):
    is_count = isinstance(checkpoints, (int, np.integer)) and not isinstance(checkpoints, bool)
    is_auto = isinstance(checkpoints, str) and checkpoints == "auto"
    if not is_auto and not (is_count and checkpoints >= 1):
        raise ValueError(
            f'checkpoints is {checkpoints!r}: it must be "auto" or an integer of at least 1, the '
            "number of carries that may be kept"
        )
