"""Ties, NaN and identities: one rule in every mode and order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from windows_reference import OURS

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


# Cells and init of one window each, and the share of each cell and of init under ties="split".
ROWS = [
    ([2, 1, 2, 2], "identity", [1 / 3, 0, 1 / 3, 1 / 3, 0]),
    ([-np.inf] * 4, "identity", [1 / 4] * 4 + [0]),
    ([1, np.nan, 5, np.nan], "identity", [0, 1 / 2, 0, 1 / 2, 0]),
    ([2, 1, 2, 2], 2, [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4]),
    ([2, 1, 2, 2], 1, [1 / 3, 0, 1 / 3, 1 / 3, 0]),
    ([2, 1, 2, 2], 3, [0, 0, 0, 0, 1]),
    ([1, np.nan, 5, np.nan], 1, [0, 1 / 2, 0, 1 / 2, 0]),
    ([1, 2, 5, 3], np.nan, [0, 0, 0, 0, 1]),
    ([1, np.nan, 5, 3], np.nan, [0, 1 / 2, 0, 0, 1 / 2]),
]


@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize(
    ("name", "window", "traced"),
    [("max", 4, True), ("max", 4, False), ("max", 40, True), ("min", 4, True)],
)
def test_ties(name, window, traced, ties):
    """One rule in jvp, vjp, and under a second derivative, with padding before the cells."""
    sign = 1.0 if name == "max" else -1.0
    rows = ROWS if traced else [row for row in ROWS if row[1] == "identity"]
    x = sign * jnp.array([cells for cells, _, _ in rows], float)
    init = sign * jnp.array([-np.inf if i == "identity" else i for _, i, _ in rows], float)
    expected = np.array([shares for _, _, shares in rows])
    if ties == "first":
        # init is the first element
        winner = [next(i for i in (4, 0, 1, 2, 3) if shares[i] > 0) for shares in expected]
        expected = np.eye(5)[winner]

    def f(x, init):
        start = init if traced else -sign * np.inf
        pads = [(window - 4, 0)]
        return reduce_window(x, start, OURS[name], (window,), None, pads, ties=ties)[0]

    @jax.jit
    @jax.vmap
    def derivatives(x, init):
        gradient = jax.grad(f, (0, 1))
        # Two directions of the second derivative: zero, since the selection is locally constant.
        bend = jax.jvp(gradient, (x, init), (jnp.ones(4), 1.0))[1]
        return gradient(x, init), jax.jacfwd(f, (0, 1))(x, init), bend

    *orders, bend = derivatives(x, init)
    for found in orders:
        np.testing.assert_allclose(jnp.column_stack(found), expected)
    assert all((leaf == 0).all() for leaf in bend)


def test_nan_propagates_and_takes_the_cotangent():
    x = jnp.array([1.0, jnp.nan, 3.0, 2.0])
    for window, init in ((2, -jnp.inf), (2, 0.0), (4, -jnp.inf)):
        f = lambda x, w=window, i=init: reduce_window(x, i, lax.max, (w,))
        value = f(x)
        assert jnp.isnan(value[0])
        _, pullback = jax.vjp(f, x)
        assert pullback(jnp.ones_like(value))[0][1] == (2 if window == 2 else 1)


def test_logaddexp_with_minus_infinity():
    x = jnp.array([-jnp.inf, -jnp.inf, 1.0, 2.0])
    f = lambda x: reduce_window(x, -jnp.inf, jnp.logaddexp, (4,))[0]
    np.testing.assert_allclose(jax.grad(f)(x), [0, 0, *jax.nn.softmax(x[2:])], rtol=1e-12)
    assert jnp.isfinite(jax.hessian(f)(x)).all()


def test_second_derivative_of_logaddexp_where_elements_are_equal():
    """JAX drops custom_jvp rules inside a scan: with one, this Hessian was not even symmetric."""
    x = jnp.array([1.0, 1.0, 0.0])
    for op in (jnp.logaddexp, lambda a, b: jnp.logaddexp(a, b), lambda a, b: jnp.logaddexp(b, a)):
        f = jax.jit(jax.hessian(lambda x, op=op: reduce_window(x, 1.0, op, (3,))[0]))
        want = jax.hessian(lambda x: jax.nn.logsumexp(jnp.append(x, 1.0)))(x)
        np.testing.assert_allclose(f(x), want, rtol=1e-12)


@pytest.mark.parametrize("ties", ["first", "split"])
@pytest.mark.parametrize("window", [3, 40])
def test_ties_at_second_order_inside_a_scan(ties, window):
    x = jnp.array([2.0, 1.0, 2.0])
    share = jnp.array([1.0, 0.0, 0.0]) if ties == "first" else jnp.array([0.5, 0.0, 0.5])
    pool = lambda x: reduce_window(
        x, -jnp.inf, lax.max, (window,), None, [(window - 3, 0)], ties=ties
    )

    def f(x):
        return lax.scan(lambda c, _: (c * pool(x)[0], None), 1.0, None, 3)[0]

    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), 12 * share)
    for derivative in (jax.jacfwd(jax.grad(f)), jax.jacrev(jax.grad(f))):
        np.testing.assert_allclose(jax.jit(derivative)(x), 12 * jnp.outer(share, share))


def test_third_derivative_of_a_product():
    x = jnp.array([2.0, 3.0, 5.0])
    f = lambda x: reduce_window(x, 1.0, lax.mul, (3,))[0]
    third = jax.jit(jax.jacfwd(jax.jacrev(jax.grad(f))))(x)
    assert third[0, 1, 2] == 1.0
    assert third[0, 0, 1] == 0.0


def test_hessian_and_reverse_over_reverse_of_pooling():
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    f = lambda x: (reduce_window(x, 0.5, lax.max, (2,)) ** 3).sum()
    want = np.diag([0, 2 * 6 * 3.0, 0, 6 * 5.0])
    for hessian in (jax.hessian(f), jax.jacrev(jax.jacrev(f)), jax.jacfwd(jax.jacfwd(f))):
        np.testing.assert_allclose(jax.jit(hessian)(x), want)
    np.testing.assert_allclose(jax.hessian(f)(x), want)
