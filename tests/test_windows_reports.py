"""The public reports on windowed reductions, each by its name, with the value a plain loop gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pybridge import avg_pool, max_pool, reduce_window

pytestmark = pytest.mark.usefixtures("unoptimized")

BOTH_ORDERS = [
    lambda d, f: jax.jit(d(f)),
    lambda d, f: d(jax.jit(f)),
    lambda d, f: d(f),
]


@pytest.mark.parametrize("order", BOTH_ORDERS)
@pytest.mark.parametrize("init", ["numpy zero", "zero made inside", "traced"])
def test_jax_7815_jacobian_of_a_padded_sum(order, init):
    p = jnp.array([[0.7]])

    def pool(p, zero=0.0):
        start = {
            "numpy zero": np.zeros((), np.float32),
            "zero made inside": jnp.zeros((), p.dtype),
            "traced": zero,
        }[init]
        return reduce_window(p, start, lax.add, (1, 1), (2, 1), [(0, 0), (1, 0)])

    np.testing.assert_array_equal(jax.jit(pool)(p), [[0.0, p[0, 0]]])
    for derivative in (jax.jacrev, jax.jacfwd):
        got = order(derivative, pool)(p, 0.0)
        np.testing.assert_array_equal(got.reshape(-1), [0.0, 1.0])


@pytest.mark.parametrize("order", BOTH_ORDERS)
@pytest.mark.parametrize("op", [lax.add, lax.max, lambda a, b: a + jnp.sin(b)])
def test_jax_7860_padding_wider_than_the_window(order, op):
    """The derivative's window would have negative padding."""
    p = jnp.array([[0.0]])
    init = -jnp.inf if op is lax.max else 0.0
    pool = lambda p: reduce_window(p, init, op, (1, 1), (2, 1), [(0, 0), (1, 0)])
    got = order(jax.jacobian, pool)(p)
    np.testing.assert_array_equal(got.reshape(-1), [0.0, 1.0])


@pytest.mark.parametrize(("op", "init"), [(lax.add, 0.0), (lax.max, -jnp.inf), (lax.mul, 1.0)])
def test_jax_10834_scalar_operand(op, init):
    gradient = jax.jit(jax.grad(lambda x: reduce_window(x, init, op, ())))
    assert gradient(2.0) == 1.0


@pytest.mark.parametrize("order", BOTH_ORDERS[:2])
def test_max_from_zero_under_jit_and_grad(order):
    """The report on max pooling with init 0.0: seeds 001."""
    x = jnp.array([[[[-1.0, 2.0], [1.0, 0.5]]]])
    step = lambda x: reduce_window(x, jnp.float32(0.0), lax.max, (1, 1, 2, 2), (1, 1, 2, 2))
    got = order(jax.grad, lambda x: step(x).sum())(x)
    np.testing.assert_array_equal(got, [[[[0.0, 1.0], [0.0, 0.0]]]])
    np.testing.assert_array_equal(order(jax.grad, lambda x: step(x).sum())(-abs(x)), 0 * x)


def test_jax_32548_tangents_of_a_maximum():
    x = jnp.array([1, 3, 2, -1, 4, 0.5])
    pool = lambda x: reduce_window(x, -jnp.inf, lax.max, (2,))
    for transform in (lambda f: f, jax.jit):
        tangent = transform(lambda x, t: jax.jvp(pool, (x,), (t,))[1])(x, jnp.arange(1.0, 7.0))
        np.testing.assert_array_equal(tangent, [2, 2, 3, 5, 5])


def test_jax_32548_symbolic_zero_tangents():
    """Of two arguments one has no tangent: it is not made up."""
    x = jnp.array([1.0, 3.0, 2.0])
    f = lambda x, init: reduce_window(x, init, lax.max, (2,))
    np.testing.assert_array_equal(jax.jacfwd(f, argnums=1)(x, 2.5), [0.0, 0.0])
    np.testing.assert_array_equal(jax.jacfwd(f, argnums=1)(x, 9.0), [1.0, 1.0])


def test_jax_32474_order_of_a_reducer_that_does_not_commute():
    x = jnp.array([2.0, 3.0, 5.0])
    op = lambda a, b: a * 0.5 + b * b
    f = lambda x: reduce_window(x, 1.0, op, (3,))[0]
    assert f(x) == ((0.5 + 4) * 0.5 + 9) * 0.5 + 25
    np.testing.assert_array_equal(jax.jit(jax.grad(f))(x), [0.25 * 4, 0.5 * 6, 10])


def test_jax_628_and_274_second_derivatives_of_pooling():
    x = jnp.array([1.0, 3.0, 2.0, 5.0])
    energy = lambda x: (reduce_window(x, -jnp.inf, lax.max, (2,)) ** 2).sum()
    np.testing.assert_array_equal(jax.jit(jax.hessian(energy))(x), np.diag([0.0, 4.0, 0.0, 2.0]))
    power = lambda x: (reduce_window(x, 0.0, lax.add, (2,)) ** 2).sum()
    want = 2 * np.array([[1, 1, 0, 0], [1, 2, 1, 0], [0, 1, 2, 1], [0, 0, 1, 1]])
    np.testing.assert_array_equal(jax.jit(jax.hessian(power))(x), want)


