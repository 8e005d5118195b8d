"""What a reducer may be: any function, with captures, over several operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from windows_reference import first, loop, single

from pybridge import reduce_window

pytestmark = pytest.mark.usefixtures("x64", "unoptimized")


def test_recognised_by_what_it_computes():
    """Any spelling of max follows the one tie rule."""
    x = jnp.array([2.0, 2.0])
    for op in (lax.max, jnp.maximum, lambda a, b: jnp.maximum(a, b), lambda a, b: lax.max(b, a)):
        gradient = jax.grad(lambda x, op=op: reduce_window(x, -jnp.inf, op, (2,))[0])(x)
        np.testing.assert_array_equal(gradient, [1.0, 0.0])


def test_scalar_code_in_a_reducer():
    op = lambda a, b: lax.cond(a > b, lambda: a, lambda: jnp.stack([a, b]).max() + 0 * a)
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    np.testing.assert_array_equal(reduce_window(x, 0.0, op, (2,)), [3.0, 3.0, 5.0])
    jitted = jax.jit(jax.grad(lambda x: reduce_window(x, 0.0, op, (2,)).sum()))
    np.testing.assert_array_equal(jitted(x), [0.0, 2.0, 0.0, 1.0])


def test_associative_reducer_that_does_not_commute():
    """Affine maps (a, b): x -> a x + b, composed left to right; long windows by doubling."""
    then = lambda f, g: (g[0] * f[0], g[0] * f[1] + g[1])
    rng = np.random.default_rng(1)
    xs = [1 + 0.1 * rng.normal(size=60), rng.normal(size=60)]
    inits = [1.0, 0.0]
    args = ((40,), (3,), [(7, 12)])
    run = lambda associative: (
        lambda a, b: reduce_window((a, b), (1.0, 0.0), then, *args, associative=associative)
    )
    plain = loop(xs, inits, lambda f, g: list(then(f, g)), *args)
    for associative in (True, False, None):
        got = run(associative)(*xs)
        np.testing.assert_allclose(got[0], plain[0], rtol=1e-12)
        np.testing.assert_allclose(got[1], plain[1], rtol=1e-12)
    gradient = lambda flag: jax.grad(lambda *p: jnp.sin(run(flag)(*p)[1]).sum(), (0, 1))(*xs)
    for fast, slow in zip(gradient(True), gradient(False)):
        np.testing.assert_allclose(fast, slow, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [3, 40])
@pytest.mark.parametrize("jit", [False, True])
def test_captures_have_gradients(window, jit):
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=45), rng.normal(size=3)

    def f(x, weights, init):
        table = jnp.sin(weights)
        op = lambda a, b: table[0] * a + table[1] * b + weights[2] * jnp.tanh(b)
        return jnp.sin(reduce_window(x, init, op, (window,), (2,), [(1, 2)])).sum()

    def plain(x, weights, init):
        table = np.sin(weights)
        op = lambda a, b: table[0] * a + table[1] * b + weights[2] * np.tanh(b)
        return np.sin(loop([x], [init], single(op), (window,), (2,), [(1, 2)])[0]).sum()

    transform = jax.jit if jit else lambda g: g
    gradient = transform(jax.grad(f, argnums=(0, 1, 2)))(x, weights, 0.3)
    direction = [rng.normal(size=45), rng.normal(size=3), rng.normal()]
    got = sum(np.vdot(g, d) for g, d in zip(gradient, direction))
    np.testing.assert_allclose(got, first(plain, (x, weights, 0.3), direction), rtol=1e-6)


def test_captures_batched_by_vmap():
    x = jnp.arange(5.0)
    f = lambda w: reduce_window(x, 0.0, lambda a, b: a + w * b, (2,))
    ws = jnp.array([1.0, 2.0, -1.0])
    np.testing.assert_allclose(jax.vmap(f)(ws), jnp.stack([f(w) for w in ws]))


def test_no_nan_from_padding_reaches_anything():
    """A reducer that is singular on padding: division by the cell, with a capture."""
    x = jnp.array([1.0, 2.0, 4.0])

    def f(x, c, init):
        op = lambda a, b: a + jnp.sqrt(c * b) + jnp.log(b) / b
        return reduce_window(x, init, op, (2,), None, [(1, 1)]).sum()

    @jax.jit
    def everything(*p):
        gradient = jax.grad(f, argnums=(0, 1, 2))
        over = jax.jvp(gradient, p, (jnp.ones(3), 1.0, 1.0))[1]
        return f(*p), gradient(*p), over

    for leaf in jax.tree.leaves(everything(x, 2.0, 0.5)):
        assert jnp.isfinite(leaf).all()


def test_hypot_is_associative_and_singular_at_padding():
    x = jnp.arange(1.0, 41.0)
    op = lambda a, b: jnp.sqrt(a * a + b * b)
    f = lambda x, fast: reduce_window(x, 1.0, op, (36,), (5,), [(20, 9)], associative=fast).sum()
    np.testing.assert_allclose(f(x, True), f(x, False), rtol=1e-12)
    fast, slow = jax.grad(f)(x, True), jax.grad(f)(x, False)
    np.testing.assert_allclose(fast, slow, rtol=1e-10)


def test_custom_rules_of_a_reducer_hold_at_second_order():
    @jax.custom_jvp
    def double(b):
        return 2 * b

    double.defjvp(lambda p, t: (double(*p), 3 * p[0] * t[0]))  # on purpose not its derivative
    f = lambda x: jnp.sin(reduce_window(x, 0.0, lambda a, b: a + double(b), (2,)))[0]
    x = jnp.array([0.3, 0.4])
    inner = 2 * (x[0] + x[1])
    want = -jnp.sin(inner) * jnp.outer(3 * x, 3 * x) + jnp.cos(inner) * 3 * jnp.eye(2)
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(x), want, rtol=1e-12)


def test_the_reducer_is_traced_once():
    calls = []

    def op(a, b):
        calls.append((jnp.shape(a), jnp.shape(b)))
        return a + jnp.sin(b)

    jax.jit(jax.grad(lambda x: reduce_window(x, 0.0, op, (3, 3)).sum()))(jnp.ones((8, 8)))
    assert calls == [((), ())]


def test_argmax_with_an_integer_operand():
    x = jnp.array([1.0, 3.0, 2.0, -1.0, 4.0, 0.5])
    index = jnp.arange(6)

    def larger(a, b):
        take = b[0] > a[0]
        return jnp.where(take, b[0], a[0]), jnp.where(take, b[1], a[1])

    f = lambda x: reduce_window((x, index), (-jnp.inf, -1), larger, (3,))
    value, where = f(x)
    np.testing.assert_array_equal(where, [1, 1, 4, 4])
    np.testing.assert_array_equal(value, [3.0, 3.0, 4.0, 4.0])
    for transform in (lambda g: g, jax.jit):
        gradient = transform(jax.grad(lambda x: f(x)[0].sum()))(x)
        np.testing.assert_array_equal(gradient, [0, 2, 0, 0, 2, 0])
    tangents = jax.jvp(f, (x,), (jnp.arange(6.0),))[1]
    np.testing.assert_array_equal(tangents[0], [1.0, 1.0, 4.0, 4.0])
    assert tangents[1].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(jax.hessian(lambda x: (f(x)[0] ** 2).sum())(x)[1, 1], 4.0)


@pytest.mark.parametrize("window", [3, 34])
def test_sum_and_product(window):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 40))
    op = lambda a, b: {"sum": a["sum"] + b["sum"], "product": a["product"] * b["product"]}

    def f(x, y, i, j):
        tree = {"sum": x, "product": y}
        out = reduce_window(tree, {"sum": i, "product": j}, op, (window,), (2,), "SAME")
        return (out["sum"] * jnp.sin(out["product"])).sum()

    def plain(x, y, i, j):
        pads = [tuple(lax.padtype_to_pads((40,), (window,), (2,), "SAME")[0])]
        op = lambda a, b: [a[0] + b[0], a[1] * b[1]]
        total, product = loop([x, y], [i, j], op, (window,), (2,), pads)
        return (total * np.sin(product)).sum()

    point = (x, y, 0.5, 1.5)
    np.testing.assert_allclose(f(*point), plain(*point), rtol=1e-12)
    direction = [rng.normal(size=40), rng.normal(size=40), 0.3, -0.7]
    got = jax.jvp(jax.jit(f), point, tuple(direction))[1]
    np.testing.assert_allclose(got, first(plain, point, direction), rtol=1e-6)
    gradient = jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*point)
    np.testing.assert_allclose(sum(np.vdot(g, d) for g, d in zip(gradient, direction)), got)


def test_online_softmax():
    x = jnp.asarray(np.random.default_rng(0).normal(size=12))

    def op(a, b):
        m = jnp.maximum(a[0], b[0])
        return m, a[1] * jnp.exp(a[0] - m) + b[1] * jnp.exp(b[0] - m)

    def log_sum(x):
        m, s = reduce_window((x, jnp.ones_like(x)), (-1e30, 0.0), op, (4,), (2,))
        return m + jnp.log(s)

    windows = lambda x: jnp.stack([x[i : i + 4] for i in range(0, 9, 2)])
    plain = lambda x: jax.nn.logsumexp(windows(x), axis=1)
    np.testing.assert_allclose(log_sum(x), plain(x), rtol=1e-12)
    gradient = jax.jit(jax.jacobian(log_sum))(x)
    np.testing.assert_allclose(gradient, jax.jacobian(plain)(x), atol=1e-12)