def test_jax_1731_batched_jvp_of_pooling():
    xs = jnp.array([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]])
    pool = lambda x: reduce_window(x, -jnp.inf, lax.max, (2,))
    tangent = jax.vmap(lambda x, t: jax.jvp(pool, (x,), (t,))[1])(xs, 10 * xs)
    np.testing.assert_array_equal(tangent, [[30.0, 30.0], [50.0, 60.0]])


@pytest.mark.parametrize("init", [0.0, 1.0])
def test_xla_48715_negative_padding_eager_and_compiled(init):
    x = jnp.arange(1.0, 7.0)
    pool = lambda x: reduce_window(x, init, lax.add, (2,), (2,), [(-1, -2)])
    want = np.array([2.0 + 3.0]) + init
    for f in (pool, jax.jit(pool)):
        np.testing.assert_array_equal(f(x), want)
        np.testing.assert_array_equal(jax.jacobian(f)(x), [[0, 1, 1, 0, 0, 0]])
    largest = lambda x: reduce_window(x, -jnp.inf, lax.max, (2,), (2,), [(-1, -2)])
    np.testing.assert_array_equal(jax.jit(jax.jacobian(largest))(x), [[0, 0, 1, 0, 0, 0]])


def test_ocannl_512_overlapping_maxima():
    x = jnp.array([5.0, 3.0, 1.0, 2.0, 5.0])
    gradient = jax.grad(lambda x: reduce_window(x, -jnp.inf, lax.max, (2,)).sum())(x)
    np.testing.assert_array_equal(gradient, [1, 1, 0, 1, 1])


def test_nnlib_205_and_flux_1197_overlapping_windows_accumulate():
    x = jnp.array([1.0, 9.0, 2.0, 3.0])
    gradient = jax.jit(jax.grad(lambda x: max_pool(x[None], (3,), 1).sum()))(x)
    np.testing.assert_array_equal(gradient, [0, 2, 0, 0])


@pytest.mark.parametrize(
    ("ties", "want"), [("first", [0, 1, 0, 0]), ("split", [0, 1 / 3, 1 / 3, 1 / 3])]
)
def test_tensorflow_4886_one_rule_for_ties(ties, want):
    x = jnp.array([1.0, 2.0, 2.0, 2.0])
    for f in (
        lambda x: reduce_window(x, -jnp.inf, lax.max, (4,), ties=ties)[0],
        lambda x: reduce_window(x, jnp.min(x), jnp.maximum, (4,), ties=ties)[0],
        lambda x: max_pool(x[None], (4,), ties=ties)[0, 0],
    ):
        for derivative in (jax.grad(f), jax.jit(jax.grad(f)), jax.jacfwd(f)):
            np.testing.assert_allclose(derivative(x), want, rtol=1e-6)


@pytest.mark.parametrize("op", [lax.max, lax.min])
def test_tensorflow_118673_and_pytorch_7645_nan_propagates(op):
    x = jnp.array([1.0, jnp.nan, 3.0, 2.0])
    init = -jnp.inf if op is lax.max else jnp.inf
    value, pullback = jax.vjp(lambda x: reduce_window(x, init, op, (2,)), x)
    np.testing.assert_array_equal(jnp.isnan(value), [True, True, False])
    np.testing.assert_array_equal(pullback(jnp.array([1.0, 10.0, 0.0]))[0], [0, 11, 0, 0])


def test_pytorch_198119_mean_of_an_overhanging_window():
    x = jnp.arange(1.0, 6.0)[None]
    got = avg_pool(x, (2,), ceil_mode=True)
    np.testing.assert_array_equal(got, [[1.5, 3.5, 5.0]])
    gradient = jax.grad(lambda x: avg_pool(x, (2,), ceil_mode=True).sum())(x)
    np.testing.assert_array_equal(gradient, [[0.5, 0.5, 0.5, 0.5, 1.0]])


def test_pytorch_45357_no_window_beyond_the_end():
    x = jnp.ones((1, 1, 6, 7))
    got = max_pool(x, (1, 1), (2, 2), ceil_mode=True)
    assert got.shape == (1, 1, 3, 4)
    assert jnp.isfinite(got).all()


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "length", "want"),
    [(2, 3, 0, 4, [1.0, 3.0]), (1, 3, 0, 5, [0.0, 3.0]), (2, 2, 1, 3, [0.0, 2.0])],
)
def test_equinox_175_ceil_mode(kernel, stride, padding, length, want):
    x = jnp.arange(float(length))[None]
    got = max_pool(x, (kernel,), (stride,), padding, ceil_mode=True)
    np.testing.assert_array_equal(got, [want])


def test_max_over_padding_and_minus_infinity_keeps_its_gradient():
    x = jnp.array([-jnp.inf, -jnp.inf])
    pool = lambda x: reduce_window(x, -jnp.inf, lax.max, (2,), None, [(1, 1)])
    jacobian = jax.jit(jax.jacobian(pool))(x)
    np.testing.assert_array_equal(jacobian, [[1, 0], [1, 0], [0, 1]])


def test_reducers_that_close_over_arrays_and_tracers():
    """NotImplementedError and an unhashable closure in lax."""
    x = jnp.arange(3.0)
    weights = jnp.array(2.0)
    np.testing.assert_array_equal(
        reduce_window(x, 0.0, lambda a, b: a + weights * b, (2,)), [2.0, 6.0]
    )
    f = lambda w: reduce_window(x, 0.0, lambda a, b: a + w * b, (2,)).sum()
    assert jax.jit(jax.grad(f))(2.0) == 4.0
